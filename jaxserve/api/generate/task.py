"""The task of a generating route, which has no API's field names, and the readers of the fields that bodies share.

    body -> task (the slice's task.py) -> engine work (planner.py) -> outputs -> wire (the slice's answer.py)

A route turns its body into a task. Nothing after that sees the body. Another API therefore needs only a folder with its
own reader of bodies and its own writer of answers, as api/anthropic.

The parts of a task come first: modes, prompts and options. The functions after them read the constraint in its forms
(response_format, structured_outputs, the fields of vLLM, TGI and SGLang), the extra outputs of each token, the options,
and the sampling parameters with the model's defaults. Checks that need the prompt are in planner.py.
"""

from __future__ import annotations

import dataclasses
import json
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import msgspec

from jaxserve.api.fields import ResponseFormat, SamplingFields, SessionParams, StructuredOutputs
from jaxserve.api.generate.tools import ToolUse
from jaxserve.api.ranges import DEFAULT_NATIVE_TOKENS, MAX_BAD_WORD_TOKENS, MAX_STOP_CHARS
from jaxserve.api.sglang.protocol import NativeSampling
from jaxserve.api.state import ServerState
from jaxserve.config_types import reveal
from jaxserve.errors import InvalidSchemaError, InvalidValueError
from jaxserve.grammar.structural import structural_tag_spec
from jaxserve.grammar.translate import MAX_SOURCE_BYTES, choice_spec, schema_spec
from jaxserve.text.stop import StopPatterns
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.types.extras import MAX_CANDIDATES, HiddenStates
from jaxserve.types.messages import EngineInfo
from jaxserve.types.page_keys import salt_of
from jaxserve.types.sampling import GrammarSpec, SamplingParams, grammar_spec

Constraint = tuple[GrammarSpec, str]  # the grammar, and the field that it came from
SamplingMode = Literal["selected", "support"]
Side = Literal["left", "right"]


@dataclass(frozen=True, kw_only=True)
class Truncation:
    """Cut a prompt at one end. keep: tokens that remain; -1: as many as leave room for the output; None: no cut"""

    keep: int | None = None
    side: Side = "left"


@dataclass(frozen=True, kw_only=True)
class RepetitionRule:
    """End an output if its last tokens are `min_count` repeats of a pattern of `smallest` to `largest` tokens."""

    smallest: int
    largest: int
    min_count: int


@dataclass(frozen=True, kw_only=True)
class Mode:
    """How a prompt is generated, if not by one plain engine request.

    beam_length_penalty: run a beam search whose scores are divided by length ** penalty; None: sample
    keeps_output: add the output to the session, not only the prompt
    """

    beam_length_penalty: float | None = None
    repetition: RepetitionRule | None = None
    session: SessionParams | None = None
    keeps_output: bool = True


@dataclass(frozen=True, kw_only=True)
class Continuation:
    """How to continue one prompt.

    sampling: its max_tokens is as requested; None means the rest of the context
    constraint: the grammar of the output, and the field that it came from
    experts_from: first prompt position of the routed experts; None: no position was given
    """

    sampling: SamplingParams
    constraint: Constraint | None = None
    mode: Mode = Mode()
    truncation: Truncation = Truncation()
    experts_from: int | None = None


@dataclass(frozen=True, kw_only=True)
class TextPrompt(Continuation):
    """A text or token ids to continue.

    suffix: the text after the gap that the output fills
    param: the body's field, for errors
    request_id: the prompt's own id; empty: the id of the HTTP request
    """

    content: str | list[int]
    suffix: str = ""
    add_special_tokens: bool = True
    param: str = "prompt"
    request_id: str = ""


@dataclass(frozen=True, kw_only=True)
class ChatMessages:
    """Messages for the chat template.

    make: returns the messages as the template reads them. It is called in a thread if the body is large.
    size: bytes of the body
    """

    make: Callable[[], list[dict[str, Any]]]
    size: int
    tools: Sequence[dict[str, Any]] = ()
    documents: Sequence[dict[str, Any]] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False


