"""Declare the fields that the bodies of several routes share: the base classes, constraints and sampling fields.

A field that a body, or an object in it, does not declare is kept in `model_extra`. known_fields.py says whether it is
refused or harmless to ignore. Any other field is logged once (see http/body.py).
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, PrivateAttr
from pydantic_core import CoreSchema

from jaxserve.api import ranges
from jaxserve.api.known_fields import EVERYWHERE, KnownFields


def _make_lists_fail_fast(schema: Any) -> None:
    if isinstance(schema, dict):
        if schema.get("type") == "list":
            schema["fail_fast"] = True
        for value in schema.values():
            _make_lists_fail_fast(value)
    elif isinstance(schema, list | tuple):
        for value in schema:
            _make_lists_fail_fast(value)


class _Strict(BaseModel):
    """Refuse numbers in quotes, accept unknown keys, and stop at the first invalid item of a list.

    An error for each of a million items, in each branch of a union, would block the server for 30 s.
    """

    model_config = ConfigDict(strict=True, extra="allow")
    known: ClassVar[KnownFields] = KnownFields()  # fields that the object does not serve

    @property
    def unknown_fields(self) -> dict[str, Any]:
        """Return the fields that the object does not serve, without fields that may have any name."""
        return self.model_extra or {}

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        _make_lists_fail_fast(schema)
        return schema


class Body(_Strict):
    """A JSON object sent by a client."""

    known = EVERYWHERE
    _size: int = PrivateAttr(0)

    @property
    def size(self) -> int:
        """Return the bytes of the JSON text, which bound the work that its parts can cause; 0 without a text."""
        return self._size

    def note_size(self, size: int) -> None:
        self._size = size


class NestedObject(_Strict):
    """A nested object."""


class StreamOptions(NestedObject):
    include_usage: bool | None = Field(None, description="End with a chunk that holds the usage.")
    continuous_usage_stats: bool | None = Field(
        None, description="Usage so far in every chunk, unless `include_usage` is false."
    )
    include_obfuscation: bool | None = Field(None, description="Accepted and ignored: no padding is sent.")


class StructuredOutputs(NestedObject):
    """vLLM's form of a constraint; exactly one is given."""

    json_: dict[str, Any] | str | bool | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = Field(None, min_length=1, max_length=ranges.MAX_GRAMMAR_CHOICES)
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None


class JsonSchemaFormat(NestedObject):
    name: str | None = Field(None, max_length=64)
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(NestedObject):
    """OpenAI's form. A schema beside the type is accepted too; a json_object with a schema must match it."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema", description="The same as json_schema.schema.")
    value: dict[str, Any] | bool | None = Field(None, description="The same as json_schema.schema.")
    name: str | None = Field(None, max_length=64, description="The same as json_schema.name.")
    description: str | None = Field(None, description="The same as json_schema.description.")
    strict: bool | None = Field(None, description="The same as json_schema.strict.")

    @property
    def unknown_fields(self) -> dict[str, Any]:
        """None for structural_tag, whose tag is written into the object itself."""
        return {} if self.type == "structural_tag" else super().unknown_fields


class TypedGrammar(NestedObject):
    """TGI's form of a constraint."""

    type: Literal["json", "json_object", "json_schema", "regex"]
    value: str | dict[str, Any] | bool | None = None


class RepetitionDetection(NestedObject):
    """End an output if its last tokens repeat one pattern of up to max_pattern_size tokens min_count (2) times."""

    max_pattern_size: int | None = Field(None, ge=0, le=256)
    min_pattern_size: int | None = Field(None, ge=0, le=256)
    min_count: int | None = Field(None, ge=2, le=256)


class SessionParams(NestedObject):
    """Continue an open session: the prompt and output of its request `rid` are put before the body's own tokens."""

    id: ranges.Identifier = Field(description="Id of the session.")
    rid: ranges.Identifier | None = Field(
        None, description="Id of the request to continue from. Default: the session's start."
    )
    offset: Annotated[int, Field(ge=-(2**31), le=2**31 - 1)] | None = Field(
        None,
        description="Keep this many of its tokens; if negative, drop this many from the end. Default and 0: keep all.",
    )
    replace: bool | None = Field(
        None, description="First drop the requests that continued from it (from the session's start: all)."
    )
    drop_previous_output: bool | None = Field(None, description="Continue from its prompt only, without its output.")


