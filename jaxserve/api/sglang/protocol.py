"""Declare the bodies and answers of /generate, /tokenize, /detokenize and the operator's routes, in SGLang's forms.

If a field allows only one value here, any other value is an error that names the field.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, RootModel

from jaxserve.api import ranges
from jaxserve.api.answers import Answer
from jaxserve.api.fields import Body, NestedObject, SessionParams
from jaxserve.api.known_fields import EVERYWHERE, GENERATE, NATIVE_SAMPLING
from jaxserve.api.openai.protocol import ChatMessage, Tool


class NativeSampling(NestedObject):
    """`sampling_params` of /generate. Absent fields take the model's defaults, as on the other routes."""

    known = EVERYWHERE | NATIVE_SAMPLING

    max_new_tokens: ranges.TokenCountOrZero | None = Field(None, description="Default 128.")
    min_new_tokens: ranges.TokenCountOrZero | None = None
    temperature: ranges.Temperature | None = None
    top_p: ranges.TopP | None = None
    top_k: ranges.TopK | None = None
    min_p: ranges.MinP | None = None
    frequency_penalty: ranges.AdditivePenalty | None = None
    presence_penalty: ranges.AdditivePenalty | None = None
    repetition_penalty: ranges.RepetitionPenalty | None = None
    logit_bias: ranges.LogitBias | None = None
    stop: ranges.StopText | ranges.Stops | None = None
    stop_token_ids: ranges.TokenIds | None = None
    stop_regex: ranges.StopPattern | ranges.StopPatterns | None = None
    ignore_eos: bool | None = None
    speculate: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    n: ranges.Choices | None = None
    sampling_seed: ranges.Seed | None = None
    json_schema: str | dict[str, Any] | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None
    stream_interval: ranges.TokenCount | None = None


T = TypeVar("T")
PerPrompt = Annotated[list[T], Field(max_length=ranges.MAX_PROMPTS)]


class GenerateRequest(Body):
    known = EVERYWHERE | GENERATE

    text: str | Annotated[list[str], Field(max_length=ranges.MAX_PROMPTS)] | None = None
    input_ids: ranges.TokenIds | Annotated[list[ranges.TokenIds], Field(max_length=ranges.MAX_PROMPTS)] | None = None
    sampling_params: NativeSampling | PerPrompt[NativeSampling] | None = None
    session_id: str | None = Field(None, description="Ignored: a hint for routers.")
    session_params: SessionParams | None = Field(
        None, description="Continue a session of /open_session; only with one prompt."
    )
    rid: ranges.Identifier | PerPrompt[ranges.Identifier] | None = None
    return_logprob: bool | PerPrompt[bool] | None = None
    logprob_start_len: ranges.PromptStart | PerPrompt[ranges.PromptStart] | None = Field(
        None, description="First prompt position, at most the number of prompt tokens; -1: outputs only."
    )
    top_logprobs_num: ranges.LogprobsCount | PerPrompt[ranges.LogprobsCount] | None = None
    token_ids_logprob: ranges.WatchedIds | PerPrompt[ranges.WatchedIds] | None = Field(
        None, description="Log-probabilities of these tokens as well; needs return_logprob."
    )
    return_text_in_logprobs: bool | None = None
    return_sampling_mask: bool | PerPrompt[bool] | None = Field(
        None, description="The candidates that each token was sampled from, at most 256."
    )
    sampling_logprobs_mode: Literal["selected", "support"] | None = Field(
        None, description="With return_sampling_mask: log-probabilities of the token, or of every candidate."
    )
    return_routed_experts: bool | None = Field(
        None, description="In meta_info: base64 of int32 [tokens, sparse layers, experts]."
    )
    routed_experts_start_len: ranges.TokenCountOrZero | None = Field(
        None, description="First prompt position of routed_experts. Default 0."
    )
    watermark: bool | None = Field(
        None, description="Default: true if the server has a watermark key; otherwise true is answered with 400."
    )
    return_hidden_states: bool | Literal["last"] | PerPrompt[bool | Literal["last"]] | None = Field(
        None,
        description="The state each token was sampled from, after the final norm; the first entry covers the prompt.",
    )
    stream: bool | None = None
    incremental: bool | None = Field(
        None, description="Events hold only what is new: text, ids, output lists of meta_info."
    )
    priority: ranges.Priority | None = None
    data_parallel_rank: ranges.Rank | None = None
    routed_dp_rank: ranges.Rank | None = None
    extra_key: ranges.CacheSalt | PerPrompt[ranges.CacheSalt] | None = None
    lora_path: str | PerPrompt[str | None] | None = Field(
        None, description="Name of a loaded adapter, one for all prompts of a request. Default: the model alone."
    )


Texts = Annotated[list[str], Field(min_length=1, max_length=ranges.MAX_PROMPTS)]