@dataclass(frozen=True, kw_only=True)
class ChatPrompt(Continuation):
    """A conversation to answer.

    token_ids: used instead of the rendered conversation
    continued: text of the last message if the output continues it
    thinking_budget: maximum number of reasoning tokens
    """

    messages: ChatMessages
    token_ids: list[int] | None = None
    continued: str = ""
    add_special_tokens: bool = False
    tools: ToolUse = field(default_factory=ToolUse)
    thinking_budget: int | None = None
    separate_reasoning: bool = True


@dataclass(frozen=True, kw_only=True)
class RequestOptions:
    """The name of a request and how it is queued.

    interval: least tokens of an output, except the first and the last
    replica: number of the engine that computes it; None: the router chooses
    """

    request_id: str
    priority: int = 0
    cache_salt: str = ""
    interval: int = 1
    replica: int | None = None
    adapter: str = ""  # digest; empty: none

    def for_adapter(self, digest: str) -> RequestOptions:
        """Return these options for an adapter, by its digest; "" means none."""
        return dataclasses.replace(self, adapter=digest) if digest else self


@dataclass(frozen=True, kw_only=True)
class ExtraFields:
    """Fields that SGLang and vLLM add to the last chunk of a choice.

    experts_from: first prompt position of the routed experts; None: not requested
    """

    meta_info: bool = False
    sampling_mask: bool = False
    sampling_mode: SamplingMode | None = None
    experts_from: int | None = None
    weight_versions: bool = False
    cached_tokens: bool = False
    spec_tokens: bool = False
    input_ids: bool = False
    output_ids: bool = False


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """The parts of an answer in OpenAI's form that the request asks for beside its text.

    logprobs: number of most likely tokens to show; None: no log-probabilities
    """

    include_usage: bool = False
    continuous_usage: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    tokens_as_ids: bool = False
    token_ids: bool = False
    prompt_token_ids: bool = False
    prompt_text: bool = False
    hidden_state: bool = False
    extras: ExtraFields = ExtraFields()


def constraint(body: SamplingFields | NativeSampling, tokenizer: Tokenizer) -> Constraint | None:
    """Return the one constraint of a body; None if it has none.

    Raises InvalidValueError if there are two, InvalidSchemaError if it is not a valid grammar.
    """
    found: list[Constraint] = []
    if isinstance(body, SamplingFields):
        with _naming("response_format"):
            found += _response_format(body.response_format, tokenizer)
        with _naming("structured_outputs"):
            found += _structured_outputs(body.structured_outputs, tokenizer)
        found += _guided(body)
    elif body.structural_tag is not None:
        with _naming("structural_tag"):
            found.append((structural_tag_spec(body.structural_tag, special_tokens(tokenizer)), "structural_tag"))
    if body.json_schema is not None:
        found.append((schema_spec(_schema(body.json_schema, "json_schema")), "json_schema"))
    if body.regex is not None:
        found.append((GrammarSpec(kind="regex", source=body.regex), "regex"))
    if body.ebnf is not None:
        found.append((grammar_spec(body.ebnf), "ebnf"))
    if len(found) > 1:
        names = " and ".join(name for _, name in found)
        raise InvalidValueError(f"{names} exclude each other.", param=found[1][1])
    return found[0] if found else None


@contextmanager
def _naming(param: str) -> Iterator[None]:
    """Add the name of the request's field to an error about the grammar."""
    try:
        yield
    except InvalidSchemaError as error:
        raise InvalidSchemaError(error.message, param=param) from None


def special_tokens(tokenizer: Tokenizer) -> Mapping[str, int]:
    """Map the text of each token that grammars must name by its id to that id.

    llguidance also treats added tokens written <...> as special, even if the tokenizer does not.
    """
    added = tokenizer.backend.get_added_tokens_decoder()
    return {
        token.content: i
        for i, token in added.items()
        if token.special or (token.content.startswith("<") and token.content.endswith(">"))
    }


