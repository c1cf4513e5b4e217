"""The request as it enters the engine: how it is sampled and constrained, its choices, and its random numbers.

SamplingParams and EngineRequest are msgspec Structs, because they cross the socket between the API process and the
engine process. `siblings` splits a request for n choices into n requests for one choice each, and gives each a seed.

A call of SamplingParams takes the names of vLLM's and SGLang's SamplingParams too. One that means nothing here is an
error that says what to use instead.

`threefry2x32` makes the counter-based random numbers that draw tokens (JAX, on the device) and test watermarks (numpy,
on the host). It is Threefry-2x32 with 20 rounds of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011,
implemented here so that a seed's numbers do not depend on JAX's version or configuration.
"""

from __future__ import annotations

import dataclasses
import logging
import secrets
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
import numpy as np

from jaxserve.errors import InvalidValueError
from jaxserve.types.bounds import Count, Int32, NotNegative, Positive, Real, Share, TopCount
from jaxserve.types.extras import ExtraParams
from jaxserve.types.picture import Picture

logger = logging.getLogger(__name__)

# Requests with this or a higher number are background work (batches). Under every policy online requests start before
# them, unless a background request is aged (scheduler/waiting_queue.py).
BACKGROUND_PRIORITY = 2**30

MAX_LOGIT_BIAS = 4096  # logit_bias entries per request; the size of the device's array


class GrammarSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A constraint on a request's output.

    kind: "json_object" | "json_schema" | "regex" | "lark" (structural tags and tool calls too) | "ebnf" | "choice"
    source: the schema as JSON text, the pattern, the grammar text, the JSON list of choices
    checked: the text that the grammar compiler accepted, which the engine uses unchanged; empty: not checked
    """

    kind: str
    source: str
    checked: str = ""
    # output token ids; the grammar begins after their last occurrence (e.g. </think>). Empty: at once
    begin_after: tuple[Int32, ...] = ()
    # with begin_after: the grammar begins at once unless this is the first output token (e.g. <think>)
    begin_unless: tuple[Int32, ...] = ()


def grammar_spec(text: str) -> GrammarSpec:
    """Return the spec of a grammar in EBNF (GBNF, as in SGLang and vLLM) or in Lark."""
    return GrammarSpec(kind="ebnf" if "::=" in text else "lark", source=text)


class ThinkingForm(msgspec.Struct, frozen=True, kw_only=True):
    """How an output thinks.

    family: name of a reasoning format of text/output_parser.py. inside: the prompt ends inside the
    thinking. calls: name of the format of tool calls. tools: names of the request's tools; a call of one also ends
    the thinking. only_first: tags behind the first thinking are text, because a constraint decides what the answer is
    """

    family: str
    inside: bool = False
    calls: str = ""
    tools: tuple[str, ...] = ()
    only_first: bool = False


class ThinkingBudget(ThinkingForm, frozen=True, kw_only=True):
    """A limit on the tokens of the thinking. When it is reached, the end of the thinking is appended to the output.

    tokens: maximum number of thinking tokens
    end_token_ids: tokens of the end marker, which become part of the output
    """

    tokens: Count
    end_token_ids: tuple[Int32, ...]


class _TakesOtherNames(msgspec.StructMeta):
    """Reads the names of a call. Decoding and `replace` make objects without a call."""

    if not TYPE_CHECKING:  # a type checker reports other names by itself

        def __call__(cls, *values: object, **given: Any) -> Any:
            if values:
                message = "sampling parameters are given by name, as in SamplingParams(max_tokens=8)"
                raise InvalidValueError(message, param="params")
            return super().__call__(**_own_names(given))


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, metaclass=_TakesOtherNames):
    """Sampling parameters and end conditions of one request.

    A call takes the names of vLLM and SGLang too. None is as if the name were absent, except for max_tokens. Raises
    InvalidValueError for a name that is unknown or has no meaning here.

    The API checks the values (api/generate/task.py). Decoding an `Add` message checks types and bounds.
    """

    n: Count = 1
    temperature: NotNegative = 1.0  # 0: greedy
    top_k: Count = 0  # 0: off (the API maps -1 to 0)
    top_p: Share = 1.0
    min_p: Share = 0.0
    repetition_penalty: Positive = 1.0  # multiplicative, on prompt and output tokens
    frequency_penalty: Real = 0.0  # additive per occurrence, on output tokens
    presence_penalty: Real = 0.0  # additive once, on output tokens
    logit_bias: dict[Int32, Real] = {}
    allowed_token_ids: tuple[Int32, ...] | None = None
    bad_words_token_ids: tuple[tuple[Int32, ...], ...] = ()
    seed: int | None = None  # None: the engine draws one. -1 becomes None, as in vLLM and llama.cpp
    max_tokens: Count | None = 16  # None: the rest of the context
    min_tokens: Count = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[Int32, ...] = ()
    logprobs: TopCount | None = None  # None: off; k: of the sampled token and of the k most likely tokens
    prompt_logprobs: TopCount | None = None
    grammar: GrammarSpec | None = None
    embed: bool = False  # return the prompt's pooled hidden state instead of tokens
    # with embed, of a pair of texts: the first token of token type 1; 0: all tokens have type 0
    second_text: Count = 0
    speculate: bool = True  # False: the request gets no drafts
    grouped: bool = True  # False: the outputs of a batch request are sent one by one, as those of others
    watermark_key: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] | None = None  # see text/watermark.py
    extras: ExtraParams = ExtraParams()  # extra outputs per token
    # used by the API process only
    stop: tuple[str, ...] = ()
    stop_regex: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    stops_after: ThinkingForm | None = None  # how the output thinks, where no stop string or pattern counts
    skip_special_tokens: bool = True
    visible_token_ids: tuple[Int32, ...] = ()  # special tokens to keep in the text, because an output parser needs them
    spaces_between_special_tokens: bool = True
    thinking: ThinkingBudget | None = None

    def __post_init__(self) -> None:
        """Take one stop string for a tuple of it, a list for a tuple, and a seed of -1 for none."""
        if self.seed == -1:
            msgspec.structs.force_setattr(self, "seed", None)
        for name in _TUPLES:
            value = getattr(self, name)
            if isinstance(value, str):
                msgspec.structs.force_setattr(self, name, (value,))
            elif isinstance(value, list):
                msgspec.structs.force_setattr(self, name, tuple(value))


_TUPLES = ("stop", "stop_regex", "stop_token_ids")

# names of vLLM's and SGLang's SamplingParams -> ours
OTHER_NAMES = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
    "no_stop_trim": "include_stop_str_in_output",
    **dict.fromkeys(("json_schema", "regex", "ebnf", "structured_outputs"), "grammar"),
}

_EXTRA = "extras=ExtraParams({}), of jaxserve.types.extras, with logprobs"
_WHOLE = "leave it out: Engine.generate returns whole completions, and AsyncEngine.generate yields what is new"
_CHAT = "AsyncEngine.chat, which takes it"
_NO_CODE = "leave it out: no code of requests or plugins is run"
_BEAMS = "chat(messages, use_beam_search=True, n=...)"
_PART = "leave it out: log-probabilities of a prompt are those of all its tokens"
# those that have no field here -> the value that changes nothing, and what to use for another
INSTEAD: Mapping[str, tuple[float | None, str]] = {
    "bad_words": (None, "bad_words_token_ids, or chat(messages, bad_words=...)"),
    "best_of": (1, "n, and choose among the completions"),
    "custom_params": (None, _NO_CODE),
    "detokenize": (True, "leave it out: a completion has text and token_ids"),
    "early_stopping": (False, _BEAMS),
    "extra_args": (None, _NO_CODE),
    "flat_logprobs": (False, "leave it out: logprobs is a list"),
    "guided_decoding": (None, "structured_outputs"),
    "length_penalty": (1, _BEAMS),
    "logits_processors": (None, _NO_CODE),
    "logprob_token_ids": (None, _EXTRA.format("logprob_token_ids=...")),
    "output_kind": (None, _WHOLE),
    "output_text_buffer_length": (0, _WHOLE),
    "prompt_logprob_start": (None, _PART),
    "prompt_logprob_token_ids": (None, _PART),
    "repetition_detection": (None, "chat(messages, repetition_detection=...)"),
    "response_format": (None, "json_schema, regex or structured_outputs, or chat(messages, response_format=...)"),
    "routed_experts_prompt_start": (0, _EXTRA.format("routed_experts=True") + ", and leave out the prompt's rows"),
    "skip_clone": (False, "leave it out: parameters do not change"),
    "skip_reading_prefix_cache": (False, "add_request(prompt, params, cache_salt=...), which shares no cached prefix"),
    "stream_interval": (None, _WHOLE),
    "structural_tag": (None, "chat(messages, response_format={'type': 'structural_tag', ...})"),
    "thinking_token_budget": (None, _CHAT),
    "top_logprobs_num": (0, "logprobs"),
    "trace_decode_token_ids": (None, "put the tokens into the prompt, with prompt_logprobs"),
    "truncate_prompt_tokens": (None, "cut the token ids of the prompt"),
    "use_beam_search": (False, _BEAMS),
}


def _own_names(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return parameters by our names. Raises InvalidValueError."""
    found: dict[str, Any] = {}
    for name, value in given.items():
        own = OTHER_NAMES.get(name, name)
        if own not in SamplingParams.__struct_fields__:
            _check_changes_nothing(name, value)
            continue
        if value is None and own != "max_tokens":  # there it means the rest of the context
            continue
        if own in found:
            raise InvalidValueError(f"{own} is given twice", param=name)
        if name == "structured_outputs":
            value = _structured(value)
        elif own == "grammar" and not isinstance(value, GrammarSpec):
            value = _constraint(name, value)
        found[own] = 0 if own == "top_k" and value == -1 else value  # -1: off, under the others' name
    return found


