"""From RequestOutputs to the answers of /generate: SGLang's text and meta_info."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from jaxserve.api.details import Candidates, RoutedExperts, SamplingMode, hidden_vectors, matrix
from jaxserve.api.generation import Job
from jaxserve.api.logprobs import TokenTexts, floor
from jaxserve.engine.output import RequestOutput
from jaxserve.engine.request import FinishReason, HiddenStates, TokenLogprobs


@dataclass(frozen=True)
class LogprobOptions:
    """What a request wants of log-probabilities. `start` is the first prompt position; -1: outputs only."""

    wanted: bool = False
    start: int = -1
    top: int = 0
    with_text: bool = False
    watched: tuple[int, ...] = ()
    candidates: bool = False
    sampling_mode: SamplingMode | None = None
    hidden: HiddenStates = ""
    experts_from: int | None = None  # first prompt position; None: not asked for


@dataclass
class NativeChoice:
    """One choice as far as it has come. scoring: no output was asked for, and the engine's one token is nobody's."""

    request_id: str
    job: Job
    options: LogprobOptions
    texts: TokenTexts
    scoring: bool = False
    started: float = field(default_factory=time.perf_counter)
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    last: RequestOutput | None = None
    candidates: Candidates = field(default_factory=Candidates)
    experts: RoutedExperts = field(default_factory=RoutedExperts)
    prompt_hidden: bytes | None = None
    hidden: list[np.ndarray] = field(default_factory=list)

    def add(self, output: RequestOutput) -> RequestOutput:
        """Take an output in; the output as it is to be shown."""
        self._add_hidden(output)
        self.experts.note(output)
        if self.scoring:
            output = _unsaid(output)
        if self.options.candidates:
            self.candidates.note(output)
        self.text += output.text
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs or ()
        self.prompt_logprobs += output.prompt_logprobs or ()
        self.last = output
        return output

    def _add_hidden(self, output: RequestOutput) -> None:
        self.prompt_hidden = output.prompt_hidden or self.prompt_hidden
        if self.options.hidden == "all":
            self.hidden.extend(hidden_vectors(output))
        elif self.options.hidden:
            self.hidden = [*hidden_vectors(output)[-1:]] or self.hidden

    def result(self, delta: RequestOutput | None = None) -> dict[str, Any]:
        """The answer so far; with `delta`, its text and tokens instead of all."""
        shown = self if delta is None else delta
        return {"text": shown.text, "output_ids": list(shown.token_ids), "meta_info": self._meta()}

    def _meta(self) -> dict[str, Any]:
        assert self.last is not None
        meta: dict[str, Any] = {
            "id": self.request_id,
            "finish_reason": self._finish(self.last),
            "prompt_tokens": len(self.job.prompt_token_ids),
            "completion_tokens": len(self.token_ids),
            "cached_tokens": self.last.num_cached_tokens,
            "weight_version": "default",
            "e2e_latency": time.perf_counter() - self.started,
        }
        if self.options.candidates:
            meta |= self.candidates.as_dict(self.options.sampling_mode)
        if self.options.hidden and self.last.finish_reason is not None:
            meta["hidden_states"] = self._hidden_states()
        if self.options.experts_from is not None and self.last.finish_reason is not None:
            meta["routed_experts"] = self.experts.encoded(self.options.experts_from, len(self.job.prompt_token_ids))
        return meta | self._logprobs() if self.options.wanted else meta

    def _hidden_states(self) -> list[Any]:
        """As SGLang: one entry a token, the first of them of the whole prompt; or the last token's alone."""
        found: list[Any] = [vector.tolist() for vector in self.hidden]
        if self.options.hidden == "all" and found:
            found[0] = matrix(self.prompt_hidden, len(self.job.prompt_token_ids)).tolist()
        return found

    def _finish(self, output: RequestOutput) -> dict[str, Any] | None:
        if output.finish_reason is None:
            return None
        if output.finish_reason is FinishReason.STOP:
            return {"type": "stop", "matched": output.matched_stop}
        if output.finish_reason is FinishReason.LENGTH:
            return {"type": "length", "length": 0 if self.scoring else self.job.params.max_tokens}
        return {"type": "abort", "message": "The request was aborted.", "status_code": None}

    def _logprobs(self) -> dict[str, Any]:
        first = max(0, self.options.start)
        inputs = [] if self.options.start < 0 else self.prompt_logprobs[first:]
        ids = self.job.prompt_token_ids[first:]
        result: dict[str, Any] = {
            "input_token_logprobs": [
                self._entry(None if entry is None else entry.logprob, token_id)
                for entry, token_id in zip(inputs, ids, strict=False)
            ],
            "output_token_logprobs": [self._entry(entry.logprob, entry.token_id) for entry in self.logprobs],
        }
        if self.options.top:
            result["input_top_logprobs"] = [self._top(entry) for entry in inputs]
            result["output_top_logprobs"] = [self._top(entry) for entry in self.logprobs]
        if self.options.watched:
            result["input_token_ids_logprobs"] = [self._watched(entry) for entry in inputs]
            result["output_token_ids_logprobs"] = [self._watched(entry) for entry in self.logprobs]
        return result

    def _watched(self, entry: TokenLogprobs | None) -> list[list[Any]] | None:
        if entry is None:
            return None
        pairs = zip(self.options.watched, entry.watched, strict=True)
        return [self._entry(entry.logprob if i == entry.token_id else value, i) for i, value in pairs]

    def _entry(self, logprob: float | None, token_id: int) -> list[Any]:
        text = self.texts.text(token_id) if self.options.with_text else None
        return [None if logprob is None else floor(logprob), token_id, text]

    def _top(self, entry: TokenLogprobs | None) -> list[list[Any]] | None:
        if entry is None:
            return None
        pairs = zip(entry.top_ids[: self.options.top], entry.top_logprobs[: self.options.top], strict=True)
        return [self._entry(entry.logprob if i == entry.token_id else value, i) for i, value in pairs]


def _unsaid(output: RequestOutput) -> RequestOutput:
    """The output without what it says."""
    reason = FinishReason.LENGTH if output.finish_reason is FinishReason.STOP else output.finish_reason
    return msgspec.structs.replace(output, text="", token_ids=[], logprobs=None, support=None, finish_reason=reason)
