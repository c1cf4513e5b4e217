"""Turn RequestOutputs into the answers of /generate: SGLang's text and meta_info."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from jaxserve.api.generate.generation import PromptTask
from jaxserve.api.respond.extras import Candidates, RoutedExperts, extras_of, hidden_vectors, matrix
from jaxserve.api.respond.growing_json import GrowingArray, GrowingText
from jaxserve.api.respond.native_logprobs import NativeLogprobs
from jaxserve.api.shared.token_texts import TokenTexts
from jaxserve.api.tasks.native import NativeOptions
from jaxserve.text.detokenizer import RequestOutput
from jaxserve.types.step import FIRST_VERSION, FinishReason, joined_versions


@dataclass
class NativeChoice:
    """One choice so far. An event costs the encoding of what is new and a copy of what it repeats."""

    request_id: str
    prompt: PromptTask
    options: NativeOptions
    texts: TokenTexts
    started: float = field(default_factory=time.perf_counter)
    text: GrowingText = field(default_factory=GrowingText)
    token_ids: GrowingArray = field(default_factory=GrowingArray)
    num_tokens: int = 0
    last: RequestOutput | None = None
    experts: RoutedExperts = field(default_factory=RoutedExperts)
    prompt_hidden: bytes | None = None
    hidden: list[np.ndarray] = field(default_factory=list)
    versions: list[tuple[str, ...]] = field(default_factory=list)  # labels of weights, as outputs have them

    def __post_init__(self) -> None:
        self.logprobs = NativeLogprobs(self.options, self.texts)
        self.candidates = Candidates(self.options.sampling_mode)

    def add(self, output: RequestOutput) -> None:
        """Append an output."""
        self._add_hidden(output)
        if self.options.experts_from is not None:
            self.experts.note(output)
        if output.weight_versions and output.weight_versions not in self.versions:
            self.versions.append(output.weight_versions)
        if self.options.scoring:
            output = _unsaid(output)
        if self.options.sampling_mask:
            self.candidates.note(output)
        if self.options.logprobs:
            self.logprobs.take(output, self.prompt.prompt_token_ids)
        self.text.append(output.text)
        self.token_ids.extend(output.token_ids)
        self.num_tokens += len(output.token_ids)
        self.last = output

    def _add_hidden(self, output: RequestOutput) -> None:
        self.prompt_hidden = extras_of(output).prompt_hidden_states or self.prompt_hidden
        if self.options.hidden == "all":
            self.hidden.extend(hidden_vectors(output))
        elif self.options.hidden:
            self.hidden = [*hidden_vectors(output)[-1:]] or self.hidden

    def result(self) -> dict[str, Any]:
        """Return the answer so far, or only what is new in it, as values that orjson encodes."""
        answer = {"text": self.text.fragment, "output_ids": self.token_ids.fragment, "meta_info": self._meta()}
        if self.options.incremental:
            for each in (self.text, self.token_ids, self.candidates):
                each.clear()
        return answer

    def _meta(self) -> dict[str, Any]:
        assert self.last is not None
        ended = self.last.finish_reason is not None
        meta: dict[str, Any] = {
            "id": self.request_id,
            "finish_reason": self._finish(self.last),
            "prompt_tokens": len(self.prompt.prompt_token_ids),
            "completion_tokens": self.num_tokens,
            "cached_tokens": self.last.num_cached_tokens,
            "weight_version": (joined_versions(*self.versions) or (FIRST_VERSION,))[-1],
            "e2e_latency": time.perf_counter() - self.started,
        }
        if len(versions := joined_versions(*self.versions)) > 1:
            meta["weight_versions"] = list(versions)
        if self.options.sampling_mask:
            meta |= self.candidates.as_dict()
        if self.options.hidden and ended:
            meta["hidden_states"] = self._hidden_states()
        if self.options.experts_from is not None and ended:
            meta["routed_experts"] = self.experts.encoded(self.options.experts_from, len(self.prompt.prompt_token_ids))
        return meta | self.logprobs.fields(last=ended) if self.options.logprobs else meta

    def _hidden_states(self) -> list[Any]:
        """Return SGLang's form: one entry per token, the first of them for the whole prompt; or only the last
        token's.
        """
        found: list[Any] = [vector.tolist() for vector in self.hidden]
        if self.options.hidden == "all" and (found or self.prompt_hidden):
            found[:1] = [matrix(self.prompt_hidden, len(self.prompt.prompt_token_ids)).tolist()]
        return found

    def _finish(self, output: RequestOutput) -> dict[str, Any] | None:
        if output.finish_reason is None:
            return None
        if output.finish_reason is FinishReason.STOP:
            return {"type": "stop", "matched": output.matched_stop}
        if output.finish_reason is FinishReason.LENGTH:
            return {"type": "length", "length": 0 if self.options.scoring else self.prompt.params.max_tokens}
        return {"type": "abort", "message": "The request was aborted.", "status_code": None}


def _unsaid(output: RequestOutput) -> RequestOutput:
    """Return the output without its token: the one that scoring drops."""
    reason = FinishReason.LENGTH if output.finish_reason is FinishReason.STOP else output.finish_reason
    return msgspec.structs.replace(output, text="", token_ids=[], logprobs=None, extras=None, finish_reason=reason)