class CommonFields(Body):
    """Fields that chat/completions, completions and responses share. Null means absent."""

    temperature: ranges.Temperature | None = Field(None, description="0 is greedy. Default: the model's, else 1.")
    top_p: ranges.TopP | None = Field(None, description="Default: the model's, else 1.")
    top_k: ranges.TopK | None = Field(None, description="-1 and 0: off. Default: the model's, else off.")
    min_p: ranges.MinP | None = Field(None, description="Default: the model's, else 0.")
    frequency_penalty: ranges.AdditivePenalty | None = Field(None, description="Default 0.")
    presence_penalty: ranges.AdditivePenalty | None = Field(None, description="Default 0.")
    repetition_penalty: ranges.RepetitionPenalty | None = Field(None, description="Default: the model's, else 1.")
    seed: ranges.Seed | None = Field(None, description="The same seed gives the same tokens. -1: one is drawn.")
    logit_bias: ranges.LogitBias | None = Field(None, description="Token id -> added to its logit.")
    min_tokens: ranges.TokenCountOrZero | None = Field(
        None, description="The output does not end before this many tokens. Default 0."
    )
    ignore_eos: bool | None = Field(None, description="Ignore the end-of-sequence token. Default false.")
    stop_token_ids: ranges.TokenIds | None = Field(
        None, description="Tokens that end the output, in addition to the model's."
    )
    skip_special_tokens: bool | None = Field(None, description="Default true.")
    priority: ranges.Priority | None = Field(
        None, description="Lower values run earlier (policy: priority). Default 0."
    )
    cache_salt: ranges.CacheSalt | None = Field(
        None, description="Only requests with the same value share cached prefixes."
    )


