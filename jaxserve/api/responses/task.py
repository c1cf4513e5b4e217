"""Read a task from the body of OpenAI's /v1/responses.

`ItemReader` turns its items into the messages that chat templates read. `response_tools` reads its tools, which may be
in namespaces. `responses_task` puts both together with the sampling parameters and the options of the answer.
"""

from __future__ import annotations

import itertools
import json
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ValidationError

from jaxserve.api.body_cost import LARGE_BYTES
from jaxserve.api.fields import SamplingFields
from jaxserve.api.generate.pictures import PicturePart, joined_content
from jaxserve.api.generate.task import (
    ChatMessages,
    ChatPrompt,
    Constraint,
    RequestOptions,
    constraint,
    sampling_params,
    thinking,
    thinking_effort,
)
from jaxserve.api.generate.tools import (
    NO_IMAGE,
    Message,
    Mode,
    ToolUse,
    as_one,
    ordered,
    shown_custom,
    shown_function,
    without_header,
)
from jaxserve.api.http.errors import RESPONSES_PREFIX
from jaxserve.api.ranges import MAX_TOOLS
from jaxserve.api.responses.protocol import (
    SHOWS_ENCRYPTED,
    SHOWS_LOGPROBS,
    InputItem,
    ItemPart,
    ResponsesRequest,
    ResponseTool,
    ResponseToolChoice,
    ToolInputFormat,
)
from jaxserve.api.state import ServerState
from jaxserve.errors import InvalidSchemaError, InvalidValueError, UnsupportedParameterError
from jaxserve.grammar.tools import GrammarTool
from jaxserve.grammar.translate import schema_spec
from jaxserve.types.page_keys import salt_of
from jaxserve.types.sampling import GrammarSpec, SamplingParams

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
    """Read the items of a conversation.

    system_in_middle: whether the chat template takes system messages after the first one
    decrypted: decrypts `encrypted_content`; returns "" if this server did not encrypt it
    note: called with the kind of each item or part that is dropped
    takes_pictures: whether the model reads pictures; if not, a line of text stands for each
    """

    system_in_middle: bool
    decrypted: Callable[[str], str]
    note: Callable[[str], None]
    takes_pictures: bool = False

    def turns(self, items: Sequence[InputItem], param: str, num_kept: int = 0) -> list[list[Message]]:
        """Return the messages of each turn. Raises a RequestError that names the item.

        A turn begins with a user's message. The first turn has the messages before the first user's message.
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
        """Check items that are kept for later. They need not contain the call of an output. Raises a RequestError."""
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
        """Return the text of a content that has no picture. Raises InvalidValueError if it has one."""
        found = self._content(content, param)
        if not isinstance(found, str):
            message = f"{param}: images are taken in user messages and the outputs of calls."
            raise InvalidValueError(message, param=param)
        return found

    def _content(self, content: str | Sequence[ItemPart] | None, param: str) -> str | list[Any]:
        """Return the text of a message's content or of a call's output, or parts if it has a picture."""
        if isinstance(content, str) or content is None:
            return content or ""
        pieces = [self._part(part, f"{param}.{place}") for place, part in enumerate(content)]
        if any(isinstance(piece, PicturePart) for piece in pieces):
            return joined_content(pieces)
        return "\n".join(map(str, pieces))

    def _part(self, part: ItemPart, param: str) -> str | PicturePart:
        if part.type in _TEXTS:
            text = part.refusal if part.text is None else part.text
            if text is None:
                raise _missing(f"{param}.text")
            return text
        if part.type in ("input_image", "computer_screenshot") and self.takes_pictures:
            if part.file_id is not None:
                message = f"{param}.file_id: send the image as a data: URL in image_url."
                raise UnsupportedParameterError(message, param=f"{param}.file_id")
            if part.image_url is None:
                raise _missing(f"{param}.image_url")
            return PicturePart(part.image_url, f"{param}.image_url", part.detail)
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
        """Yield (type, field, item) of the items that are read. has_calls: whether they contain each output's call"""
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
            param = f"{where}.content"
            if role == "system":
                yield {"role": role, "content": without_header(self.text(item.content, param))}
            else:
                read = self._content if role == "user" else self.text
                yield {"role": role, "content": read(item.content, param)}
        elif kind == "reasoning":
            text = self._reasoning(item, where)
            if text:
                yield {"role": "assistant", "content": "", "reasoning_content": text}
        elif kind in _CALLS:
            yield {"role": "assistant", "content": "", "tool_calls": [_call(item)]}
        elif kind in _OUTPUTS:
            output = self._content(item.output, f"{where}.output")
            yield {"role": "tool", "tool_call_id": item.call_id, "content": output}
        else:
            raise InvalidValueError(f"{where}: there is no item with id {item.id!r}.", param=where)

    def _reasoning(self, item: InputItem, where: str) -> str:
        """Return the reasoning's text. Text that another server encrypted is skipped: clients change servers."""
        if item.content:
            return self.text(item.content, f"{where}.content")
        opened = self.decrypted(item.encrypted_content) if item.encrypted_content else ""
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


