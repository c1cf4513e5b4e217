"""Convert Anthropic's messages, which are lists of blocks, into the messages that chat templates read."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jaxserve.api.messages.protocol import Block, InputMessage, Source
from jaxserve.api.tasks.message_order import NO_IMAGE, Message, ordered, without_header
from jaxserve.errors import InvalidValueError, UnsupportedParameterError

_SKIPPED = frozenset(
    {
        "redacted_thinking",
        "server_tool_use",
        "web_search_tool_result",
        "web_fetch_tool_result",
        "code_execution_tool_result",
        "bash_code_execution_tool_result",
        "text_editor_code_execution_tool_result",
        "mcp_tool_use",
        "mcp_tool_result",
        "container_upload",
        "tool_search_tool_result",
        "tool_reference",
    }
)


def system_text(system: str | Sequence[Block] | None) -> str:
    """Return the system prompt without the header that differs in every conversation."""
    if system is None:
        return ""
    texts = [system] if isinstance(system, str) else [block.text or "" for block in system if block.type == "text"]
    return "\n".join(text for text in map(without_header, texts) if text)


def check_blocks(
    system: str | Sequence[Block] | None, messages: Sequence[InputMessage], note: Callable[[str], None]
) -> None:
    """Check what the types cannot express. Raises a RequestError that names the block.

    note: called with the name of a kind of block that is dropped
    """
    for block in system if isinstance(system, list) else ():
        if block.type != "text":
            note(f"system.{block.type}")
    for number, message in enumerate(messages):
        if isinstance(message.content, str):
            continue
        for place, block in enumerate(message.content):
            param = f"messages.{number}.content.{place}"
            _check(block, param, note)
            if block.type == ("tool_use" if message.role == "user" else "tool_result"):
                raise InvalidValueError(f"{param}: a {message.role}'s message has no {block.type}.", param=param)


def _check(block: Block, param: str, note: Callable[[str], None]) -> None:
    needed = {"text": "text", "tool_use": "name", "tool_result": "tool_use_id", "thinking": "thinking"}.get(block.type)
    if needed is not None and getattr(block, needed) is None:
        raise InvalidValueError(f"{param}.{needed} is missing.", param=param, code="missing_required_parameter")
    if block.type == "document":
        _check_document(block, param)
    elif block.type == "image" or block.type in _SKIPPED:
        note(block.type)
    elif needed is None and block.type != "search_result":
        raise InvalidValueError(f"{param}.type: {block.type!r} is no type of block.", param=f"{param}.type")
    for place, inner in enumerate(block.content if isinstance(block.content, list) else ()):
        _check(inner, f"{param}.content.{place}", note)


def _check_document(block: Block, param: str) -> None:
    kind = block.source.type if isinstance(block.source, Source) else "missing"
    if kind not in ("text", "content"):
        message = f"{param}: a document with a source of type {kind!r} cannot be read; send its text."
        raise UnsupportedParameterError(message, param=param)


def template_messages(system: str, messages: Sequence[InputMessage], *, system_in_middle: bool) -> list[Message]:
    """Return the messages as chat templates read them, see `ordered`."""
    converted = [each for message in messages for each in _converted(message)]
    if system:
        converted.insert(0, {"role": "system", "content": system})
    return ordered(converted, system_in_middle=system_in_middle)


def _converted(message: InputMessage) -> Iterator[Message]:
    blocks = [Block(type="text", text=message.content)] if isinstance(message.content, str) else message.content
    if message.role == "assistant":
        yield _assistant(blocks)
        return
    others = [block for block in blocks if block.type != "tool_result"]
    yield from (_tool_message(block) for block in blocks if block.type == "tool_result")
    text = _text(others)
    if text or len(others) == len(blocks):
        yield {"role": message.role, "content": without_header(text) if message.role == "system" else text}


def _assistant(blocks: Sequence[Block]) -> Message:
    message: Message = {"role": "assistant", "content": _text(blocks)}
    reasoning = "\n".join(block.thinking or "" for block in blocks if block.type == "thinking")
    if reasoning:
        message["reasoning_content"] = reasoning
    calls = [_call(block) for block in blocks if block.type == "tool_use"]
    return message | {"tool_calls": calls} if calls else message


def _call(block: Block) -> dict[str, Any]:
    arguments = json.dumps(block.input or {}, ensure_ascii=False, separators=(",", ":"))
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": arguments}}


def _tool_message(block: Block) -> Message:
    content = block.content
    text = content if isinstance(content, str) else _text(content or ())
    if block.is_error:
        text = f"Error: {text}"
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": text}


def _text(blocks: Sequence[Block]) -> str:
    return "\n".join(text for text in map(_text_of, blocks) if text)


def _text_of(block: Block) -> str:
    """Return the text of a block that a model which reads only text can be shown; "" for other blocks."""
    if block.type == "text":
        return block.text or ""
    if block.type == "image":
        return NO_IMAGE
    if block.type == "tool_result":  # inside another one
        return block.content if isinstance(block.content, str) else _text(block.content or ())
    if block.type == "search_result":
        return "\n".join(filter(None, [block.title, _text(block.content if isinstance(block.content, list) else ())]))
    if block.type == "document" and isinstance(block.source, Source):
        inner = block.source.data if block.source.type == "text" else _nested(block.source.content)
        return "\n".join(filter(None, [block.title, block.context, inner]))
    return ""


def _nested(content: Any) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "\n".join(str(part.get("text") or "") for part in parts if isinstance(part, dict))
