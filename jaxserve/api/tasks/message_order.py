"""Put the messages of a conversation in the order and form that chat templates expect."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

NO_IMAGE = "[An image was here. This model reads text only.]"

Message = dict[str, Any]


# Claude Code begins its system prompt with this line. It differs in every conversation, so with it no two
# conversations would share the 20,000 tokens of the prompt that follow.
_CHANGING_HEADER = "x-anthropic-billing-header:"


def without_header(text: str) -> str:
    """Return the text of a system message without the line that differs in every conversation of Claude Code."""
    return text.partition("\n")[2] if text.startswith(_CHANGING_HEADER) else text


def ordered(messages: Sequence[Message], *, system_in_middle: bool) -> list[Message]:
    """Return the messages as chat templates read them.

    Neighbours of one role are joined, the results of calls stand behind them in their order, and empty turns of the
    assistant at the end are left out.
    system_in_middle: the template takes system messages after the first one; else see `in_place`
    """
    messages = list(messages)
    while messages and messages[-1]["role"] == "assistant" and not _says_something(messages[-1]):
        messages.pop()  # an empty turn of the assistant is neither continued nor answered
    messages = in_call_order(messages)
    return joined(messages if system_in_middle else in_place(messages))


def in_place(messages: Sequence[Message]) -> list[Message]:
    """Put each late system message into the turn of the user or tool that it follows, for templates that take none.

    Agents send a reminder after every result of a tool. In its place it leaves the tokens before it as they were, so
    that the next request finds them in the prefix cache; at the head it would change all of them. After an
    assistant's turn it becomes a user's. The system messages at the start are joined into one.
    """
    leading = list(itertools.takewhile(_is_system, messages))
    out: list[Message] = [functools.reduce(_with_content, leading)] if leading else []
    has_reminder = False  # the last turn is a user's with a late system message: what the user goes on to say joins it
    for message in messages[len(leading) :]:
        follows_turn = out and out[-1]["role"] in ("user", "tool")
        if _is_system(message) and not follows_turn:
            out.append({"role": "user", "content": message["content"]})
        elif _is_system(message) or (has_reminder and message["role"] == "user"):
            out[-1] = _with_content(out[-1], message)
        else:
            out.append(message)
            has_reminder = False
            continue
        has_reminder = out[-1]["role"] == "user"
    return out


def _is_system(message: Message) -> bool:
    return message["role"] in ("system", "developer")


def _with_content(message: Message, later: Message) -> Message:
    """Return the message with the content of a later one behind its own: texts, or lists of parts."""
    first, second = message.get("content") or "", later.get("content") or ""
    if isinstance(first, str) and isinstance(second, str):
        return message | {"content": "\n".join(filter(None, [first, second]))}
    return message | {"content": [*_parts(first), *_parts(second)]}


def _parts(content: str | list[Any]) -> list[Any]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


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