def _response_format(wanted: ResponseFormat | None, tokenizer: Tokenizer) -> list[Constraint]:
    param = "response_format"
    if wanted is None:
        return []
    if wanted.type == "structural_tag":
        tag = wanted.model_extra or {}
        return [(structural_tag_spec(tag, special_tokens(tokenizer)), param)]
    schemas = _schemas_of(wanted)
    if wanted.type == "text":
        if schemas:
            raise InvalidValueError(f"{next(iter(schemas))} needs type json_schema.", param=f"{param}.type")
        return []
    if len(schemas) > 1:
        raise InvalidValueError(f"{' and '.join(schemas)} exclude each other.", param=list(schemas)[1])
    if schemas:
        strict = wanted.strict or (wanted.json_schema is not None and wanted.json_schema.strict)
        return [(schema_spec(*schemas.values(), strict=bool(strict)), param)]
    if wanted.type == "json_object":
        return [(GrammarSpec(kind="json_object", source=""), param)]
    where = f"{param}.json_schema" + ("" if wanted.json_schema is None else ".schema")
    raise InvalidValueError(f"{where} is missing.", param=where, code="missing_required_parameter")


def _schemas_of(wanted: ResponseFormat) -> dict[str, dict[str, Any] | bool]:
    """Map each field to its schema. An empty object beside json_object adds nothing to the type."""
    named = wanted.json_schema
    places = {"json_schema.schema": named and named.schema_, "schema": wanted.schema_, "value": wanted.value}
    empty = ({},) if wanted.type == "json_object" else ()
    return {
        f"response_format.{name}": schema
        for name, schema in places.items()
        if schema is not None and schema not in empty
    }


def _guided(body: SamplingFields) -> Iterator[Constraint]:
    """Read the fields that vLLM had before structured_outputs, and the fields of llama.cpp, TGI and Ollama."""
    if body.guided_json is not None:
        yield schema_spec(_schema(body.guided_json, "guided_json")), "guided_json"
    if body.guided_regex is not None:
        yield GrammarSpec(kind="regex", source=body.guided_regex), "guided_regex"
    if body.guided_choice is not None:
        yield choice_spec(body.guided_choice), "guided_choice"
    if body.guided_grammar is not None:
        yield grammar_spec(body.guided_grammar), "guided_grammar"
    if isinstance(body.grammar, str):
        yield grammar_spec(body.grammar), "grammar"
    elif body.grammar is not None:
        yield _typed(body.grammar.type, body.grammar.value), "grammar"
    if body.format:
        is_any = isinstance(body.format, str)
        yield (
            GrammarSpec(kind="json_object", source="")
            if is_any
            else schema_spec(_schema(body.format, "format"), strict=True),
            "format",
        )


def _typed(kind: str, value: str | dict[str, Any] | bool | None) -> GrammarSpec:
    """Read TGI's form of a constraint. Raises InvalidValueError if its value does not fit its type."""
    if kind == "json_object" or (kind == "json" and value is None):
        return GrammarSpec(kind="json_object", source="")
    if kind == "regex":
        if not isinstance(value, str):
            raise InvalidValueError("grammar.value is a pattern for type regex.", param="grammar.value")
        return GrammarSpec(kind="regex", source=value)
    if value is None:
        raise InvalidValueError(f"grammar.value is a schema for type {kind}.", param="grammar.value")
    inner = value.get("schema") if isinstance(value, dict) and kind == "json_schema" else None
    return schema_spec(_schema(inner if isinstance(inner, dict) else value, "grammar.value"))