OWN_TOOLS = ("function", "custom")
MAX_SHOWN_CHARS = 256


@dataclass(frozen=True)
class OwnTool:
    """A tool of the client. name: the name that the client knows. namespace: its namespace; "" if it is in none"""

    tool: ResponseTool
    name: str
    namespace: str = ""

    @property
    def known_as(self) -> str:
        """The name under which the model knows the tool."""
        return flat_name(self.namespace, self.name)

    @property
    def shown(self) -> dict[str, Any]:
        """The tool as chat templates expect it: as a function."""
        if self.tool.type == "custom":
            return shown_custom(self.known_as, self.tool.description)
        return shown_function(self.known_as, self.tool.description, self.tool.parameters)

    @property
    def for_grammar(self) -> GrammarTool:
        """The tool in the form from which the grammar of its calls is made."""
        if self.tool.type == "function":
            return GrammarTool(self.known_as, self.tool.parameters, strict=bool(self.tool.strict))
        form = self.tool.format
        syntax, text = (form.syntax, form.definition) if isinstance(form, ToolInputFormat) else (None, None)
        return GrammarTool(
            self.known_as,
            custom=True,
            regex=text if syntax == "regex" else None,
            lark=text if syntax == "lark" else None,
        )


@dataclass(frozen=True)
class ResponseTools:
    """The tools of a body. by_name: the client's tools, by the name that the model knows"""

    use: ToolUse = field(default_factory=ToolUse)
    by_name: Mapping[str, OwnTool] = field(default_factory=dict)

    def call_names(self, known_as: str) -> dict[str, str]:
        """Return the name of a called tool, and its namespace if it is in one."""
        tool = self.by_name.get(known_as)
        if tool is None or not tool.namespace:
            return {"name": known_as}
        return {"name": tool.name, "namespace": tool.namespace}


def response_tools(body: ResponsesRequest, note: Callable[[str], None]) -> ResponseTools:
    """Read tools, tool_choice and parallel_tool_calls. Raises a RequestError that names the field.

    note: called with the type of each tool that is dropped because this server does not run it
    """
    by_name: dict[str, OwnTool] = {}
    for param, named in _named_tools(body.tools or [], "tools", note):
        if by_name.setdefault(named.known_as, named) != named:
            raise InvalidValueError(f"{param}: another tool is called {named.known_as!r}.", param=param)
    if len(by_name) > MAX_TOOLS:
        raise InvalidValueError(f"tools: there are more than {MAX_TOOLS}, those in namespaces counted.", param="tools")
    mode, allowed = _resolved_tools(body, by_name, note)
    shown = tuple(tool.shown for tool in by_name.values())
    if mode == "none":
        return ResponseTools(ToolUse(shown=shown), by_name)
    is_named = isinstance(body.tool_choice, ResponseToolChoice) and body.tool_choice.type in OWN_TOOLS
    parallel = body.parallel_tool_calls is not False and not is_named
    return ResponseTools(ToolUse(tuple(tool.for_grammar for tool in allowed), mode, parallel, shown), by_name)


