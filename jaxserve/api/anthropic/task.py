"""Read a task from the body of Anthropic's /v1/messages.

Anthropic's messages are lists of blocks. They become the messages that chat templates read.
"""

from __future__ import annotations

import functools
import itertools
import json
import operator
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jaxserve.api.anthropic.protocol import (
    Block,
    ChangedTool,
    CountTokensRequest,
    InputMessage,
    MessagesRequest,
    MessageTool,
    Source,
)
from jaxserve.api.generate.pictures import PicturePart, joined_content, picture_of_base64
from jaxserve.api.generate.task import (
    ChatMessages,
    ChatPrompt,
    Constraint,
    RequestOptions,
    native_params,
    thinking,
    thinking_effort,
    with_watermark,
)
from jaxserve.api.generate.tools import NO_IMAGE, Message, Mode, ToolUse, ordered, shown_function, without_header
from jaxserve.api.ranges import MAX_STOP_CHARS
from jaxserve.api.sglang.protocol import NativeSampling
from jaxserve.api.state import ServerState
from jaxserve.config_types import reveal
from jaxserve.errors import InvalidSchemaError, InvalidValueError, UnsupportedParameterError
from jaxserve.grammar.tools import GrammarTool
from jaxserve.grammar.translate import schema_spec

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
    }
)

# kind of block -> the field that it must have
_NEEDED = {
    "text": "text",
    "tool_use": "name",
    "tool_result": "tool_use_id",
    "thinking": "thinking",
    "tool_reference": "tool_name",
    "tool_addition": "tool",
    "tool_removal": "tool",
}


def system_text(system: str | Sequence[Block] | None) -> str:
    """Return the system prompt without the header of Claude Code that differs in every conversation."""
    if system is None:
        return ""
    texts = [system] if isinstance(system, str) else [block.text or "" for block in system if block.type == "text"]
    return "\n".join(text for text in map(without_header, texts) if text)


def check_blocks(
    system: str | Sequence[Block] | None,
    messages: Sequence[InputMessage],
    note: Callable[[str], None],
    *,
    takes_pictures: bool,
) -> None:
    """Check rules that the types cannot express. Raises a RequestError that names the block.

    note: called with the kind of each block that is dropped. takes_pictures: whether the model reads pictures
    """
    for block in system if isinstance(system, list) else ():
        if block.type != "text":
            note(f"system.{block.type}")
    for number, message in enumerate(messages):
        if isinstance(message.content, str):
            continue
        for place, block in enumerate(message.content):
            param = f"messages.{number}.content.{place}"
            _check(block, param, note, takes_pictures)
            if block.type == "image" and message.role != "user" and takes_pictures:
                raise InvalidValueError(f"{param}: images are taken in user messages and tool results.", param=param)
            if block.type == ("tool_use" if message.role == "user" else "tool_result"):
                raise InvalidValueError(f"{param}: a {message.role}'s message has no {block.type}.", param=param)


def _check(block: Block, param: str, note: Callable[[str], None], takes_pictures: bool) -> None:
    if block.type in _SKIPPED:
        note(block.type)
        return
    needed = _NEEDED.get(block.type)
    if needed is not None and getattr(block, needed) is None:
        raise InvalidValueError(f"{param}.{needed} is missing.", param=param, code="missing_required_parameter")
    if block.type == "document":
        _check_document(block, param)
    elif block.type == "image" and takes_pictures:
        _check_image(block, param)
    elif block.type == "image":
        note(block.type)
    elif (changed := changed_tool(block)) is not None and not changed.is_own:
        note(f"{block.type}.{changed.type}")
    elif needed is None and block.type != "search_result":
        raise InvalidValueError(f"{param}.type: {block.type!r} is no type of block.", param=f"{param}.type")
    if isinstance(block.content, dict):
        raise InvalidValueError(f"{param}.content: an object is no list of blocks.", param=f"{param}.content")
    for place, inner in enumerate(block.content if isinstance(block.content, list) else ()):
        _check(inner, f"{param}.content.{place}", note, takes_pictures)


def _check_image(block: Block, param: str) -> None:
    source = block.source if isinstance(block.source, Source) else None
    kind = source.type if source is not None else "missing"
    if kind not in ("base64", "url"):
        message = f"{param}: an image with a source of type {kind!r} cannot be read; send it as base64."
        raise UnsupportedParameterError(message, param=param)
    name = "data" if kind == "base64" else "url"
    if getattr(source, name) is None:
        where = f"{param}.source.{name}"
        raise InvalidValueError(f"{where} is missing.", param=where, code="missing_required_parameter")


