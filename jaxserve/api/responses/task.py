"""Read a task from the body of OpenAI's /v1/responses."""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ValidationError

from jaxserve.api.errors.families import RESPONSES_PREFIX
from jaxserve.api.protocol.common import SamplingFields
from jaxserve.api.responses.input_items import ItemReader
from jaxserve.api.responses.protocol import SHOWS_LOGPROBS, SHOWS_SEALED, InputItem, ResponsesRequest
from jaxserve.api.responses.tools import ResponseTools, response_tools, shown_choice, shown_tools
from jaxserve.api.shared.body_cost import LARGE_BYTES
from jaxserve.api.shared.state import ServerState
from jaxserve.api.tasks.chat import thinking
from jaxserve.api.tasks.constraints import Constraint, constraint
from jaxserve.api.tasks.fields import prefix_namespace
from jaxserve.api.tasks.message_order import Message, without_header
from jaxserve.api.tasks.sampling import sampling_params
from jaxserve.api.tasks.task import ChatMessages, ChatPrompt, RequestOptions
from jaxserve.errors import InvalidSchemaError, InvalidValueError, UnsupportedParameterError
from jaxserve.grammar.translate import schema_spec
from jaxserve.types.sampling import GrammarSpec, SamplingParams

_SAMPLING = frozenset(SamplingFields.model_fields) & frozenset(ResponsesRequest.model_fields)

Json = dict[str, Any]


@dataclass(frozen=True)
class EarlierItems:
    """Items that a body only refers to.

    before: the JSON of those before the body's input. referred: id of an item -> its JSON. size: bytes of both
    """

    before: Sequence[bytes] = ()
    referred: Mapping[str, bytes] = field(default_factory=dict)
    size: int = 0


@dataclass(frozen=True)
class ResponseName:
    """What a response is called, and what is done with it.

    created_at: Unix seconds
    """

    id: str = field(default_factory=lambda: f"resp_{uuid.uuid4().hex}")
    created_at: int = field(default_factory=lambda: int(time.time()))
    store: bool = False
    background: bool = False
    conversation_id: str | None = None


@dataclass(frozen=True, kw_only=True)
class ResponseOptions:
    """What the answer shows.

    form: the keys of the response object that are known before the answer, among them its id
    logprobs: number of most likely tokens to show; None: no log-probabilities
    seals: whether reasoning is sent sealed as well
    """

    form: Json
    tools: ResponseTools
    logprobs: int | None = None
    seals: bool = False


@dataclass(frozen=True, kw_only=True)
class ResponsesTask:
    """All that a body of /v1/responses asks for.

    shortened: returns the conversation without this number of its oldest turns
    num_droppable: number of turns that may be left out; 0 unless truncation is auto
    """

    prompt: ChatPrompt
    request: RequestOptions
    options: ResponseOptions
    shortened: Callable[[int], ChatMessages]
    num_droppable: int = 0


@dataclass(frozen=True)
class _Conversation:
    """A conversation by turns, the first of which has what stands before the first user's message."""

    system: str
    turns: list[list[Message]]
    reader: ItemReader

    def without(self, count: int) -> list[Message]:
        """Return the messages without the `count` oldest turns. The system messages before them stay."""
        return self.reader.messages(self.system, [self.turns[0], *self.turns[1 + count :]])


async def responses_task(
    body: ResponsesRequest, state: ServerState, owner: str, name: ResponseName, earlier: EarlierItems
) -> ResponsesTask:
    """Read and check a body. Raises a RequestError that names the field. owner: the key's name"""
    _check(body)
    tools = response_tools(body, lambda kind: state.unknown_fields.note(RESPONSES_PREFIX, [kind]))
    found = await _conversation(body, state, owner, earlier)
    include = body.include or ()
    logprobs = (body.top_logprobs or 0) if SHOWS_LOGPROBS in include else None
    fields = SamplingFields.model_construct(**{name: getattr(body, name) for name in _SAMPLING})
    sampling = sampling_params(fields, state, max_tokens=body.max_output_tokens, logprobs=logprobs)
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
        seals=SHOWS_SEALED in include,
    )
    request = RequestOptions(
        request_id=body.request_id or name.id,
        priority=body.priority or 0,
        cache_salt=prefix_namespace(body.cache_salt, None),
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

    def unsealed(sealed: str) -> str:
        return state.seal.open(sealed, model, owner)

    def note(kind: str) -> None:
        state.unknown_fields.note(RESPONSES_PREFIX, [kind])

    reader = ItemReader(state.takes_late_system, unsealed, note)

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
    return "\n".join(message["content"] for message in itertools.chain.from_iterable(turns))


def _resolved(item: InputItem, referred: Mapping[str, bytes]) -> InputItem:
    found = referred.get(item.id or "") if item.type == "item_reference" else None
    return item if found is None else _stored(found)


def _stored(item: bytes) -> InputItem:
    """Read an item that was kept. Raises InvalidValueError for one that this version cannot read."""
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
        variables |= thinking(False) if effort == "none" else {"reasoning_effort": effort}
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
    """Return the name of a response and the keys that repeat the body. Values in use stand for absent ones."""
    reasoning, text = body.reasoning, body.text
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
    """Return a part of the body as JSON values, without what was not sent."""
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return value.model_dump(exclude_unset=True, by_alias=True) if isinstance(value, BaseModel) else value