def _check_changes_nothing(name: str, value: Any) -> None:
    """Raise InvalidValueError for a parameter that is not served, unless it has the value that changes nothing."""
    if name not in INSTEAD:
        from jaxserve.config import suggestion  # noqa: PLC0415  pydantic, which few callers of this file need

        hint = suggestion(name, [*SamplingParams.__struct_fields__, *OTHER_NAMES, *INSTEAD])
        raise InvalidValueError(f"there is no sampling parameter {name!r}{hint}", param=name)
    usual, instead = INSTEAD[name]
    if value is not None and not (isinstance(value, int | float) and value == usual):
        instead = instead if instead.startswith("leave") else f"use {instead}"
        raise InvalidValueError(f"there is no sampling parameter {name}: {instead}", param=name)


def _structured(value: Any) -> GrammarSpec:
    """Read vLLM's StructuredOutputsParams, or a mapping of its fields."""
    fields = dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value
    if not isinstance(fields, Mapping):
        message = f"structured_outputs are StructuredOutputsParams or a mapping, not {type(value).__name__}"
        raise InvalidValueError(message, param="structured_outputs")
    given = {str(name): each for name, each in fields.items() if each is not None and each is not False}
    if len(given) != 1 or not given.keys() <= {"json", "json_object", "regex", "choice", "grammar"}:
        message = f"give one of json, json_object, regex, choice and grammar, not {', '.join(given) or 'none'}"
        raise InvalidValueError(f"structured_outputs: {message}", param="structured_outputs")
    return _constraint(*given.popitem())


def _constraint(name: str, value: Any) -> GrammarSpec:
    """Return the grammar of a parameter by its name. Raises InvalidValueError for a value of a wrong type."""
    if name == "json_object":
        return GrammarSpec(kind="json_object", source="")
    is_json = name in ("json", "json_schema", "choice")
    if not isinstance(value, str) or name == "choice":
        if not is_json or not isinstance(value, Mapping | list | tuple | bool):
            kind = "a list of texts" if name == "choice" else "a schema" if is_json else "a text"
            raise InvalidValueError(f"{name} is {kind}, not {type(value).__name__}", param=name)
        try:
            value = msgspec.json.encode(value).decode()
        except (TypeError, ValueError) as error:
            raise InvalidValueError(f"{name} is no JSON: {error}", param=name) from None
    if name in ("ebnf", "grammar"):
        return grammar_spec(value)
    return GrammarSpec(kind="json_schema" if name == "json" else name, source=value)


EMBED = SamplingParams(embed=True, max_tokens=0)  # for an embedding or the values of a classification head


class Tenant(msgspec.Struct, frozen=True, omit_defaults=True):
    """The owner of a request, among whom the engine is shared fairly."""

    name: str = ""
    weight: Annotated[float, msgspec.Meta(gt=0, le=1e6)] = 1.0  # its share, relative to the weights of the others
    max_running: Annotated[int, msgspec.Meta(ge=1)] | None = None  # requests with a slot; further ones wait