class SamplingFields(CommonFields):
    """Fields that chat/completions and completions share. Null means absent."""

    allowed_token_ids: ranges.TokenIds | None = Field(None, description="Only these tokens are sampled.")
    bad_words: list[ranges.StopText] | None = Field(
        None, max_length=ranges.MAX_BAD_WORDS, description="Texts that are never generated, also after a space."
    )
    speculate: bool | None = Field(
        None, description="false: no speculation for this request. It changes the time of an answer, not its tokens."
    )
    stop: ranges.StopText | ranges.Stops | None = Field(
        None, description="Texts that end the output; at most 4,096 characters in total."
    )
    stop_regex: ranges.StopPattern | ranges.StopPatterns | None = Field(
        None, description="RE2 patterns; the output ends where a match ends. The matched text stays."
    )
    include_stop_str_in_output: bool | None = Field(
        None, description="Keep the stop string or token that ended the output. Default false."
    )
    no_stop_trim: bool | None = Field(None, description="The same as include_stop_str_in_output.")
    spaces_between_special_tokens: bool | None = Field(None, description="Default true. Fast tokenizers add none.")

    watermark: bool | None = Field(
        None, description="Default: true if the server has a watermark key; otherwise true is answered with 400."
    )
    watermarking: bool | None = Field(None, description="The same as watermark.")
    use_beam_search: bool | None = Field(None, description="Return the n best outputs of a beam search; not streamed.")
    length_penalty: ranges.LengthPenalty | None = Field(None, description="Used by beam search. Default 1.")
    repetition_detection: RepetitionDetection | None = Field(None, description="End an output that repeats itself.")
    n: ranges.Choices | None = Field(None, description="Number of choices. Default 1.")
    prompt_logprobs: ranges.LogprobsCount | None = Field(None, description="Log-probabilities of the prompt.")
    logprob_token_ids: ranges.WatchedIds | None = Field(
        None, description="Log-probabilities of these tokens instead of the most likely ones. Needs logprobs."
    )
    return_sampling_mask: bool | None = Field(
        None, description="In meta_info: the candidates that each token was sampled from, at most 256."
    )
    sampling_logprobs_mode: Literal["selected", "support"] | None = Field(
        None, description="With return_sampling_mask: log-probabilities of the token, or of every candidate."
    )
    return_hidden_states: bool | Literal["last"] | None = Field(
        None, description="In hidden_states: the state that the last token was sampled from, after the final norm."
    )
    return_routed_experts: bool | None = Field(
        None, description="routed_experts in the choice's sglext: base64 of int32 [tokens, sparse layers, experts]."
    )
    routed_experts_start_len: ranges.TokenCountOrZero | None = Field(
        None, description="First prompt position of routed_experts. Default 0."
    )
    stream: bool | None = Field(None, description="Server-sent events. Default false.")
    stream_options: StreamOptions | None = Field(None, description="Only with stream.")
    stream_interval: ranges.TokenCount | None = Field(None, description="Minimum tokens per chunk. Default 1.")

    response_format: ResponseFormat | None = Field(None, description="The format of the output, in OpenAI's form.")
    structured_outputs: StructuredOutputs | None = Field(None, description="The same in vLLM's form.")
    json_schema: str | dict[str, Any] | None = Field(None, description="The same: a schema, or its JSON text.")
    regex: str | None = Field(None, description="The output must match the pattern, in which \\d and \\w are ASCII.")
    ebnf: str | None = Field(
        None,
        description="The output must match the grammar. Literals and rules without recursion match the longest text.",
    )
    guided_json: str | dict[str, Any] | None = Field(None, description="The older name of structured_outputs.json.")
    guided_regex: str | None = Field(None, description="The older name of structured_outputs.regex.")
    guided_choice: Annotated[list[str], Field(min_length=1, max_length=ranges.MAX_GRAMMAR_CHOICES)] | None = Field(
        None, description="The older name of structured_outputs.choice."
    )
    guided_grammar: str | None = Field(None, description="The older name of structured_outputs.grammar.")
    grammar: str | TypedGrammar | None = Field(
        None, description="The same as ebnf, as in llama.cpp; or type and value, as in TGI."
    )
    format: Literal["", "json"] | dict[str, Any] | None = Field(
        None, description="json, or a schema, as in Ollama: the same as response_format and json_schema."
    )

    user: str | None = Field(None, description="Ignored.")
    extra_key: ranges.CacheSalt | None = Field(
        None, description="The same as cache_salt; if both are given, they are combined."
    )
    request_id: ranges.Identifier | None = Field(
        None, description="The id of the answer, for aborts and logs. Requests may share one."
    )
    rid: ranges.Identifier | None = Field(None, description="The same as request_id.")
    session_id: str | None = Field(None, description="Ignored: a hint for routers; prefixes are found by content.")
    session_params: SessionParams | None = Field(None, description="Continue a session of /open_session.")
    data_parallel_rank: ranges.Rank | None = Field(
        None,
        description="The engine that computes the request, below mesh.replicas. Default: the best one.",
    )
    routed_dp_rank: ranges.Rank | None = Field(None, description="The same as data_parallel_rank.")
    truncate_prompt_tokens: int | None = Field(
        None, ge=-1, le=2**31 - 1, description="Keep this many prompt tokens; -1: as many as fit."
    )
    truncation_side: Literal["left", "right"] | None = Field(None, description="The end that is cut. Default left.")
    return_token_ids: bool | None = Field(None, description="Add prompt_token_ids and token_ids to the answer.")
    return_tokens_as_token_ids: bool | None = Field(None, description="Name tokens as token_id:N in log-probabilities.")
    return_prompt_token_ids: bool | None = Field(None, description="Add prompt_token_ids to the answer.")
    return_prompt_text: bool | None = Field(None, description="Add prompt_text to the answer.")
    return_meta_info: bool | None = Field(None, description="Add SGLang's meta_info to each choice.")
    return_weight_versions: bool | None = Field(None, description="Add weight_versions to each choice.")
    return_cached_tokens_details: bool | None = Field(None, description="In the choice's sglext.")
    return_spec_tokens_details: bool | None = Field(None, description="In the choice's sglext.")
    return_input_ids_in_sglext: bool | None = None
    return_output_ids_in_sglext: bool | None = None