def _named_tools(
    tools: list[ResponseTool], param: str, note: Callable[[str], None], namespace: str = ""
) -> Iterator[tuple[str, OwnTool]]:
    """Yield (field, tool) of the client's tools, including the tools in namespaces."""
    for number, tool in enumerate(tools):
        where = f"{param}.{number}"
        if tool.type not in (*OWN_TOOLS, "namespace"):
            note(tool.type)
            continue
        if tool.name is None:
            raise _missing(f"{where}.name")
        if tool.type != "namespace":
            _check_format(tool, f"{where}.format")
            yield where, OwnTool(tool, tool.name, namespace)
        elif namespace:
            raise InvalidValueError(f"{where}: a namespace cannot be in a namespace.", param=where)
        elif tool.tools is None:
            raise _missing(f"{where}.tools")
        else:
            yield from _named_tools(tool.tools, f"{where}.tools", note, tool.name)


def _check_format(tool: ResponseTool, param: str) -> None:
    form = tool.format
    if tool.type == "function" or form is None:
        return
    if not isinstance(form, ToolInputFormat):
        raise InvalidValueError(f"{param} must be an object of type text or grammar.", param=param)
    for name in ("syntax", "definition") if form.type == "grammar" else ():
        if getattr(form, name) is None:
            raise _missing(f"{param}.{name}")


def _resolved_tools(
    body: ResponsesRequest, by_name: Mapping[str, OwnTool], note: Callable[[str], None]
) -> tuple[Mode, list[OwnTool]]:
    """Return (mode, tools that may be called). Raises a RequestError."""
    choice = body.tool_choice
    every = list(by_name.values())
    if choice is None or choice == "auto":
        return ("auto" if every else "none"), every
    if choice == "none":
        return "none", []
    if choice == "required":
        if not every:
            raise InvalidValueError("tool_choice asks for a call, but there are no tools.", param="tool_choice")
        return "required", every
    assert isinstance(choice, ResponseToolChoice)
    if choice.type == "allowed_tools":
        return _allowed(choice, every, note)
    if choice.type not in OWN_TOOLS:
        message = f"tool_choice: tools of type {choice.type!r} are not run by this server."
        raise UnsupportedParameterError(message, param="tool_choice.type")
    if choice.name is None:
        raise _missing("tool_choice.name")
    found = _Index(every).find(choice.type, choice.name, choice.namespace, "tool_choice.name")
    return "required", list(found.values())


def _allowed(
    choice: ResponseToolChoice, every: list[OwnTool], note: Callable[[str], None]
) -> tuple[Mode, list[OwnTool]]:
    if choice.tools is None:
        raise _missing("tool_choice.tools")
    index = _Index(every)
    found: dict[str, OwnTool] = {}
    for number, entry in enumerate(choice.tools):
        param = f"tool_choice.tools.{number}"
        kind = entry.get("type")
        name = entry.get("name")
        space = entry.get("namespace")
        if not isinstance(kind, str) or not isinstance(space, str | None):
            raise InvalidValueError(f"{param} must have a type and a name.", param=param)
        if kind not in (*OWN_TOOLS, "namespace"):
            note(kind)
            continue
        if not isinstance(name, str):
            raise _missing(f"{param}.name")
        found |= index.take_namespace(name, param) if kind == "namespace" else index.find(kind, name, space, param)
    if not found:
        message = "tool_choice.tools names no tool that could be called."
        raise InvalidValueError(message, param="tool_choice.tools")
    return choice.mode or "auto", list(found.values())