def _picture(block: Block, param: str) -> PicturePart:
    assert isinstance(block.source, Source), "it was checked"
    where = f"{param}.source"
    if block.source.type == "url":
        return PicturePart(block.source.url or "", where)
    return picture_of_base64(block.source.data or "", where)


def _check_document(block: Block, param: str) -> None:
    kind = block.source.type if isinstance(block.source, Source) else "missing"
    if kind not in ("text", "content"):
        message = f"{param}: a document with a source of type {kind!r} cannot be read; send its text."
        raise UnsupportedParameterError(message, param=param)


class OfferedTools:
    """The client's own tools that a conversation offers.

    A deferred tool is not at the head of the prompt, where it would change all tokens after it. Its definition is in
    the message that adds it. If the request asks Anthropic to search for tools, no tool is deferred, because this
    server does not search.

    head: the tools at the head of the prompt. callable: the tools that the model may call, by name
    """

    def __init__(self, tools: Sequence[MessageTool]) -> None:
        self._known = {tool.name or "": tool for tool in tools if tool.is_own}
        is_searched = any((tool.type or "").startswith("tool_search_tool") for tool in tools)
        self.head = [tool for tool in self._known.values() if is_searched or not tool.defer_loading]
        self.callable = {tool.name or "": tool for tool in self.head}

    def follow(self, messages: Sequence[InputMessage]) -> list[InputMessage]:
        """Return the conversation with texts in place of blocks that add or remove tools.

        Raises InvalidValueError if a block names an unknown tool.
        """
        return [self._message(message, f"messages.{number}") for number, message in enumerate(messages)]

    def _message(self, message: InputMessage, param: str) -> InputMessage:
        if isinstance(message.content, str):
            return message
        content = self._blocks(message.content, param)
        return message if content is message.content else message.model_copy(update={"content": content})

    def _blocks(self, blocks: list[Block], param: str) -> list[Block]:
        found = [self._block(block, f"{param}.content.{place}") for place, block in enumerate(blocks)]
        return blocks if all(map(operator.is_, found, blocks)) else found

    def _block(self, block: Block, param: str) -> Block:
        if block.type == "tool_result" and isinstance(block.content, list):
            content = self._blocks(block.content, param)
            return block if content is block.content else block.model_copy(update={"content": content})
        changed = changed_tool(block)
        if changed is None or not changed.is_own:
            return block
        tool = changed.definition or self._known.get(changed.name or "")
        if tool is None:
            raise InvalidValueError(f"{param}: there is no tool {changed.name!r}.", param=param)
        name = tool.name or ""
        if block.type == "tool_removal":
            self.callable.pop(name, None)
            return Block(type="text", text=f"The function {name} cannot be called any more.")
        self._known[name] = self.callable[name] = tool
        function = shown_function(name, tool.description, tool.input_schema)
        return Block(type="text", text=f"A function you can call now: {json.dumps(function, ensure_ascii=False)}")


def changed_tool(block: Block) -> ChangedTool | None:
    """Return the tool that a block adds or removes; None for another block."""
    if block.type == "tool_reference":
        return ChangedTool(type=block.type, name=block.tool_name)
    return block.tool if block.type in ("tool_addition", "tool_removal") else None


def template_messages(
    system: str, messages: Sequence[InputMessage], *, system_in_middle: bool, takes_pictures: bool = False
) -> list[Message]:
    """Return the messages as chat templates read them, see `ordered`.

    takes_pictures: whether the model reads pictures; if not, a line of text stands for each
    """
    converted = [
        each
        for number, message in enumerate(messages)
        for each in _converted(message, f"messages.{number}.content", takes_pictures)
    ]
    if system:
        converted.insert(0, {"role": "system", "content": system})
    return ordered(converted, system_in_middle=system_in_middle)


def _converted(message: InputMessage, param: str, takes_pictures: bool) -> Iterator[Message]:
    blocks = [Block(type="text", text=message.content)] if isinstance(message.content, str) else message.content
    if message.role == "assistant":
        yield _assistant(blocks)
        return
    places = [(block, f"{param}.{place}") for place, block in enumerate(blocks)]
    others = [each for each in places if each[0].type != "tool_result"]
    yield from (_tool_message(*each, takes_pictures) for each in places if each[0].type == "tool_result")
    found = _with_pictures(others, takes_pictures)
    if found or len(others) == len(blocks):
        if message.role == "system" and isinstance(found, str):
            found = without_header(found)
        yield {"role": message.role, "content": found}


def _with_pictures(places: Sequence[tuple[Block, str]], takes_pictures: bool) -> str | list[Any]:
    """Return the content of blocks with their fields: a text, or parts if there is a picture that the model reads."""
    if not takes_pictures:
        return _text([block for block, _ in places])
    return joined_content(list(_pieces(places)))