def _structured_outputs(wanted: StructuredOutputs | None, tokenizer: Tokenizer) -> list[Constraint]:
    if wanted is None:
        return []
    specs: list[GrammarSpec] = []
    if wanted.json_ is not None:
        specs.append(schema_spec(_schema(wanted.json_, "structured_outputs.json")))
    if wanted.json_object:
        specs.append(GrammarSpec(kind="json_object", source=""))
    if wanted.regex is not None:
        specs.append(GrammarSpec(kind="regex", source=wanted.regex))
    if wanted.choice is not None:
        specs.append(choice_spec(wanted.choice))
    if wanted.grammar is not None:
        specs.append(grammar_spec(wanted.grammar))
    if wanted.structural_tag is not None:
        specs.append(structural_tag_spec(wanted.structural_tag, special_tokens(tokenizer)))
    if len(specs) != 1:
        message = f"structured_outputs needs exactly one constraint; it has {len(specs)}."
        raise InvalidValueError(message, param="structured_outputs")
    return [(specs[0], "structured_outputs")]


def _schema(value: str | dict[str, Any] | bool, param: str) -> dict[str, Any] | bool:
    if not isinstance(value, str):
        return value
    if len(value) > MAX_SOURCE_BYTES:
        raise InvalidSchemaError(f"{param} is larger than {MAX_SOURCE_BYTES} bytes.", param=param)
    try:
        schema = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise InvalidSchemaError(f"{param} is not valid JSON: {error}", param=param) from None
    if not isinstance(schema, (dict, bool)):
        raise InvalidSchemaError(f"{param} must be an object.", param=param)
    return schema


MAX_HIDDEN_NUMBERS = 2**22  # float32 values in one answer; they are some 80 MB of JSON
MAX_EXPERT_NUMBERS = 2**24  # int32 values in one answer: 64 MiB

_EXPERTS_START = "routed_experts_start_len goes with return_routed_experts and is at most the prompt's length."


def _with_extras(params: SamplingParams, **changes: Any) -> SamplingParams:
    """Return `params` that also ask for the extra outputs `changes`, fields of ExtraParams."""
    extras = msgspec.structs.replace(params.extras, **changes)
    return msgspec.structs.replace(params, extras=extras, logprobs=params.logprobs or 0)


def with_logprob_ids(params: SamplingParams, ids: Sequence[int] | None, info: EngineInfo, param: str) -> SamplingParams:
    """Return `params` that also ask for the log-probabilities of the tokens `ids`.

    Raises InvalidValueError unless the request asks for log-probabilities, and for ids outside the vocabulary.
    """
    if not ids:
        return params
    if params.logprobs is None:
        raise InvalidValueError(f"{param} needs log-probabilities to be asked for.", param=param)
    for token_id in ids:
        if token_id >= info.vocab_size:
            message = f"{param}: {token_id} is no token id; the vocabulary has {info.vocab_size}."
            raise InvalidValueError(message, param=param)
    return _with_extras(params, logprob_token_ids=tuple(dict.fromkeys(ids)))


def with_sampling_mask(params: SamplingParams, wanted: bool | None, mode: SamplingMode | None) -> SamplingParams:
    """Return `params` that ask for the candidates of each draw if `wanted`.

    Raises InvalidValueError if too many tokens could be candidates, or if `mode` is given but not `wanted`.
    """
    if not wanted:
        if mode is not None:
            message = "sampling_logprobs_mode needs return_sampling_mask: true."
            raise InvalidValueError(message, param="sampling_logprobs_mode")
        return params
    cut = 0 < params.top_k <= MAX_CANDIDATES or params.top_p < 1 or params.min_p > 0
    if params.temperature > 0 and not cut:
        message = f"return_sampling_mask needs top_k (at most {MAX_CANDIDATES}), top_p or min_p: all tokens are drawn."
        raise InvalidValueError(message, param="return_sampling_mask")
    return _with_extras(params, sampling_mask=True)