class _Index:
    """Find tools by their own name and namespace, by the name that the model knows, or by their own name alone."""

    def __init__(self, every: list[OwnTool]) -> None:
        self._tools: dict[tuple[str, str, str], OwnTool] = {}
        self._spaces: dict[str, dict[str, OwnTool]] = {}
        for tool in every:
            self._tools[tool.tool.type, tool.namespace, tool.name] = tool
            self._spaces.setdefault(tool.namespace, {})[tool.known_as] = tool
        for tool in every:
            for name in (tool.known_as, tool.name):
                self._tools.setdefault((tool.tool.type, "", name), tool)

    def find(self, kind: str, name: str, namespace: str | None, param: str) -> dict[str, OwnTool]:
        """Return the tool by the name that the model knows. Raises InvalidValueError if there is none."""
        tool = self._tools.get((kind, namespace or "", name))
        if tool is None:
            raise InvalidValueError(f"{param}: there is no {kind} tool {name!r}.", param=param)
        return {tool.known_as: tool}

    def take_namespace(self, name: str, param: str) -> dict[str, OwnTool]:
        """Return the tools of a namespace by the names that the model knows; a second call returns none.

        Raises InvalidValueError if there is no such namespace.
        """
        found = self._spaces.get(name)
        if found is None:
            raise InvalidValueError(f"{param}: there is no namespace {name!r}.", param=param)
        self._spaces[name] = {}
        return found


def shown_tools(tools: list[ResponseTool]) -> list[dict[str, Any]]:
    """Return tools as the answer repeats them. A function has all its keys, which some clients need."""
    return [_shown_tool(tool) for tool in tools]


def _shown_tool(tool: ResponseTool) -> dict[str, Any]:
    if tool.type not in (*OWN_TOOLS, "namespace"):
        return {"type": tool.type} | _short(tool.model_extra or {})
    given = {name: getattr(tool, name) for name in tool.model_fields_set}
    if isinstance(tool.format, ToolInputFormat):
        given["format"] = tool.format.model_dump(include=set(ToolInputFormat.model_fields), exclude_unset=True)
    if tool.tools is not None:
        given["tools"] = shown_tools(tool.tools)
    defaults = {"name": None, "description": None, "parameters": None, "strict": False}
    return defaults | given if tool.type == "function" else given


def shown_choice(choice: str | ResponseToolChoice | None) -> str | dict[str, Any]:
    """Return a tool choice as the answer repeats it."""
    if choice is None or isinstance(choice, str):
        return choice or "auto"
    given = choice.model_dump(include={"type", "name", "namespace", "mode"}, exclude_unset=True)
    return given if choice.tools is None else given | {"tools": [_short(entry) for entry in choice.tools]}