def _pieces(places: Sequence[tuple[Block, str]]) -> Iterator[str | PicturePart]:
    for block, param in places:
        inner = block.content if block.type == "tool_result" else None
        if block.type == "image":
            yield _picture(block, param)
        elif isinstance(inner, list):
            yield from _pieces([(each, f"{param}.content.{place}") for place, each in enumerate(inner)])
        else:
            yield _text_of(block)


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


def _tool_message(block: Block, param: str, takes_pictures: bool) -> Message:
    found = _with_pictures([(block, param)], takes_pictures)
    if block.is_error:
        found = f"Error: {found}" if isinstance(found, str) else [{"type": "text", "text": "Error:"}, *found]
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": found}


def _text(blocks: Sequence[Block]) -> str:
    return "\n".join(text for text in map(_text_of, blocks) if text)


def _text_of(block: Block) -> str:
    """Return the text of a block for a model that reads only text; "" for a block without text."""
    if block.type == "text":
        return block.text or ""
    if block.type == "image":
        return NO_IMAGE
    if block.type == "tool_result":  # inside another tool_result
        return _content(block)
    if block.type == "search_result":
        return "\n".join(filter(None, [block.title, "" if isinstance(block.content, str) else _content(block)]))
    if block.type == "document" and isinstance(block.source, Source):
        inner = block.source.data if block.source.type == "text" else _nested(block.source.content)
        return "\n".join(filter(None, [block.title, block.context, inner]))
    return ""


def _content(block: Block) -> str:
    """Return the text of what is in a block."""
    if isinstance(block.content, str):
        return block.content
    return _text(block.content if isinstance(block.content, list) else ())


def _nested(content: Any) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "\n".join(str(part.get("text") or "") for part in parts if isinstance(part, dict))


MESSAGES_ROUTE = "/v1/messages"


@dataclass(frozen=True, kw_only=True)
class MessageOptions:
    """The options of the answer.

    max_tokens: the limit of the request, so that its end can be told from the end of the context. 0: the answer has no
      content. The engine always samples one token, which is dropped
    hides_thinking: whether thinking blocks have no text
    """

    max_tokens: int
    hides_thinking: bool = False


@dataclass(frozen=True, kw_only=True)
class MessagesTask:
    """The conversation to answer, the name and queueing of the request, and the options of the answer."""

    prompt: ChatPrompt
    request: RequestOptions
    options: MessageOptions


def messages_task(body: MessagesRequest, state: ServerState) -> MessagesTask:
    """Read and check a body. Raises a RequestError that names the field."""
    sampling = NativeSampling.model_construct(
        max_new_tokens=body.max_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        stop=body.stop_sequences,
    )
    if sum(map(len, body.stop_sequences or ())) > MAX_STOP_CHARS:
        message = f"stop_sequences has more than {MAX_STOP_CHARS} characters in all."
        raise InvalidValueError(message, param="stop_sequences")
    budget = body.thinking.budget_tokens if body.thinking is not None and body.thinking.type == "enabled" else None
    watermark_key = reveal(state.config.server.watermark_key)
    if budget is not None and state.parsers.think_tags is None:
        state.unknown_fields.note(MESSAGES_ROUTE, ["thinking.budget_tokens"])
    messages, tools = conversation(body, state)
    prompt = ChatPrompt(
        messages=messages,
        continued=_prefill(body),
        sampling=with_watermark(native_params(sampling, state.engine.info), None, watermark_key, "watermark"),
        constraint=_constraint(body),
        tools=tools,
        thinking_budget=None if state.parsers.think_tags is None else budget,
    )
    hides = body.thinking is not None and body.thinking.display == "omitted"
    options = MessageOptions(max_tokens=body.max_tokens, hides_thinking=hides)
    return MessagesTask(prompt=prompt, request=RequestOptions(request_id=f"msg_{uuid.uuid4().hex}"), options=options)


def count_prompt(body: CountTokensRequest, state: ServerState) -> ChatMessages:
    """Return the conversation whose tokens are counted. Raises a RequestError that names the field."""
    return conversation(body, state)[0]


