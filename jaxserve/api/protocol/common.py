"""What the bodies of all generating routes have in common: their base class, the sampling fields, the known refusals.

A field of no known API is kept in `model_extra` and logged once (see body.py), in nested objects too; a field of a
known API that this server does not support stands in UNSUPPORTED and is answered 400.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, PrivateAttr
from pydantic_core import CoreSchema

from jaxserve.api.protocol import limits

# field -> why. A null, false, empty list or empty object says "not used" and passes.
UNSUPPORTED: dict[str, str] = {
    "audio": "the model makes text only",
    "web_search_options": "hosted tools are not offered",
    "prompt_embeds": "tensors from clients are not accepted",
    "input_embeds": "tensors from clients are not accepted",
    "chat_template": "a template in a request is not accepted; set model.chat_template on the server",
    "custom_logit_processor": "serialized code is not accepted",
    "logits_processors": "serialized code is not accepted",
    "custom_params": "they are read by custom logit processors, which are not accepted",
    "vllm_xargs": "there are no custom processors to read it",
    "kv_transfer_params": "prefill and decode run in one engine",
    "ec_transfer_params": "there is no separate encoder",
    "bootstrap_host": "prefill and decode run in one engine",
    "bootstrap_port": "prefill and decode run in one engine",
    "bootstrap_room": "prefill and decode run in one engine",
    "disagg_prefill_dp_rank": "prefill and decode run in one engine",
    "lora_path": "no adapter is loaded",
    "lora_name": "no adapter is loaded",
    "image_data": "the model takes text only",
    "audio_data": "the model takes text only",
    "video_data": "the model takes text only",
    "mm_processor_kwargs": "the model takes text only",
    "media_io_kwargs": "the model takes text only",
    "images_config": "the model takes text only",
    "video_config": "the model takes text only",
    "max_dynamic_patch": "the model takes text only",
    "min_dynamic_patch": "the model takes text only",
    "use_audio_in_video": "the model takes text only",
    "embed_dtype": "embeddings are float32",
    "endianness": "embeddings are little-endian",
}


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
    """A number in quotes is no number. Unknown keys pass. A list is left at its first wrong item: an error for each of
    a million, in each branch of a union, would hold up the whole server for half a minute."""

    model_config = ConfigDict(strict=True, extra="allow")

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        _make_lists_fail_fast(schema)
        return schema


class Body(_Strict):
    """A JSON object from a client."""

    _size: int = PrivateAttr(0)

    @property
    def size(self) -> int:
        """Bytes of the JSON text, which bound the work that its parts can make; 0 if it was not made of any."""
        return self._size

    def note_size(self, size: int) -> None:
        self._size = size


class Part(_Strict):
    """A nested object."""

    @property
    def unknown_fields(self) -> dict[str, Any]:
        return self.model_extra or {}


class StreamOptions(Part):
    include_usage: bool | None = Field(None, description="End with a chunk that holds the usage.")
    continuous_usage_stats: bool | None = Field(
        None, description="The usage so far in every chunk, unless `include_usage` is false."
    )
    include_obfuscation: bool | None = Field(None, description="Accepted; no padding is sent either way.")


class StructuredOutputs(Part):
    """vLLM's form of a constraint; exactly one is given."""

    json_: dict[str, Any] | str | bool | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = Field(None, min_length=1, max_length=limits.MAX_GRAMMAR_CHOICES)
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None