def _short(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that are numbers, booleans and short texts. The answer repeats them in three events."""
    return {
        name: value
        for name, value in fields.items()
        if isinstance(value, bool | int) or (isinstance(value, str) and len(value) <= MAX_SHOWN_CHARS)
    }


_SAMPLING = frozenset(SamplingFields.model_fields) & frozenset(ResponsesRequest.model_fields)

Json = dict[str, Any]


@dataclass(frozen=True)
class EarlierItems:
    """Items that a body only refers to.

    before: the JSON of each item before the body's input. referred: id of an item -> its JSON. size: bytes of both
    """

    before: Sequence[bytes] = ()
    referred: Mapping[str, bytes] = field(default_factory=dict)
    size: int = 0


@dataclass(frozen=True)
class ResponseName:
    """The id of a response, and how it is kept. created_at: Unix seconds"""

    id: str = field(default_factory=lambda: f"resp_{uuid.uuid4().hex}")
    created_at: int = field(default_factory=lambda: int(time.time()))
    store: bool = False
    background: bool = False
    conversation_id: str | None = None


@dataclass(frozen=True, kw_only=True)
class ResponseOptions:
    """The options of the answer.

    form: the keys of the response object that are known before the answer, among them its id
    logprobs: number of most likely tokens to show; None: no log-probabilities
    encrypts: whether reasoning is sent in encrypted form too
    only_warms: whether the answer has no output. The engine always samples one token, which is dropped
    """

    form: Json
    tools: ResponseTools
    logprobs: int | None = None
    encrypts: bool = False
    only_warms: bool = False


@dataclass(frozen=True, kw_only=True)
class ResponsesTask:
    """The conversation to answer, the name and queueing of the request, and the options of the answer.

    shortened: returns the conversation without its oldest turns, given their number
    num_droppable: number of turns that may be left out; 0 unless truncation is auto
    """

    prompt: ChatPrompt
    request: RequestOptions
    options: ResponseOptions
    shortened: Callable[[int], ChatMessages]
    num_droppable: int = 0


@dataclass(frozen=True)
class _Conversation:
    """A conversation by turns. The first turn has the messages before the first user's message."""

    system: str
    turns: list[list[Message]]
    reader: ItemReader

    def without(self, count: int) -> list[Message]:
        """Return the messages without the `count` oldest turns. The system messages before them stay."""
        return self.reader.messages(self.system, [self.turns[0], *self.turns[1 + count :]])


async def responses_task(
    body: ResponsesRequest, state: ServerState, owner: str, name: ResponseName, earlier: EarlierItems
) -> ResponsesTask:
    """Read and check a body. owner: the key's name. Raises a RequestError that names the field."""
    _check(body)
    tools = response_tools(body, lambda kind: state.unknown_fields.note(RESPONSES_PREFIX, [kind]))
    found = await _conversation(body, state, owner, earlier)
    include = body.include or ()
    logprobs = (body.top_logprobs or 0) if SHOWS_LOGPROBS in include else None
    fields = SamplingFields.model_construct(**{name: getattr(body, name) for name in _SAMPLING})
    max_tokens = 0 if body.only_warms else body.max_output_tokens
    sampling = sampling_params(fields, state, max_tokens=max_tokens, logprobs=logprobs)
    prompt = ChatPrompt(
        messages=_messages(found, 0, body, tools, earlier),
        sampling=sampling,
        constraint=_constraint(body, constraint(fields, state.engine.tokenizer)),
        tools=tools.use,
    )
    options = ResponseOptions(
        form=_form(body, sampling, name),
        tools=tools,
        logprobs=logprobs,
        encrypts=SHOWS_ENCRYPTED in include,
        only_warms=body.only_warms,
    )
    request = RequestOptions(
        request_id=body.request_id or name.id,
        priority=body.priority or 0,
        cache_salt=salt_of(body.cache_salt, None),
    )
    return ResponsesTask(
        prompt=prompt,
        request=request,
        options=options,
        shortened=lambda count: _messages(found, count, body, tools, earlier),
        num_droppable=max(0, len(found.turns) - 2) if body.truncation == "auto" else 0,
    )


async def input_messages(body: ResponsesRequest, state: ServerState, owner: str, earlier: EarlierItems) -> ChatMessages:
    """Return the conversation whose tokens are counted. Raises a RequestError that names the field."""
    _check(body)
    tools = response_tools(body, lambda kind: state.unknown_fields.note(RESPONSES_PREFIX, [kind]))
    return _messages(await _conversation(body, state, owner, earlier), 0, body, tools, earlier)


def _check(body: ResponsesRequest) -> None:
    if body.prompt:
        raise UnsupportedParameterError("prompt: there are no stored templates.", param="prompt")
    if body.stream_options is not None and not body.stream:
        raise InvalidValueError("stream_options is only allowed with stream: true.", param="stream_options")
    continues = body.instructions or body.previous_response_id or body.conversation
    if body.input is None and not continues:
        raise InvalidValueError("input is missing.", param="input", code="missing_required_parameter")


async def _conversation(body: ResponsesRequest, state: ServerState, owner: str, earlier: EarlierItems) -> _Conversation:
    """Read all items, outside the event loop if they are large."""
    model = state.check_generates(body.model)

    def decrypted(encrypted: str) -> str:
        return state.encryption.decrypt(encrypted, model, owner)

    def note(kind: str) -> None:
        state.unknown_fields.note(RESPONSES_PREFIX, [kind])

    reader = ItemReader(state.takes_late_system, decrypted, note, state.takes_pictures)

    def work() -> _Conversation:
        before = [_stored(item) for item in earlier.before]
        own = [_resolved(item, earlier.referred) for item in _own_items(body)]
        turns = reader.turns([*before, *own], "input", num_kept=len(before))
        return _Conversation(_instructions(body, reader), turns, reader)

    size = body.size + earlier.size
    return await state.body_work.run(work, size) if size > LARGE_BYTES else work()


def _own_items(body: ResponsesRequest) -> Sequence[InputItem]:
    return [InputItem(role="user", content=body.input)] if isinstance(body.input, str) else body.input or []


def _instructions(body: ResponsesRequest, reader: ItemReader) -> str:
    if body.instructions is None or isinstance(body.instructions, str):
        return without_header(body.instructions or "")
    turns = reader.turns(body.instructions, "instructions")
    messages = list(itertools.chain.from_iterable(turns))
    if any(not isinstance(message["content"], str) for message in messages):
        raise InvalidValueError("instructions: images are taken in the input.", param="instructions")
    return "\n".join(message["content"] for message in messages)


def _resolved(item: InputItem, referred: Mapping[str, bytes]) -> InputItem:
    found = referred.get(item.id or "") if item.type == "item_reference" else None
    return item if found is None else _stored(found)


def _stored(item: bytes) -> InputItem:
    """Read an item that was kept. Raises InvalidValueError for an item that this version cannot read."""
    try:
        return InputItem.model_validate_json(item)
    except ValidationError:
        raise InvalidValueError("A stored item cannot be read.", param="input") from None


def _messages(
    found: _Conversation, count: int, body: ResponsesRequest, tools: ResponseTools, earlier: EarlierItems
) -> ChatMessages:
    variables: Json = {}
    effort = body.reasoning.effort if body.reasoning is not None else None
    if effort is not None:
        variables |= thinking(False) if effort == "none" else thinking_effort(effort)
    if body.text is not None and body.text.verbosity is not None:
        variables["verbosity"] = body.text.verbosity
    return ChatMessages(
        make=lambda: found.without(count),
        size=body.size + earlier.size,
        tools=tools.use.shown,
        variables=variables | (body.chat_template_kwargs or {}),
    )


def _constraint(body: ResponsesRequest, other: Constraint | None) -> Constraint | None:
    """Return the constraint of text.format or `other`. Raises a RequestError if there are both."""
    wanted = body.text.format if body.text is not None else None
    if wanted is None or wanted.type == "text":
        return other
    if other is not None:
        raise InvalidValueError(f"text.format and {other[1]} exclude each other.", param="text.format")
    if wanted.type == "json_object":
        return GrammarSpec(kind="json_object", source=""), "text.format"
    param = "text.format.schema"
    if wanted.schema_ is None:
        raise InvalidValueError(f"{param} is missing.", param=param, code="missing_required_parameter")
    try:
        return schema_spec(wanted.schema_, strict=bool(wanted.strict)), "text.format"
    except InvalidSchemaError as error:
        raise InvalidSchemaError(error.message, param=param) from None


def _form(body: ResponsesRequest, sampling: SamplingParams, name: ResponseName) -> Json:
    """Return the name of a response and the keys that repeat the body. Absent fields show the values in use."""
    reasoning = body.reasoning
    text = body.text
    given = ("instructions", "max_output_tokens", "max_tool_calls", "previous_response_id", "prompt_cache_key")
    given += ("safety_identifier", "user")
    shown = {name: _plain(getattr(body, name)) for name in given}
    conversation = {} if name.conversation_id is None else {"conversation": {"id": name.conversation_id}}
    return shown | {
        "id": name.id,
        "created_at": name.created_at,
        **conversation,
        "background": name.background,
        "store": name.store,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "reasoning": {
            "effort": reasoning.effort if reasoning is not None else None,
            "summary": (reasoning.summary or reasoning.generate_summary) if reasoning is not None else None,
        },
        "service_tier": "default",
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "text": {
            "format": _plain(text.format) if text is not None and text.format is not None else {"type": "text"},
            "verbosity": (text.verbosity if text is not None else None) or "medium",
        },
        "tool_choice": shown_choice(body.tool_choice),
        "tools": shown_tools(body.tools or []),
        "top_logprobs": body.top_logprobs or 0,
        "truncation": body.truncation or "disabled",
        "metadata": body.metadata or {},
    }


def _plain(value: Any) -> Any:
    """Return a part of the body as JSON values, without fields that were not sent."""
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return value.model_dump(exclude_unset=True, by_alias=True) if isinstance(value, BaseModel) else value
