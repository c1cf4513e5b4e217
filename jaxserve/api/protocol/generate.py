"""Request body of POST /generate: SGLang's native form."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field

from jaxserve.api.protocol import limits
from jaxserve.api.protocol.common import Body, NestedObject, SessionParams
from jaxserve.api.protocol.known_fields import EVERYWHERE, GENERATE, NATIVE_SAMPLING


class NativeSampling(NestedObject):
    """`sampling_params` of /generate. Absent fields take the model's defaults, as on the other routes."""

    known = EVERYWHERE | NATIVE_SAMPLING

    max_new_tokens: limits.TokenCountOrZero | None = Field(None, description="Default 128.")
    min_new_tokens: limits.TokenCountOrZero | None = None
    temperature: limits.Temperature | None = None
    top_p: limits.TopP | None = None
    top_k: limits.TopK | None = None
    min_p: limits.MinP | None = None
    frequency_penalty: limits.AdditivePenalty | None = None
    presence_penalty: limits.AdditivePenalty | None = None
    repetition_penalty: limits.RepetitionPenalty | None = None
    logit_bias: limits.LogitBias | None = None
    stop: limits.StopText | limits.Stops | None = None
    stop_token_ids: limits.TokenIds | None = None
    stop_regex: limits.StopPattern | limits.StopPatterns | None = None
    ignore_eos: bool | None = None
    speculate: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    n: limits.Choices | None = None
    sampling_seed: limits.Seed | None = None
    json_schema: str | dict[str, Any] | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None
    stream_interval: limits.TokenCount | None = None


T = TypeVar("T")
PerPrompt = Annotated[list[T], Field(max_length=limits.MAX_PROMPTS)]


class GenerateRequest(Body):
    known = EVERYWHERE | GENERATE

    text: str | Annotated[list[str], Field(max_length=limits.MAX_PROMPTS)] | None = None
    input_ids: limits.TokenIds | Annotated[list[limits.TokenIds], Field(max_length=limits.MAX_PROMPTS)] | None = None
    sampling_params: NativeSampling | PerPrompt[NativeSampling] | None = None
    session_id: str | None = Field(None, description="Ignored: a hint for routers.")
    session_params: SessionParams | None = Field(
        None, description="Continue a session of /open_session; only with one prompt."
    )
    rid: limits.Identifier | PerPrompt[limits.Identifier] | None = None
    return_logprob: bool | PerPrompt[bool] | None = None
    logprob_start_len: limits.PromptStart | PerPrompt[limits.PromptStart] | None = Field(
        None, description="First prompt position, at most the number of prompt tokens; -1: outputs only."
    )
    top_logprobs_num: limits.LogprobsCount | PerPrompt[limits.LogprobsCount] | None = None
    token_ids_logprob: limits.WatchedIds | PerPrompt[limits.WatchedIds] | None = Field(
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
    routed_experts_start_len: limits.TokenCountOrZero | None = Field(
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
    priority: limits.Priority | None = None
    data_parallel_rank: limits.Rank | None = None
    routed_dp_rank: limits.Rank | None = None
    extra_key: limits.CacheSalt | PerPrompt[limits.CacheSalt] | None = None