def with_hidden_states(params: SamplingParams, mode: HiddenStates) -> SamplingParams:
    """Return `params` that ask for hidden states: of the last token, of all tokens, or none if `mode` is empty."""
    return _with_extras(params, hidden_states=mode) if mode else params


def with_routed_experts(
    params: SamplingParams, wanted: bool | None, start: int | None, info: EngineInfo
) -> SamplingParams:
    """Return `params` that ask for the routed experts of every token if `wanted`.

    Raises InvalidValueError if the model has no experts, or if `start` is given but not `wanted`.
    """
    if start is not None and not wanted:
        raise InvalidValueError(_EXPERTS_START, param="routed_experts_start_len")
    if not wanted:
        return params
    if not info.routed[0]:
        raise InvalidValueError("return_routed_experts: the model has no experts.", param="return_routed_experts")
    return _with_extras(params, routed_experts=True)


def check_sizes(params: SamplingParams, experts_from: int | None, num_prompt_tokens: int, info: EngineInfo) -> None:
    """Raise InvalidValueError if the hidden states or routed experts of an answer would be too many numbers.

    params: parameters with the final max_tokens
    """
    tokens = num_prompt_tokens + (params.max_tokens or 0)
    shown = {"": 0, "last": 1, "all": tokens}[params.extras.hidden_states]
    if shown * info.embedding_size * params.n > MAX_HIDDEN_NUMBERS:
        message = f"return_hidden_states: {shown} tokens of {info.embedding_size} numbers each are too many; "
        message += 'use "last", or fewer tokens.'
        raise InvalidValueError(message, param="return_hidden_states")
    if experts_from is not None and experts_from > num_prompt_tokens:
        raise InvalidValueError(_EXPERTS_START, param="routed_experts_start_len")
    layers, each = info.routed
    if params.extras.routed_experts and tokens * layers * each * params.n > MAX_EXPERT_NUMBERS:
        message = "return_routed_experts: too many numbers for one answer; ask for fewer tokens."
        raise InvalidValueError(message, param="return_routed_experts")


def with_watermark(params: SamplingParams, asked: bool | None, key: int | None, param: str) -> SamplingParams:
    """Return `params` with the server's watermark, unless `asked` is False or the sampling is greedy.

    Raises InvalidValueError if `asked` is True and the server has no key.
    """
    if asked and key is None:
        raise InvalidValueError(f"{param}: the server has no watermark key (server.watermark_key).", param=param)
    if asked is False or key is None or params.temperature == 0:
        return params
    return msgspec.structs.replace(params, watermark_key=key)


def check_no_extras(params: SamplingParams, shape: str) -> None:
    """Raise InvalidValueError if the body asks for per-token outputs that this generation mode cannot give."""
    asked = {
        "logprob_token_ids": params.extras.logprob_token_ids,
        "return_sampling_mask": params.extras.sampling_mask,
        "return_hidden_states": params.extras.hidden_states,
        "return_routed_experts": params.extras.routed_experts,
    }
    for name, value in asked.items():
        if value:
            raise InvalidValueError(f"{shape} does not go with {name}.", param=name)


T = TypeVar("T")


def thinking(on: bool) -> dict[str, bool]:
    """Return the template variables that turn reasoning on or off, under both names that templates use."""
    return {"enable_thinking": on, "thinking": on}


def thinking_effort(effort: T) -> dict[str, T]:
    """Return the template variables of how much to think, under both names that templates use."""
    return {"reasoning_effort": effort, "reasoning_strength": effort}


def as_prompts(prompt: str | list[str] | list[int] | list[list[int]], param: str) -> list[str | list[int]]:
    """Return one entry per prompt. Raises InvalidValueError for an empty one."""
    prompts: list[str | list[int]]
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
        prompts = [prompt]  # type: ignore[list-item]
    else:
        prompts = list(prompt)  # type: ignore[arg-type]
    if not prompts or not all(prompts):
        raise InvalidValueError(f"{param} is empty.", param=param)
    return prompts