class JsonSchemaFormat(Part):
    name: str | None = Field(None, max_length=64)
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Part):
    """OpenAI's form. Other servers' clients write the schema beside the type; a json_object with a schema has to match
    it too."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema", description="The same as json_schema.schema.")
    value: dict[str, Any] | bool | None = Field(None, description="The same as json_schema.schema.")
    name: str | None = Field(None, max_length=64, description="The same as json_schema.name.")
    description: str | None = Field(None, description="The same as json_schema.description.")
    strict: bool | None = Field(None, description="The same as json_schema.strict.")

    @property
    def unknown_fields(self) -> dict[str, Any]:
        """None for structural_tag: the tag is written into the object itself."""
        return {} if self.type == "structural_tag" else super().unknown_fields


class RepetitionDetection(Part):
    """An output ends when its last tokens are min_count (2) times the same max_pattern_size tokens or fewer."""

    max_pattern_size: int | None = Field(None, ge=0, le=256)
    min_pattern_size: int | None = Field(None, ge=0, le=256)
    min_count: int | None = Field(None, ge=2, le=256)


class SessionParams(Part):
    """Go on in an open session: the tokens of its request `rid`, prompt and output, come before the body's own."""

    id: limits.Identifier = Field(description="Of the session.")
    rid: limits.Identifier | None = Field(None, description="Id of the request to go on from. Default: from nothing.")
    offset: Annotated[int, Field(ge=-(2**31), le=2**31 - 1)] | None = Field(
        None, description="Keep so many of its tokens; negative: but for so many. Default and 0: all."
    )
    replace: bool | None = Field(None, description="Forget what went on from it (from nothing: all) before.")
    drop_previous_output: bool | None = Field(None, description="Go on from its prompt alone.")


