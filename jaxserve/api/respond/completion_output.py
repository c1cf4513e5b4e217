"""Turn RequestOutputs into the choices of /v1/completions.

One function makes the deltas. An unstreamed answer joins those deltas, so both forms are equal.
"""

from __future__ import annotations

from typing import Any

import msgspec

from jaxserve.api.generate.generation import Job
from jaxserve.api.protocol.completions import CompletionRequest
from jaxserve.api.respond.details import last_vector
from jaxserve.api.respond.extras import Extras
from jaxserve.api.respond.logprobs import CompletionLogprobs, prompt_logprobs
from jaxserve.api.respond.wire import finish_fields
from jaxserve.api.shared.token_texts import TokenTexts
from jaxserve.text.output.sequence_text import RequestOutput
from jaxserve.types.output import FinishReason, TokenLogprobs

_ARRAYS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


class CompletionChoices:
    """The choices of one request, numbered prompt by prompt."""

    def __init__(
        self,
        body: CompletionRequest,
        jobs: list[Job],
        prompt_texts: list[str],
        texts: TokenTexts,
        hidden: frozenset[int],
        extras: Extras,
    ) -> None:
        self._body = body
        self._jobs = jobs
        self._prompt_texts = prompt_texts
        self._texts = texts
        self._hidden = hidden if body.skip_special_tokens is not False else frozenset()
        self._per_prompt = max(body.n or 1, body.best_of or 1)
        self._logprobs: dict[int, CompletionLogprobs] = {}
        self._begun: set[int] = set()
        self._extras_of = extras

    def delta(self, job: int, output: RequestOutput) -> dict[str, Any]:
        """Return what `output` adds to its choice."""
        index = job * self._per_prompt + output.index
        first = index not in self._begun
        self._begun.add(index)
        scoring = self._body.max_tokens == 0
        choice: dict[str, Any] = {
            "index": index,
            "text": "" if scoring else output.text,
            "logprobs": None,
            "finish_reason": None,
        }
        if first and self._body.echo:
            choice["text"] = self._prompt_texts[job] + choice["text"]
        if self._body.logprobs is not None:
            choice["logprobs"] = self._take_logprobs(index, job, output, first, scoring)
        if output.finish_reason is not None:
            choice |= self._finish(job, output, scoring)
        return choice | self._extras(job, output, first, scoring)

    def _take_logprobs(self, index: int, job: int, output: RequestOutput, first: bool, scoring: bool) -> dict[str, Any]:
        if index not in self._logprobs:
            as_ids = bool(self._body.return_tokens_as_token_ids)
            watched = self._jobs[job].params.logprob_token_ids
            top = self._body.logprobs or 0
            self._logprobs[index] = CompletionLogprobs(top, self._texts, self._hidden, as_ids, watched)
        entries = [] if scoring else list(output.logprobs or ())
        token_ids = [] if scoring else output.token_ids
        if first and self._body.echo:
            entries = [*map(_without_watched, output.prompt_logprobs or ()), *entries]
            token_ids = [*self._jobs[job].prompt_token_ids, *token_ids]
        return self._logprobs[index].take(entries, token_ids)

    def _finish(self, job: int, output: RequestOutput, scoring: bool) -> dict[str, Any]:
        if scoring and output.finish_reason is not FinishReason.ABORT:
            return {"finish_reason": "length", "matched_stop": None, "stop_reason": None}
        return finish_fields(output, self._jobs[job].params.stop_token_ids)

    def _extras(self, job: int, output: RequestOutput, first: bool, scoring: bool) -> dict[str, Any]:
        extras: dict[str, Any] = {}
        if self._body.return_token_ids:
            extras["token_ids"] = [] if scoring else output.token_ids
        if first and (self._body.return_token_ids or self._body.return_prompt_token_ids):
            extras["prompt_token_ids"] = self._jobs[job].prompt_token_ids
        if self._extras_of.wanted:
            self._extras_of.note(job, output)
            if output.finish_reason is not None:
                extras |= self._extras_of.finish(job, self._jobs[job], output)
        if output.finish_reason is not None:
            if self._body.return_prompt_text:
                extras["prompt_text"] = self._prompt_texts[job]
            if self._body.return_hidden_states:
                extras["hidden_states"] = last_vector(output)
        if self._body.prompt_logprobs is not None and output.prompt_logprobs is not None:
            extras["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs, self._body.prompt_logprobs, self._texts)
        return extras


def _without_watched(entry: TokenLogprobs | None) -> TokenLogprobs | None:
    """Drop the log-probabilities of requested ids: for the prompt, only its most likely tokens are shown."""
    return msgspec.structs.replace(entry, watched=[]) if entry is not None and entry.watched else entry


class Joined:
    """Join the deltas of one choice, in linear time."""

    def __init__(self) -> None:
        self._choice: dict[str, Any] = {}
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: dict[str, list[Any]] = {name: [] for name in _ARRAYS}

    def add(self, delta: dict[str, Any]) -> None:
        self._choice |= delta
        self._texts.append(delta["text"])
        self._token_ids += delta.get("token_ids", ())
        if delta["logprobs"] is not None:
            for name, entries in self._logprobs.items():
                entries += delta["logprobs"][name]

    def result(self) -> dict[str, Any]:
        joined = self._choice | {"text": "".join(self._texts)}
        if self._choice["logprobs"] is not None:
            joined["logprobs"] = self._logprobs
        if "token_ids" in self._choice:
            joined["token_ids"] = self._token_ids
        return joined