def request_options(body: SamplingFields, id_prefix: str) -> RequestOptions:
    """Return the id, priority, namespace, interval and replica of a request. id_prefix: of an id that is made here"""
    return RequestOptions(
        request_id=new_id(id_prefix, body.request_id or body.rid),
        priority=body.priority or 0,
        cache_salt=salt_of(body.cache_salt, body.extra_key),
        interval=body.stream_interval or 1,
        replica=named_replica(body.data_parallel_rank, body.routed_dp_rank),
    )


def named_replica(rank: int | None, routed: int | None) -> int | None:
    """Return the engine that a request names. Raises InvalidValueError if it names two."""
    if rank is not None and routed is not None and rank != routed:
        raise InvalidValueError("data_parallel_rank and routed_dp_rank differ.", param="routed_dp_rank")
    return routed if rank is None else rank


def new_id(prefix: str, given: str | None = None) -> str:
    return given or f"{prefix}-{uuid.uuid4().hex}"


def truncation(body: SamplingFields) -> Truncation:
    return Truncation(keep=body.truncate_prompt_tokens, side=body.truncation_side or "left")


def generation_mode(body: SamplingFields, *, keeps_output: bool = True) -> Mode:
    """Read beam search, repetition detection and session. Raises InvalidValueError for conflicting fields."""
    if body.use_beam_search and body.stream:
        raise InvalidValueError("A beam search cannot be streamed.", param="use_beam_search")
    if body.length_penalty is not None and not body.use_beam_search:
        raise InvalidValueError("length_penalty needs use_beam_search.", param="length_penalty")
    if body.session_params is not None and body.session_id is not None:
        raise InvalidValueError("Give session_params or session_id, not both.", param="session_id")
    penalty = 1.0 if body.length_penalty is None else body.length_penalty
    return Mode(
        beam_length_penalty=penalty if body.use_beam_search else None,
        repetition=_repetition_rule(body),
        session=body.session_params,
        keeps_output=keeps_output,
    )


def _repetition_rule(body: SamplingFields) -> RepetitionRule | None:
    wanted = body.repetition_detection
    if wanted is None or not wanted.max_pattern_size:
        return None
    smallest = wanted.min_pattern_size or 1
    if smallest > wanted.max_pattern_size:
        message = "repetition_detection: min_pattern_size is more than max_pattern_size."
        raise InvalidValueError(message, param="repetition_detection")
    return RepetitionRule(smallest=smallest, largest=wanted.max_pattern_size, min_count=wanted.min_count or 2)


def output_options(body: SamplingFields, *, logprobs: int | None) -> OutputOptions:
    """Read the options of the answer. Raises InvalidValueError if stream_options is given without stream.

    logprobs: number of most likely tokens to show; None: no log-probabilities
    """
    if body.stream_options is not None and not body.stream:
        raise InvalidValueError("stream_options is only allowed with stream: true.", param="stream_options")
    usage = body.stream_options
    return OutputOptions(
        include_usage=bool(usage and usage.include_usage),
        continuous_usage=bool(usage and usage.continuous_usage_stats and usage.include_usage is not False),
        logprobs=logprobs,
        prompt_logprobs=body.prompt_logprobs,
        tokens_as_ids=bool(body.return_tokens_as_token_ids),
        token_ids=bool(body.return_token_ids),
        prompt_token_ids=bool(body.return_token_ids or body.return_prompt_token_ids),
        prompt_text=bool(body.return_prompt_text),
        hidden_state=bool(body.return_hidden_states),
        extras=_extra_fields(body),
    )


def _extra_fields(body: SamplingFields) -> ExtraFields:
    return ExtraFields(
        meta_info=bool(body.return_meta_info),
        sampling_mask=bool(body.return_sampling_mask),
        sampling_mode=body.sampling_logprobs_mode,
        experts_from=(body.routed_experts_start_len or 0) if body.return_routed_experts else None,
        weight_versions=bool(body.return_weight_versions),
        cached_tokens=bool(body.return_cached_tokens_details),
        spec_tokens=bool(body.return_spec_tokens_details),
        input_ids=bool(body.return_input_ids_in_sglext),
        output_ids=bool(body.return_output_ids_in_sglext),
    )


