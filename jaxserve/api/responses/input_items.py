"""Convert the items of a Responses conversation into the messages that chat templates read."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jaxserve.api.responses.protocol import InputItem, ItemPart
from jaxserve.api.tasks.message_order import NO_IMAGE, Message, as_one, ordered, without_header
from jaxserve.errors import InvalidValueError, UnsupportedParameterError

_SKIPPED = frozenset(
    {
        "web_search_call",
        "file_search_call",
        "computer_call",
        "computer_call_output",
        "code_interpreter_call",
        "image_generation_call",
        "local_shell_call",
        "local_shell_call_output",
        "shell_call",
        "shell_call_output",
        "apply_patch_call",
        "apply_patch_call_output",
        "mcp_list_tools",
        "mcp_call",
        "mcp_approval_request",
        "mcp_approval_response",
        "tool_search_call",
        "tool_search_output",
        "program",
        "program_output",
        "additional_tools",
        "configuration_update",
    }
)
_CALLS = ("function_call", "custom_tool_call")
_OUTPUTS = {"function_call_output": "function call", "custom_tool_call_output": "custom tool call"}
_NEEDED = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "custom_tool_call": ("call_id", "name", "input"),
    "function_call_output": ("call_id", "output"),
    "custom_tool_call_output": ("call_id", "output"),
    "item_reference": ("id",),
}
_REFUSED = {"compaction": "a compacted conversation can only be read by the server that made it"}
_TEXTS = frozenset({"input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text"})


@dataclass(frozen=True)
class ItemReader:
    """Reads items.

    system_in_middle: the chat template takes system messages after the first one
    unsealed: decrypts `encrypted_content`; returns "" if this server did not encrypt it
    note: called with the name of a kind of item or part that is dropped
    """

    system_in_middle: bool
    unsealed: Callable[[str], str]
    note: Callable[[str], None]

    def turns(self, items: Sequence[InputItem], param: str, num_kept: int = 0) -> list[list[Message]]:
        """Return the messages of each turn, which begins with a user's message. Raises a RequestError that names the
        item.

        The first turn has all that stands before the first user's message.
        num_kept: number of items at the start that are not in the field `param`
        """
        turns: list[list[Message]] = [[]]
        checked = self._checked(items, param, num_kept)
        for answered, group in itertools.groupby(checked, key=_is_of_assistant):
            messages = [message for item in group for message in self._message(item)]
            if answered:
                turns[-1] += [as_one(messages)] if messages else []
                continue
            for message in messages:
                if message["role"] == "user" and (len(turns) == 1 or turns[-1][-1]["role"] != "user"):
                    turns.append([])
                turns[-1].append(message)
        return turns

    def check(self, items: Sequence[InputItem], param: str) -> None:
        """Check items that are kept for later. The call of an output may be elsewhere. Raises a RequestError."""
        for entry in self._checked(items, param, 0, has_calls=False):
            for _ in self._message(entry):
                pass

    def messages(self, system: str, turns: Sequence[Sequence[Message]]) -> list[Message]:
        """Return the messages of these turns after the system prompt, as templates read them."""
        flat = list(itertools.chain.from_iterable(turns))
        leading = list(itertools.takewhile(lambda message: message["role"] == "system", flat))
        system = "\n".join(filter(None, [system, *(message["content"] for message in leading)]))
        found = [*([{"role": "system", "content": system}] if system else []), *flat[len(leading) :]]
        found = ordered(found, system_in_middle=self.system_in_middle)
        if all(message["role"] == "system" for message in found):
            found.append({"role": "user", "content": ""})  # many templates need a user's message
        return found

    def text(self, content: str | Sequence[ItemPart] | None, param: str) -> str:
        """Return the text of a message's content or of a call's output; an image becomes a line of text."""
        if isinstance(content, str) or content is None:
            return content or ""
        return "\n".join(self._part(part, f"{param}.{place}") for place, part in enumerate(content))

    def _part(self, part: ItemPart, param: str) -> str:
        if part.type in _TEXTS:
            text = part.refusal if part.text is None else part.text
            if text is None:
                raise _missing(f"{param}.text")
            return text
        if part.type in ("input_image", "computer_screenshot"):
            self.note(part.type)
            return NO_IMAGE
        if part.type in ("input_file", "input_audio"):
            message = f"{param}: a part of type {part.type!r} cannot be given to this model, it takes text only."
            raise UnsupportedParameterError(message, param=param)
        raise InvalidValueError(f"{param}.type: {part.type!r} is no type of part.", param=f"{param}.type")

    def _checked(
        self, items: Sequence[InputItem], param: str, num_kept: int, *, has_calls: bool = True
    ) -> Iterator[tuple[str, str, InputItem]]:
        """Yield (type, field, item) of the items that are read. has_calls: the call of each output is among them"""
        calls: set[str | None] = set()
        for number, item in enumerate(items, -num_kept):
            kind, where = item.type or "message", f"{param}.{number}" if number >= 0 else param
            for name in _NEEDED.get(kind, ()):
                if getattr(item, name) is None and (name, item.role) != ("content", "assistant"):
                    raise _missing(f"{where}.{name}")
            if kind in _CALLS:
                calls.add(item.call_id)
            elif kind in _OUTPUTS and has_calls and item.call_id not in calls:
                message = f"No tool call found for {_OUTPUTS[kind]} output with call_id {item.call_id}."
                raise InvalidValueError(message, param=param)
            elif kind in _SKIPPED:
                self.note(kind)
                continue
            elif kind in _REFUSED:
                raise UnsupportedParameterError(f"{where}: {_REFUSED[kind]}.", param=where)
            elif kind not in _NEEDED and kind != "reasoning":
                raise InvalidValueError(f"{where}.type: {kind!r} is no type of item.", param=f"{where}.type")
            yield kind, where, item

    def _message(self, entry: tuple[str, str, InputItem]) -> Iterator[Message]:
        kind, where, item = entry
        if kind == "message":
            role = "system" if item.role == "developer" else item.role
            text = self.text(item.content, f"{where}.content")
            yield {"role": role, "content": without_header(text) if role == "system" else text}
        elif kind == "reasoning":
            text = self._reasoning(item, where)
            if text:
                yield {"role": "assistant", "content": "", "reasoning_content": text}
        elif kind in _CALLS:
            yield {"role": "assistant", "content": "", "tool_calls": [_call(item)]}
        elif kind in _OUTPUTS:
            output = self.text(item.output, f"{where}.output")
            yield {"role": "tool", "tool_call_id": item.call_id, "content": output}
        else:
            raise InvalidValueError(f"{where}: there is no item with id {item.id!r}.", param=where)

    def _reasoning(self, item: InputItem, where: str) -> str:
        """Return the reasoning's text. What was sealed by another server is skipped: clients change servers."""
        if item.content:
            return self.text(item.content, f"{where}.content")
        opened = self.unsealed(item.encrypted_content) if item.encrypted_content else ""
        return opened or self.text(item.summary, f"{where}.summary")


def _is_of_assistant(entry: tuple[str, str, InputItem]) -> bool:
    kind, _, item = entry
    return kind == "reasoning" or kind in _CALLS or item.role == "assistant"


def flat_name(namespace: str | None, name: str) -> str:
    """Return the name under which the model knows a tool, which may be in a namespace."""
    return f"{namespace}__{name}" if namespace else name


def _call(item: InputItem) -> dict[str, Any]:
    arguments = item.arguments or "{}"
    if item.type == "custom_tool_call":
        arguments = json.dumps({"input": item.input}, ensure_ascii=False)
    name = flat_name(item.namespace, item.name or "")
    return {"id": item.call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _missing(param: str) -> InvalidValueError:
    return InvalidValueError(f"{param} is missing.", param=param, code="missing_required_parameter")
