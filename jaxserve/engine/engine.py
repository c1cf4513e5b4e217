"""The engine in process and in step with the caller: no thread, no socket, no HTTP. For research scripts and tests.

    engine = Engine("DIR")
    engine.generate(["Once upon a time"], SamplingParams(max_tokens=32))

or step by step: `add_request`, then `step` until `has_unfinished` is False. `engine.runner` is the device side:
its programs are plain functions over pytrees.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from jaxserve.config import Config
from jaxserve.engine.core import EngineCore
from jaxserve.engine.factory import build_engine
from jaxserve.engine.messages import EngineInfo, FromEngine, Located
from jaxserve.engine.output import RequestOutput, SequenceText
from jaxserve.engine.request import (
    EngineRequest,
    FinishReason,
    SamplingParams,
    Support,
    TokenLogprobs,
    TokenOutput,
)
from jaxserve.errors import ServerError
from jaxserve.text.tokenizer import Tokenizer

Prompt = str | list[int]


@dataclass(slots=True)
class Completion:
    """One finished sequence."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    support: list[Support] = field(default_factory=list)  # where params.support asked for it; aligned with token_ids
    hidden: bytes = b""  # float32, little endian, [tokens, D], where params.hidden_states asked for them
    prompt_hidden: bytes | None = None  # likewise of the prompt
    experts: bytes = b""  # int32, little endian, [tokens, L, K], where params.experts asked: of the token before each
    prompt_experts: bytes | None = None  # likewise of the prompt
    finish_reason: FinishReason | None = None
    matched_stop: int | str | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    embedding: bytes | None = None  # float32, little endian, where params.embed asked for it

    def add(self, output: RequestOutput) -> None:
        self.text += output.text
        self.token_ids += output.token_ids
        if output.logprobs is not None:
            self.logprobs = (self.logprobs or []) + output.logprobs
        self.prompt_logprobs = output.prompt_logprobs or self.prompt_logprobs
        self.support += output.support or ()
        self.hidden += output.hidden or b""
        self.prompt_hidden = output.prompt_hidden or self.prompt_hidden
        self.experts += output.experts or b""
        self.prompt_experts = output.prompt_experts or self.prompt_experts
        self.finish_reason, self.matched_stop = output.finish_reason, output.matched_stop
        self.num_prompt_tokens = output.num_prompt_tokens
        self.num_cached_tokens = output.num_cached_tokens
        self.embedding = output.embedding


class Engine:
    """A model, its scheduler and its text side in this process.

    model: hub id or directory; None is the embedded demo model. `keys` are configuration keys by bare name
    (`max_num_seqs=8`); or pass a whole `config`. Raises ConfigError.
    """

    def __init__(self, model: str | None = None, *, config: Config | None = None, **keys: Any) -> None:
        self.config = config or Config.of(model, **keys)
        self._tokenizer_dir = ""
        built = build_engine(self.config, self._on_message)
        self.core: EngineCore = built.core
        self.info: EngineInfo = built.info
        self.tokenizer = Tokenizer.from_directory(self._tokenizer_dir)
        self._sequences: dict[str, SequenceText] = {}
        self._ids = itertools.count()

    def _on_message(self, message: FromEngine) -> None:
        if isinstance(message, Located):
            self._tokenizer_dir = message.tokenizer_dir

    @property
    def runner(self) -> Any:
        """The ModelRunner: weights, KV cache and compiled programs."""
        return self.core.runner

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[list[Completion]]:
        """Run prompts to their end, batched: for each prompt (text or token ids) its n completions.

        Raises ServerError if a sequence failed on the device, RequestError for a prompt that cannot be run.
        """
        batch = _as_list(prompts)
        each = _params_for(batch, params)
        ids = [self.add_request(prompt, one) for prompt, one in zip(batch, each, strict=True)]
        results = {key: [Completion() for _ in range(one.n)] for key, one in zip(ids, each, strict=True)}
        while self.has_unfinished:
            for output in self.step():
                results[output.request_id][output.index].add(output)
        return [results[key] for key in ids]

    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
    ) -> str:
        """Queue a prompt; the id that its outputs will carry."""
        params = params or SamplingParams()
        token_ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        base = request_id or f"request-{next(self._ids)}"
        for index in range(params.n):
            seed = None if params.seed is None else params.seed + index
            self.core.add(
                EngineRequest(
                    request_id=f"{base}-{index}",
                    prompt_token_ids=token_ids,
                    params=msgspec.structs.replace(params, n=1, seed=seed),
                    priority=priority,
                    namespace=cache_salt,
                    group=base if params.n > 1 else "",
                )
            )
            self._sequences[f"{base}-{index}"] = SequenceText(base, index, token_ids, params, self.tokenizer)
        return base

    @property
    def has_unfinished(self) -> bool:
        return bool(self._sequences)

    def step(self) -> list[RequestOutput]:
        """One turn of the engine: dispatches the next step and returns what the previous one produced."""
        return [result for output in self.core.step() if (result := self._text(output)) is not None]

    def _text(self, output: TokenOutput) -> RequestOutput | None:
        sequence = self._sequences.get(output.request_id)
        if sequence is None:
            return None  # it ended by a stop string; the engine made one more token meanwhile
        if output.finish_reason is FinishReason.ERROR:
            del self._sequences[output.request_id]
            raise ServerError(f"{output.request_id}: {output.error}")
        result = sequence.push(output)
        if result.finished:
            del self._sequences[output.request_id]
            if sequence.stopped_by_text:
                self.core.abort([output.request_id])
        return result

    def abort(self, request_id: str) -> None:
        """End all sequences of a request now; it yields nothing more."""
        ids = [key for key in self._sequences if key.rpartition("-")[0] == request_id]
        for key in ids:
            del self._sequences[key]
        self.core.abort(ids)

    def update_weights(self, leaves: Any) -> None:
        """Replace the weights by a pytree of the same structure, shapes and dtypes; nothing is compiled.

        The prefix cache is dropped, since its pages hold the old weights' keys and values. Raises ServerError
        while requests are running.
        """
        if self.has_unfinished:
            raise ServerError("weights can be updated only while no request is running")
        self.core.drain()  # the step in flight behind the last stop
        self.runner.update_weights(leaves)
        self.core.flush_prefix_cache()


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if prompts and isinstance(prompts[0], int):
        return [[int(token) for token in prompts if isinstance(token, int)]]
    return [prompt for prompt in prompts if not isinstance(prompt, int)]


def _params_for(batch: list[Prompt], params: SamplingParams | Sequence[SamplingParams] | None) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * len(batch)
    return list(params)