def spread(value: T | list[T], count: int, param: str) -> list[T]:
    """Return one value for each of `count` prompts. Raises InvalidValueError for another number of values."""
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise InvalidValueError(f"{param} has {len(value)} entries for {count} prompts.", param=param)
    return value


_HARD_DEFAULTS = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}


def sampling_params(
    body: SamplingFields, state: ServerState, *, max_tokens: int | None, logprobs: int | None, **others: Any
) -> SamplingParams:
    """Return the sampling parameters of one prompt. Raises InvalidValueError that names the field.

    max_tokens: as requested; None: the rest of the context. others: further fields of SamplingParams
    """
    info = state.engine.info
    fields: dict[str, Any] = _shared_fields(body, info) | {
        "allowed_token_ids": _allowed(body.allowed_token_ids, info),
        "bad_words_token_ids": _bad_words(body.bad_words or [], state.engine.tokenizer, info.vocab_size),
        "seed": _seed(body.seed),
        "max_tokens": max_tokens,
        "min_tokens": _min_tokens(body.min_tokens, max_tokens, "min_tokens"),
        "include_stop_str_in_output": bool(body.include_stop_str_in_output or body.no_stop_trim),
        "logprobs": logprobs,
        "prompt_logprobs": body.prompt_logprobs,
    }
    params = SamplingParams(**(fields | others))
    params = with_logprob_ids(params, body.logprob_token_ids, info, "logprob_token_ids")
    params = with_sampling_mask(params, body.return_sampling_mask, body.sampling_logprobs_mode)
    params = with_routed_experts(params, body.return_routed_experts, body.routed_experts_start_len, info)
    params = with_hidden_states(params, "last" if body.return_hidden_states else "")
    param = "watermarking" if body.watermark is None else "watermark"
    asked = body.watermarking if body.watermark is None else body.watermark
    return with_watermark(params, asked, reveal(state.config.server.watermark_key), param)


def native_params(body: NativeSampling, info: EngineInfo, **others: Any) -> SamplingParams:
    """Return the sampling parameters of /generate. Raises InvalidValueError that names the field.

    others: further fields of SamplingParams
    """
    max_tokens = DEFAULT_NATIVE_TOKENS if body.max_new_tokens is None else body.max_new_tokens
    return SamplingParams(
        **_shared_fields(body, info),
        seed=_seed(body.sampling_seed),
        max_tokens=max_tokens,
        min_tokens=_min_tokens(body.min_new_tokens, max_tokens, "min_new_tokens"),
        include_stop_str_in_output=bool(body.no_stop_trim),
        **others,
    )


def _shared_fields(body: SamplingFields | NativeSampling, info: EngineInfo) -> dict[str, Any]:
    """Read the fields that have the same names on all routes."""
    return _distribution(body, info) | {
        "n": body.n or 1,
        "logit_bias": _logit_bias(body.logit_bias, info),
        "ignore_eos": bool(body.ignore_eos),
        "speculate": body.speculate is not False,
        "stop_token_ids": _vocabulary(body.stop_token_ids, info, "stop_token_ids"),
        "stop": _stops(body.stop),
        "stop_regex": _patterns(body.stop_regex, body.n or 1),
        "skip_special_tokens": body.skip_special_tokens is not False,
        "spaces_between_special_tokens": body.spaces_between_special_tokens is not False,
    }