class SamplingFields(Body):
    """Fields that chat/completions, completions and responses share. Null is absent."""

    temperature: limits.Temperature | None = Field(None, description="0 is greedy. Default: the model's, else 1.")
    top_p: limits.TopP | None = Field(None, description="Default: the model's, else 1.")
    top_k: limits.TopK | None = Field(None, description="-1 and 0: off. Default: the model's, else off.")
    min_p: limits.MinP | None = Field(None, description="Default: the model's, else 0.")
    frequency_penalty: limits.AdditivePenalty | None = Field(None, description="Default 0.")
    presence_penalty: limits.AdditivePenalty | None = Field(None, description="Default 0.")
    repetition_penalty: limits.RepetitionPenalty | None = Field(None, description="Default: the model's, else 1.")
    seed: limits.Seed | None = Field(None, description="The same seed gives the same tokens.")
    logit_bias: limits.LogitBias | None = Field(None, description="Token id -> added to its logit.")
    allowed_token_ids: limits.TokenIds | None = Field(None, description="No other token is sampled.")
    bad_words: list[limits.StopText] | None = Field(
        None, max_length=limits.MAX_BAD_WORDS, description="Texts that are not written, also after a space."
    )
    min_tokens: limits.TokenCountOrZero | None = Field(None, description="No end before so many. Default 0.")
    ignore_eos: bool | None = Field(None, description="Go on to max_tokens. Default false.")
    stop: limits.StopText | limits.Stops | None = Field(
        None, description="Texts that end the output; at most 4,096 characters in all."
    )
    stop_token_ids: limits.TokenIds | None = Field(None, description="Tokens that end the output, beside the model's.")
    stop_regex: limits.StopPattern | limits.StopPatterns | None = Field(
        None, description="Patterns of RE2 that end the output where a match ends. The matched text stays."
    )
    include_stop_str_in_output: bool | None = Field(
        None, description="Keep the stop string or token that ended the output. Default false."
    )
    no_stop_trim: bool | None = Field(None, description="The same as include_stop_str_in_output.")
    skip_special_tokens: bool | None = Field(None, description="Default true.")
    spaces_between_special_tokens: bool | None = Field(None, description="Default true. Fast tokenizers add none.")

    watermark: bool | None = Field(None, description="Default: yes where the server has a watermark key, else a 400.")
    watermarking: bool | None = Field(None, description="The same as watermark.")
    use_beam_search: bool | None = Field(None, description="The n best outputs by beam search; not streamed.")
    length_penalty: limits.LengthPenalty | None = Field(None, description="Of the beam search. Default 1.")
    repetition_detection: RepetitionDetection | None = Field(None, description="End an output that repeats itself.")
    n: limits.Choices | None = Field(None, description="Choices. Default 1.")
    prompt_logprobs: limits.LogprobsCount | None = Field(None, description="Log-probabilities of the prompt.")
    logprob_token_ids: limits.WatchedIds | None = Field(
        None, description="Log-probabilities of these tokens, in the place of the likeliest. Needs logprobs."
    )
    return_sampling_mask: bool | None = Field(
        None, description="meta_info with the candidates that each token was drawn from, at most 256."
    )
    sampling_logprobs_mode: Literal["selected", "support"] | None = Field(
        None, description="With return_sampling_mask: log-probabilities of the token, or of every candidate."
    )
    return_hidden_states: bool | Literal["last"] | None = Field(
        None, description="hidden_states: what the last token was drawn after, normed as the head takes it."
    )
    return_routed_experts: bool | None = Field(
        None, description="routed_experts in the choice's sglext: base64 of int32 [tokens, sparse layers, experts]."
    )
    routed_experts_start_len: limits.TokenCountOrZero | None = Field(
        None, description="First prompt position of them. Default 0."
    )
    stream: bool | None = Field(None, description="Server-sent events. Default false.")
    stream_options: StreamOptions | None = Field(None, description="Only with stream.")
    stream_interval: limits.TokenCount | None = Field(None, description="Tokens in a chunk, at least. Default 1.")

    response_format: ResponseFormat | None = Field(None, description="What the output must be; OpenAI's form.")
    structured_outputs: StructuredOutputs | None = Field(None, description="The same in vLLM's form.")
    json_schema: str | dict[str, Any] | None = Field(None, description="The same: a schema, or its JSON text.")
    regex: str | None = Field(None, description="The output must match the pattern, in which \\d and \\w are ASCII.")
    ebnf: str | None = Field(None, description="The output must match the grammar.")
    guided_json: str | dict[str, Any] | None = Field(None, description="The older name of structured_outputs.json.")
    guided_regex: str | None = Field(None, description="The older name of structured_outputs.regex.")
    guided_choice: Annotated[list[str], Field(min_length=1, max_length=limits.MAX_GRAMMAR_CHOICES)] | None = Field(
        None, description="The older name of structured_outputs.choice."
    )
    guided_grammar: str | None = Field(None, description="The older name of structured_outputs.grammar.")

    user: str | None = Field(None, description="Not used.")
    priority: limits.Priority | None = Field(None, description="Lower runs earlier (policy: priority). Default 0.")
    cache_salt: limits.CacheSalt | None = Field(None, description="Only requests with the same share a prefix.")
    extra_key: limits.CacheSalt | None = Field(None, description="The same as cache_salt; both are combined.")
    request_id: limits.Identifier | None = Field(
        None, description="The id of the answer, for aborts and logs. Requests may share one."
    )
    rid: limits.Identifier | None = Field(None, description="The same as request_id.")
    session_id: str | None = Field(None, description="Not used: a hint for routers; prefixes are found by content.")
    session_params: SessionParams | None = Field(None, description="Go on in a session of /open_session.")
    data_parallel_rank: Literal[0] | None = Field(None, description="There is one engine: 0.")
    routed_dp_rank: Literal[0] | None = Field(None, description="There is one engine: 0.")
    truncate_prompt_tokens: int | None = Field(None, ge=-1, le=2**31 - 1, description="Keep so many; -1: what fits.")
    truncation_side: Literal["left", "right"] | None = Field(None, description="Where it is cut. Default left.")
    return_token_ids: bool | None = Field(None, description="prompt_token_ids and token_ids in the answer.")
    return_tokens_as_token_ids: bool | None = Field(None, description="Log-probabilities name tokens token_id:N.")
    return_prompt_token_ids: bool | None = Field(None, description="prompt_token_ids in the answer.")
    return_prompt_text: bool | None = Field(None, description="prompt_text in the answer.")
    return_meta_info: bool | None = Field(None, description="SGLang's meta_info in each choice.")
    return_weight_versions: bool | None = Field(None, description="weight_versions in each choice.")
    return_cached_tokens_details: bool | None = Field(None, description="In the choice's sglext.")
    return_spec_tokens_details: bool | None = Field(None, description="In the choice's sglext.")
    return_input_ids_in_sglext: bool | None = None
    return_output_ids_in_sglext: bool | None = None
