"""Put the messages of a conversation in the order and form that chat templates expect."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

NO_IMAGE = "[An image was here. This model reads text only.]"

Message = dict[str, Any]


def with_system(system: str, messages: Sequence[Message], *, system_in_middle: bool) -> list[Message]:
    """Return the messages after the system prompt, without empty turns of the assistant at their end.

    system_in_middle: the template takes system messages after the first one; else they join the first
    """
    messages = list(messages)
    if not system_in_middle:
        late = [message["content"] for message in messages if message["role"] == "system"]
        system = "\n".join(filter(None, [system, *late]))
        messages = [message for message in messages if message["role"] != "system"]
    while messages and messages[-1]["role"] == "assistant" and not _says_something(messages[-1]):
        messages.pop()  # an empty turn of the assistant is neither continued nor answered
    return [{"role": "system", "content": system}, *messages] if system else messages


def _says_something(message: Message) -> bool:
    return bool(message["content"] or message.get("tool_calls"))


def joined(messages: Sequence[Message]) -> list[Message]:
    """Join neighbours of one role. Tool messages stay apart: each answers one call."""
    runs: list[list[Message]] = []
    for message in messages:
        last = runs[-1][-1] if runs else None
        apart = message["role"] == "tool" or (last is not None and "tool_calls" in last)
        if last is None or last["role"] != message["role"] or apart:
            runs.append([message])
        else:
            runs[-1].append(message)
    return [as_one(run) for run in runs]


def as_one(run: Sequence[Message]) -> Message:
    """Return one message with the texts and calls of several messages of one role."""
    message = dict(run[0])
    for name in ("content", "reasoning_content"):
        texts = [each[name] for each in run if each.get(name)]
        if texts:
            message[name] = "\n".join(texts)
    calls = [call for each in run for call in each.get("tool_calls", ())]
    return message | {"tool_calls": calls} if calls else message


def in_call_order(messages: list[Message]) -> list[Message]:
    """Put the results of an assistant's calls directly behind them, in their order: clients send them as they come.

    A result of no call stays where it is.
    """
    order: dict[str | None, int] | None = None
    out: list[Message] = []
    for is_assistant, group in itertools.groupby(messages, key=lambda message: message["role"] == "assistant"):
        found = list(group)
        if is_assistant:
            calls = [call for message in found for call in message.get("tool_calls") or ()]
            order = {call.get("id"): number for number, call in enumerate(calls)}
        elif order is not None:
            found.sort(key=functools.partial(_place, order))
        out += found
    return out


def _place(order: dict[str | None, int], message: Message) -> int:
    return order.get(message["tool_call_id"], len(order)) if message["role"] == "tool" else len(order)