def _distribution(body: SamplingFields | NativeSampling, info: EngineInfo) -> dict[str, Any]:
    values: dict[str, Any] = {
        "frequency_penalty": body.frequency_penalty or 0.0,
        "presence_penalty": body.presence_penalty or 0.0,
    }
    for name, hard in _HARD_DEFAULTS.items():
        given = getattr(body, name)
        values[name] = info.generation_defaults.get(name, hard) if given is None else given
    values["top_k"] = max(0, int(values["top_k"]))
    return values


def logit_changes(params: SamplingParams, info: EngineInfo) -> dict[str, Any]:
    """Map the name of each field that changes the model's logits to its value, which is false if it is unset."""
    usual = info.generation_defaults.get("repetition_penalty", _HARD_DEFAULTS["repetition_penalty"])
    return {
        "logit_bias": params.logit_bias,
        "bad_words": params.bad_words_token_ids,
        "allowed_token_ids": params.allowed_token_ids,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "repetition_penalty": params.repetition_penalty != usual,
        "min_tokens": params.min_tokens,
    }


def _seed(seed: int | None) -> int | None:
    """Return a seed of 63 bits. None and -1 mean that one is drawn."""
    return seed if seed in (None, -1) else seed & (2**63 - 1)


def _min_tokens(asked: int | None, max_tokens: int | None, param: str) -> int:
    if asked and max_tokens is not None and asked > max_tokens:
        raise InvalidValueError(f"{param} ({asked}) is more than the maximum ({max_tokens}).", param=param)
    return asked or 0


def _logit_bias(bias: dict[str, float] | None, info: EngineInfo) -> dict[int, float]:
    table = {}
    for key, value in (bias or {}).items():
        if not (key.isascii() and key.isdigit() and len(key) < 10 and int(key) < info.vocab_size):
            message = f"logit_bias: {key[:40]!r} is no token id; the vocabulary has {info.vocab_size}."
            raise InvalidValueError(message, param="logit_bias")
        table[int(key)] = value
    return table


def _vocabulary(token_ids: Sequence[int] | None, info: EngineInfo, param: str) -> tuple[int, ...]:
    for token_id in token_ids or ():
        if token_id >= info.vocab_size:
            message = f"{param}: {token_id} is no token id; the vocabulary has {info.vocab_size}."
            raise InvalidValueError(message, param=param)
    return tuple(dict.fromkeys(token_ids or ()))


def _allowed(token_ids: list[int] | None, info: EngineInfo) -> tuple[int, ...] | None:
    if token_ids is None:
        return None
    if not token_ids:
        raise InvalidValueError("allowed_token_ids is empty: no token could be sampled.", param="allowed_token_ids")
    return _vocabulary(token_ids, info, "allowed_token_ids")


def _bad_words(words: list[str], tokenizer: Tokenizer, vocab_size: int) -> tuple[tuple[int, ...], ...]:
    """Tokenize each word as it is at the start of a text and after a space. vocab_size: of the model

    A tokenizer may have tokens that the model cannot sample, so it never makes their words.
    """
    variants = [text for word in words for text in (word, " " + word.lstrip())]
    found = dict.fromkeys(tuple(tokenizer.encode(text, add_special_tokens=False)) for text in variants)
    sequences = tuple(sequence for sequence in found if sequence and max(sequence) < vocab_size)
    if sum(map(len, sequences)) > MAX_BAD_WORD_TOKENS:
        raise InvalidValueError(f"bad_words are over {MAX_BAD_WORD_TOKENS} tokens.", param="bad_words")
    return sequences


def _texts(value: str | list[str] | None) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value or ())


def _stops(value: str | list[str] | None) -> tuple[str, ...]:
    stops = _texts(value)
    if sum(map(len, stops)) > MAX_STOP_CHARS:
        raise InvalidValueError(f"stop has more than {MAX_STOP_CHARS} characters in all", param="stop")
    return stops


def _patterns(value: str | list[str] | None, num_choices: int) -> tuple[str, ...]:
    patterns = _texts(value)
    StopPatterns(patterns, num_choices=num_choices)  # raises if a pattern cannot be searched
    return patterns