class Prefilled(msgspec.Struct, frozen=True, omit_defaults=True):
    """Values reported by the engine that computed the prompt. seconds: time since that engine got the prompt"""

    num_cached_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0
    queue_seconds: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    seconds: Annotated[float, msgspec.Meta(ge=0)] = 0.0


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One sequence to generate. A request for n > 1 choices becomes n EngineRequests with the same `group`."""

    request_id: str  # made by the server; never reused
    client_id: str = ""  # the client's own id, for logs; not unique
    prompt_token_ids: list[Int32]
    params: SamplingParams
    priority: Int32 = 0  # lower runs earlier
    tenant: Tenant | None = None  # None: the default one
    namespace: str = ""  # of the prefix cache, made of cache_salt and extra_key; namespaces share no pages
    adapter: str = ""  # digest of a loaded adapter; empty: none. The namespace begins with it
    group: str = ""  # shared by the siblings of one n > 1 request; made by the server, unique
    # seconds from arrival, after which it ends with an error
    deadline: Annotated[float, msgspec.Meta(le=1e12)] | None = None
    hold_seconds: Annotated[float, msgspec.Meta(ge=0, le=3600)] = 0.0  # see Request
    prefilled: Prefilled | None = None  # None: no other engine has computed the prompt
    # tokens sent to the client before an engine restart; they continue the output, not the prompt
    resumed_token_ids: list[Int32] = []
    replica: int | None = None  # which of the server's engines computes it; None: the router chooses
    # its client's request was accepted before, so no drain and no full queue refuses it
    already_accepted: bool = False
    # an engine has answered a part of its client's request, so a pause that waits for requests waits for it too
    partly_answered: bool = False
    is_answered: bool = False  # an engine that died sent its first output: values that are sent once are not sent again
    pictures: tuple[Picture, ...] = ()  # of the prompt, in its order


MAX_SEED = 2**63 - 1


def siblings(request: EngineRequest, new_id: Callable[[], str], seed: int | None) -> list[EngineRequest]:
    """Return one request per choice, each with its own id and seed, in one group. They share the list of prompt tokens.

    seed: seed of the first choice; each further choice adds 1. None: the engine draws the seeds. Raises
    InvalidValueError for n < 1.
    """
    params = request.params
    if not isinstance(params.n, int) or params.n < 1:
        raise InvalidValueError(f"n is a whole number of at least 1, not {params.n!r}", param="n")
    if not isinstance(seed, int | None):
        raise InvalidValueError(f"seed is a whole number, not {seed!r}", param="seed")
    ids = [new_id() for _ in range(params.n)]
    group = ids[0] if params.n > 1 else ""
    seeds = [None if seed is None else (seed + index) & MAX_SEED for index in range(params.n)]
    return [
        msgspec.structs.replace(
            request, request_id=each, group=group, params=msgspec.structs.replace(params, n=1, seed=own)
        )
        for each, own in zip(ids, seeds, strict=True)
    ]


def request_seed(configured: int | None) -> int:
    """Return `runtime.random_seed`; if it is not set, draw a seed from the operating system.

    A fixed seed gives the requests of every start the same sequence of seeds. A drawn one is logged at the level debug,
    so that a run can be repeated.
    """
    if configured is not None:
        return configured
    seed = secrets.randbits(63)
    logger.debug("runtime.random_seed: %d was drawn", seed)
    return seed


_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))

Array = TypeVar("Array", bound=Any)  # jax.Array or np.ndarray; this file must not import jax


def threefry2x32(key0: Array, key1: Array, count0: Array, count1: Array) -> tuple[Array, Array]:
    """Return two uint32 arrays [...] of random bits for four uint32 arrays [...] of one shape, by numpy or by JAX."""
    keys = (key0, key1, key0 ^ key1 ^ np.uint32(0x1BD11BDA))
    x0, x1 = count0 + keys[0], count1 + keys[1]
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            x0 = x0 + x1
            x1 = ((x1 << np.uint32(rotation)) | (x1 >> np.uint32(32 - rotation))) ^ x0
        x0 = x0 + keys[(group + 1) % 3]
        x1 = x1 + keys[(group + 2) % 3] + np.uint32(group + 1)
    return x0, x1
