"""How a request is sampled and constrained, and the request as it enters the engine.

msgspec Structs, because they cross the socket between the API process and the engine process.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

# Requests of this priority or more are background work (batches): under every policy they run after all others and
# give way to them.
BACKGROUND_PRIORITY = 2**30

MAX_LOGIT_BIAS = 4096  # logit_bias entries a request: the room that the device has for each
MAX_WATCHED = 128  # token ids a request may ask the log-probabilities of, likewise

# What fits the device's arrays. Checked where a frame is decoded: one that breaks it is no message.
Int32 = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Real = Annotated[float, msgspec.Meta(ge=-1e6, le=1e6)]  # NaN and infinity are refused too


class GrammarSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a request's output must match.

    kind: "json_object" | "json_schema" | "regex" | "lark" (structural tags and tool calls too) | "ebnf" | "choice"
    source: the schema as JSON text, the pattern, the grammar text, the JSON list of choices
    checked: what the grammar compiler made of it, for the engine to use as it is; empty: not checked
    """

    kind: str
    source: str
    checked: str = ""
    # output token ids after whose last occurrence the grammar begins (e.g. </think>); empty: at once
    begin_after: tuple[Int32, ...] = ()
    # with begin_after: the grammar begins at once unless the first output token is this one (e.g. <think>)
    begin_unless: tuple[Int32, ...] = ()


class ThinkingBudget(msgspec.Struct, frozen=True, kw_only=True):
    """How long an output may think; then the end of its thinking is written for the model.

    tokens: that the output may have while it thinks
    family: of reasoning, a name of text/reasoning; inside: the prompt leaves the model within its thinking
    tools: names of the request's tools, whose calls end the thinking too
    end_token_ids: tokens of the end, which become a part of the output
    """

    tokens: Count
    family: str
    inside: bool = False
    tools: tuple[str, ...] = ()
    end_token_ids: tuple[Int32, ...]


HiddenStates = Literal["", "last", "all"]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How one request is sampled and when it ends. Values are validated by the caller (`validated()`)."""

    n: Count = 1
    temperature: Real = 1.0  # 0 is greedy
    top_k: Count = 0  # 0: off (the API maps -1 to 0)
    top_p: Real = 1.0
    min_p: Real = 0.0
    repetition_penalty: Real = 1.0  # multiplicative, over prompt and output tokens
    frequency_penalty: Real = 0.0  # additive per occurrence, over output tokens
    presence_penalty: Real = 0.0  # additive once, over output tokens
    logit_bias: dict[Int32, Real] = {}
    allowed_token_ids: tuple[Int32, ...] | None = None
    bad_words_token_ids: tuple[tuple[Int32, ...], ...] = ()
    seed: int | None = None  # None: the engine draws one
    max_tokens: Count | None = 16  # None: the rest of the context
    min_tokens: Count = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[Int32, ...] = ()
    logprobs: Count | None = None  # None: off; k: the chosen token's and the top k's (k <= 20)
    prompt_logprobs: Count | None = None
    grammar: GrammarSpec | None = None
    embed: bool = False  # no tokens: the prompt's pooled hidden state
    watermark_key: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] | None = None  # of text/watermark.py
    # asked for by few; each needs `logprobs`, 0 at least
    watched_token_ids: tuple[Int32, ...] = ()  # their log-probabilities too, at every position
    support: bool = False  # the candidates that each token was drawn from
    experts: bool = False  # the experts that each token was given to, of a model that has some
    hidden_states: HiddenStates = ""  # of the tokens that each token was drawn after; all: and of the whole prompt
    # read by the text side only
    stop: tuple[str, ...] = ()
    stop_regex: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    visible_token_ids: tuple[Int32, ...] = ()  # special tokens that stay in the text: a parser of the output reads them
    spaces_between_special_tokens: bool = True
    thinking: ThinkingBudget | None = None

    @property
    def detailed(self) -> bool:
        """Whether it asks for more of a token than its log-probabilities: such rows are sampled in a dispatch apart."""
        return bool(self.watched_token_ids or self.support or self.hidden_states or self.experts)


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One sequence to generate, as it enters the engine (n > 1 has been expanded: one each, same `group`)."""

    request_id: str  # made by the server and never used again
    client_id: str = ""  # what the client calls the request, for logs: other requests may have the same
    prompt_token_ids: list[Int32]
    params: SamplingParams
    priority: Int32 = 0  # lower runs earlier
    namespace: str = ""  # prefix-cache namespace: adapter and cache salt
    group: str = ""  # siblings of one n > 1 request share it; made by the server, no other request has it
    deadline: Annotated[float, msgspec.Meta(le=1e12)] | None = None  # seconds from arrival; then it ends with an error
    # tokens already delivered to the client before an engine restart; they continue the output, not the prompt
    resumed_token_ids: list[Int32] = []
    is_answered: bool = False  # by an engine that died: what comes once, with the first token, does not come again