class TokenizeRequest(Body):
    model: str | None = None
    prompt: str | Texts | None = Field(None, description="A text or texts; or give messages.")
    text: str | None = Field(None, description="The same as prompt.")
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=ranges.MAX_MESSAGES)] | None = None
    tools: Annotated[list[Tool], Field(max_length=ranges.MAX_TOOLS)] | None = None
    add_special_tokens: bool | None = Field(None, description="Default true for texts, false for messages.")
    add_generation_prompt: bool | None = Field(None, description="Default true.")
    continue_final_message: bool | None = Field(None, description="Default false.")
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = Field(
        None, description="Also return each token's text in the vocabulary's own spelling."
    )


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: ranges.TokenIds | Annotated[list[ranges.TokenIds], Field(max_length=ranges.MAX_PROMPTS)] | None = None
    ids: ranges.TokenIds | None = Field(None, description="The same as tokens.")
    skip_special_tokens: bool | None = Field(None, description="Default false.")


MAX_PATH = 4096  # characters
Label = Annotated[str, Field(min_length=1, max_length=128)]
Tags = Annotated[list[Literal["weights", "kv_cache"]], Field(min_length=1, max_length=8)]
_NO_TORCH = "No effect: there is no torch."


class UpdateWeightsRequest(Body):
    model_path: Annotated[str, Field(min_length=1, max_length=MAX_PATH)] = Field(
        description="A directory with safetensors files, in one of server.weights_directories or the model's own."
    )
    weight_version: Label | None = Field(
        None, description="Label of the weights. Default: the number of updates since the start."
    )
    abort_all_requests: bool | None = Field(
        None, description="End running requests. Default false: they are computed again with the new weights."
    )
    load_format: Literal["auto", "safetensors"] | None = None
    flush_cache: Literal[True] | None = Field(None, description="Only true: no prefix of old weights is ever used.")
    keep_pause: Literal[False] | None = Field(None, description="Only false: pause before, and continue later.")
    is_async: Literal[False] | None = Field(None, description="Only false: the answer comes after the update.")
    token_step: Literal[0] | None = Field(None, description="Only 0: give a weight_version.")
    manifest: None = Field(None, description="Only null.")
    recapture_cuda_graph: bool | None = Field(None, description="No effect: compiled programs stay as they are.")
    torch_empty_cache: bool | None = Field(None, description=_NO_TORCH)


class UpdateVersionRequest(Body):
    new_version: Label
    abort_all_requests: bool | None = Field(None, description="End running requests. Default true.")


class ReadWeightsRequest(Body):
    name: Annotated[str, Field(min_length=1, max_length=512)] = Field(
        description="A tensor of the checkpoint, such as model.norm.weight."
    )
    truncate_size: Annotated[int, Field(ge=1, le=2**19)] | None = Field(
        None, description="Most rows (indices of the first axis). Default 100."
    )


class PauseRequest(Body):
    mode: Literal["abort", "retract", "in_place"] | None = Field(
        None, description="Running requests end (abort, the default), or are computed again, or keep their KV."
    )


class ContinueRequest(Body):
    torch_empty_cache: bool | None = Field(None, description=_NO_TORCH)


class MemoryRequest(Body):
    tags: Tags | None = Field(None, description="Default: both.")


class AbortRequest(Body):
    rid: str | None = Field(None, description="Abort requests whose id begins with it.")
    abort_all: bool | None = None


class MetaInfo(Answer):
    id: str
    finish_reason: dict[str, Any] | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    weight_version: str
    weight_versions: list[str] | None = None
    e2e_latency: float
    input_token_logprobs: list[list[Any]] | None = None
    output_token_logprobs: list[list[Any]] | None = None
    input_top_logprobs: list[list[list[Any]] | None] | None = None
    output_top_logprobs: list[list[list[Any]] | None] | None = None
    input_token_ids_logprobs: list[list[list[Any]] | None] | None = None
    output_token_ids_logprobs: list[list[list[Any]] | None] | None = None
    output_token_sampling_mask: list[list[int] | None] | None = None
    output_token_sampling_logprobs: list[float | list[float] | None] | None = None
    hidden_states: list[list[float] | list[list[float]]] | None = None
    routed_experts: str | None = None


class Generated(Answer):
    text: str
    output_ids: list[int]
    meta_info: MetaInfo
    index: int | None = None


class Tokenized(Answer):
    tokens: list[int] | list[list[int]]
    count: int | list[int]
    max_model_len: int
    token_strs: list[str] | list[list[str]] | None


class Detokenized(Answer):
    prompt: str | list[str]
    text: str | list[str]


class Aborted(Answer):
    success: bool
    aborted: list[str]


class SessionId(RootModel[str]):
    """The id of a newly opened session."""


class Success(Answer):
    success: bool


class GenerationState(Success):
    status: str
    message: str


class MemoryState(Success):
    asleep: list[str]


class WeightRows(RootModel[list[Any]]):
    """The first rows of a tensor, as nested lists of numbers."""


class WeightsUpdated(Success):
    message: str
    weight_version: str
    num_paused_requests: int
