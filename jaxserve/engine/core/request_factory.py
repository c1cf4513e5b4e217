"""Validates an EngineRequest and makes the engine's Request from it."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import numpy as np

from jaxserve.errors import HTTPError, InvalidSchemaError, InvalidValueError, UnsupportedParameterError
from jaxserve.grammar.token_mask import Matcher, TokenMask
from jaxserve.scheduler.stopping import check_allowed
from jaxserve.types.extras import MAX_LOGPROB_IDS
from jaxserve.types.sampling import MAX_LOGIT_BIAS, EngineRequest, GrammarSpec, SamplingParams
from jaxserve.types.scheduling import SchedulerConfig
from jaxserve.types.step import Request

MakeMatcher = Callable[[GrammarSpec], Matcher]


class RequestFactory:
    """Makes Requests of valid EngineRequests.

    generates: False for an embedding model. seed: from which the seeds of requests without one are derived.
    """

    def __init__(
        self, config: SchedulerConfig, vocab_size: int, generates: bool, seed: int, clock: Callable[[], float]
    ) -> None:
        self._config = config
        self._vocab_size = vocab_size
        self._generates = generates
        self._seeds = random.Random(seed)
        self._clock = clock

    def make(self, requests: Sequence[EngineRequest], prompt: np.ndarray | None = None) -> list[Request]:
        """Return the Requests, in order. A prompt shared by consecutive requests is validated once. Raises
        RequestError.

        prompt: int32 [n], the prompt of all requests, if the caller has it as an array
        """
        checked: list[int] | None = None
        for request in requests:
            if request.prompt_token_ids is not checked:
                checked = request.prompt_token_ids
                self._check_tokens(np.asarray(checked) if prompt is None else prompt)
            self._check_tokens(np.asarray(request.resumed_token_ids))
        return [self._record(request) for request in requests]

    def _check_tokens(self, tokens: np.ndarray) -> None:
        if tokens.size and (tokens.min() < 0 or tokens.max() >= self._vocab_size):
            raise InvalidValueError(f"token ids must be in [0, {self._vocab_size})", param="prompt")

    def _check(self, request: EngineRequest) -> None:
        params = request.params
        if not (params.embed or self._generates):
            raise InvalidValueError("the model makes embeddings or classifies, and generates no text", param="model")
        if params.max_tokens is not None and params.max_tokens < 0:
            raise InvalidValueError(f"max_tokens is {params.max_tokens}", param="max_tokens")
        if request.deadline is not None and not math.isfinite(request.deadline):
            raise InvalidValueError(f"the deadline is {request.deadline} s", param="timeout")
        sampled = 0 if params.embed or params.max_tokens == 0 else 1
        self._config.check_fits(len(request.prompt_token_ids), sampled)
        self._check_logit_bias(params.logit_bias)
        self._check_extras(params)
        check_allowed(params, self._vocab_size)

    def _check_logit_bias(self, bias: dict[int, float]) -> None:
        if len(bias) > MAX_LOGIT_BIAS or not all(0 <= token < self._vocab_size for token in bias):
            message = f"logit_bias takes at most {MAX_LOGIT_BIAS} token ids in [0, {self._vocab_size})"
            raise InvalidValueError(message, param="logit_bias")

    def _check_extras(self, params: SamplingParams) -> None:
        if not params.extras.wanted:
            return
        ids = params.extras.logprob_token_ids
        if len(ids) > MAX_LOGPROB_IDS or not all(0 <= token < self._vocab_size for token in ids):
            message = f"at most {MAX_LOGPROB_IDS} token ids in [0, {self._vocab_size}) can be given"
            raise InvalidValueError(message, param="logprob_token_ids")
        if params.logprobs is None or params.embed:
            raise InvalidValueError("extra outputs are given with log-probabilities only", param="logprobs")

    def _record(self, request: EngineRequest) -> Request:
        self._check(request)
        params, prompt = request.params, request.prompt_token_ids
        room = self._config.max_sequence_tokens - len(prompt)
        max_tokens = 0 if params.embed else params.max_tokens
        now = self._clock()
        return Request(
            request_id=request.request_id,
            prompt_token_ids=prompt,
            params=params,
            arrival=now,
            seed=self._seeds.getrandbits(63) if params.seed is None else params.seed,
            max_tokens=room if max_tokens is None else min(max_tokens, room),
            priority=request.priority,
            tenant=request.tenant,
            namespace=request.namespace,
            group=request.group,
            client_id=request.client_id,
            is_answered=request.is_answered,
            deadline=None if request.deadline is None else now + request.deadline,
            hold_seconds=request.hold_seconds,
            prefilled=request.prefilled,
            output_token_ids=list(request.resumed_token_ids),
        )


def make_mask(record: Request, make_matcher: MakeMatcher | None) -> TokenMask | None:
    """Return the token mask of a request; None if it needs none. Raises RequestError."""
    params = record.params
    if params.grammar is None:
        return TokenMask.of(params, None)
    if make_matcher is None:
        raise UnsupportedParameterError("this engine has no grammars", param="response_format")
    try:
        return TokenMask.of(params, make_matcher(params.grammar), record.mask_budget)
    except HTTPError:
        raise
    # the boundary of one request: whatever its grammar makes the compiler raise ends this request only
    except Exception as error:
        raise InvalidSchemaError(f"the grammar cannot be used: {error}", param="response_format") from error