def conversation(body: CountTokensRequest, state: ServerState) -> tuple[ChatMessages, ToolUse]:
    """Return the conversation for the chat template, and its tools. Raises a RequestError that names the block."""
    takes = state.takes_pictures

    def note(kind: str) -> None:
        state.unknown_fields.note(MESSAGES_ROUTE, [kind])

    check_blocks(body.system, body.messages, note, takes_pictures=takes)
    offered = OfferedTools(body.tools or ())
    messages = offered.follow(body.messages)
    tools = _tool_use(body, offered, state)
    make = functools.partial(
        template_messages,
        system_text(body.system),
        messages,
        system_in_middle=state.takes_late_system,
        takes_pictures=takes,
    )
    variables: dict[str, Any] = {}
    if body.thinking is not None and body.thinking.type != "adaptive":
        variables |= thinking(body.thinking.type == "enabled")
    effort = body.output_config.effort if body.output_config is not None else None
    if effort is not None:
        variables |= thinking(False) if effort == "none" else thinking_effort(effort)
    found = ChatMessages(
        make=make,
        size=max(0, body.size - _picture_bytes(messages) if takes else body.size),
        tools=tools.shown,
        variables=variables,
        continue_final_message=bool(_prefill(body)),
    )
    return found, tools


def _picture_bytes(messages: Sequence[InputMessage]) -> int:
    """Return the bytes of the pictures, which no template reads."""

    def of(blocks: Sequence[Block]) -> int:
        own = (len(block.source.data or "") for block in blocks if isinstance(block.source, Source))
        return sum(own) + sum(of(block.content) for block in blocks if isinstance(block.content, list))

    return sum(of(message.content) for message in messages if isinstance(message.content, list))


def _prefill(body: CountTokensRequest) -> str:
    """Return the text of the last message if it is the assistant's, which the output continues; else ""."""
    run = itertools.takewhile(lambda message: message.role == "assistant", reversed(body.messages))
    found = template_messages("", list(run)[::-1], system_in_middle=True)
    return found[-1]["content"] if found and "tool_calls" not in found[-1] else ""


def _constraint(body: MessagesRequest) -> Constraint | None:
    config = body.output_config
    wanted, param = (config.format, "output_config.format") if config and config.format else (None, "output_format")
    wanted = wanted or body.output_format
    if wanted is None:
        return None
    try:
        return schema_spec(wanted.schema_, strict=True), param
    except InvalidSchemaError as error:
        raise InvalidSchemaError(error.message, param=f"{param}.schema") from None


def _tool_use(body: CountTokensRequest, offered: OfferedTools, state: ServerState) -> ToolUse:
    """Read tools and tool_choice. Tools that Anthropic hosts are dropped. Raises a RequestError if one is forced."""
    choice = body.tool_choice
    hosted = [tool for tool in body.tools or () if not tool.is_own]
    state.unknown_fields.note(MESSAGES_ROUTE, [str(tool.type) for tool in hosted])
    for number, tool in enumerate(body.tools or ()):
        if tool.type == "function":
            message = f"tools.{number}.type: {tool.type!r} is OpenAI's; send input_schema."
            raise InvalidValueError(message, param=f"tools.{number}.type")
        if tool.name is None and tool.is_own:
            param = f"tools.{number}.name"
            raise InvalidValueError(f"{param} is missing.", param=param, code="missing_required_parameter")
    own = [tool for tool in body.tools or () if tool.is_own]
    if len({tool.name for tool in own}) < len(own):
        raise InvalidValueError("tools: Tool names must be unique.", param="tools")  # Anthropic's words
    kind = choice.type if choice is not None else "auto"
    tools = list(offered.callable.values())
    shown = tuple(shown_function(tool.name, tool.description, tool.input_schema) for tool in offered.head)
    if kind == "none" or (kind == "auto" and not tools):
        return ToolUse(shown=shown)
    parallel = not (choice is not None and choice.disable_parallel_tool_use)
    if kind == "tool":
        allowed = [_named(choice.name if choice is not None else None, tools, hosted)]
        return ToolUse(tuple(map(_grammar_tool, allowed)), "required", False, shown)
    if not tools:
        raise InvalidValueError("tool_choice asks for a call, but there are no tools.", param="tool_choice")
    mode: Mode = "required" if kind == "any" else "auto"
    return ToolUse(tuple(map(_grammar_tool, tools)), mode, parallel, shown)


def _named(name: str | None, tools: Sequence[MessageTool], hosted: Sequence[MessageTool]) -> MessageTool:
    for tool in tools:
        if tool.name == name:
            return tool
    if name is None:
        code = "missing_required_parameter"
        raise InvalidValueError("tool_choice.name is missing.", param="tool_choice.name", code=code)
    if any(tool.name == name for tool in hosted):
        raise UnsupportedParameterError(
            f"tool_choice.name: {name!r} is not run by this server.", param="tool_choice.name"
        )
    raise InvalidValueError(f"tool_choice.name: there is no tool {name!r}.", param="tool_choice.name")


def _grammar_tool(tool: MessageTool) -> GrammarTool:
    return GrammarTool(tool.name or "", tool.input_schema, strict=bool(tool.strict))
