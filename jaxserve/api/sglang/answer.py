"""Write the answer of /generate, streamed or as one object: SGLang's text and meta_info.

Log-probabilities are lists of [log-probability, token id, text].
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import orjson

from jaxserve.api.generate.generation import Generation, PromptTask
from jaxserve.api.generate.wire import (
    Candidates,
    GrowingArray,
    GrowingText,
    RoutedExperts,
    extras_of,
    floor,
    hidden_vectors,
    matrix,
)
from jaxserve.api.http.sse import event
from jaxserve.api.sglang.task import NativeOptions
from jaxserve.api.work_pool import TokenTexts
from jaxserve.text.detokenizer import RequestOutput
from jaxserve.types.step import FIRST_VERSION, FinishReason, TokenLogprobs, joined_versions

Entries = Sequence[TokenLogprobs | None]


class NativeLogprobs:
    """The lists of one choice. Every entry is encoded once.

    If the answer is incremental, the output's lists have only the entries since the last `fields`. The prompt's lists
    are complete in the event that brings them and in the last event, and empty in between.
    """

    def __init__(self, options: NativeOptions, texts: TokenTexts) -> None:
        self._options = options
        self._texts = texts
        self._kinds = ["token", *["top"] * bool(options.top), *["token_ids"] * bool(options.token_ids)]
        self._inputs = {kind: GrowingArray() for kind in self._kinds}
        self._outputs = {kind: GrowingArray() for kind in self._kinds}
        self._has_inputs = False
        self._shows_inputs = not options.incremental

    def take(self, output: RequestOutput, prompt_token_ids: list[int]) -> None:
        """Append the entries of an output."""
        if output.prompt_logprobs is not None and self._options.start >= 0 and not self._has_inputs:
            first = self._options.start
            self._extend(self._inputs, output.prompt_logprobs[first:], prompt_token_ids[first:])
            self._has_inputs = self._shows_inputs = True
        if output.logprobs:
            self._extend(self._outputs, output.logprobs, [entry.token_id for entry in output.logprobs])

    def fields(self, *, last: bool) -> dict[str, Any]:
        """Return the lists as values that orjson encodes."""
        shows_inputs = self._shows_inputs or last
        self._shows_inputs = not self._options.incremental
        result: dict[str, Any] = {}
        for kind in self._kinds:
            result[f"input_{kind}_logprobs"] = self._inputs[kind].fragment if shows_inputs else []
            result[f"output_{kind}_logprobs"] = self._outputs[kind].fragment
            if self._options.incremental:
                self._outputs[kind].clear()
        return result

    def _extend(self, arrays: dict[str, GrowingArray], entries: Entries, ids: Sequence[int]) -> None:
        """Append entries and their token ids. The entry of a prompt's first token is None: it is not predicted."""
        logprobs = [None if entry is None else entry.logprob for entry in entries]
        arrays["token"].extend([self._entry(value, i) for value, i in zip(logprobs, ids, strict=False)])
        if "top" in arrays:
            arrays["top"].extend([self._top(entry) for entry in entries])
        if "token_ids" in arrays:
            arrays["token_ids"].extend([self._watched(entry) for entry in entries])

    def _watched(self, entry: TokenLogprobs | None) -> list[list[Any]] | None:
        if entry is None:
            return None
        pairs = zip(self._options.token_ids, entry.watched, strict=True)
        return [self._entry(entry.logprob if i == entry.token_id else value, i) for i, value in pairs]

    def _top(self, entry: TokenLogprobs | None) -> list[list[Any]] | None:
        if entry is None:
            return None
        top = self._options.top
        pairs = zip(entry.top_ids[:top], entry.top_logprobs[:top], strict=True)
        return [self._entry(entry.logprob if i == entry.token_id else value, i) for i, value in pairs]

    def _entry(self, logprob: float | None, token_id: int) -> list[Any]:
        text = self._texts.text(token_id) if self._options.with_text else None
        return [None if logprob is None else floor(logprob), token_id, text]


@dataclass
class NativeChoice:
    """One choice so far. An event costs the encoding of its new part and a copy of the part that it repeats."""

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
    versions: list[tuple[str, ...]] = field(default_factory=list)  # labels of the weights of each output

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
        """Return the answer so far, or only its new part, as values that orjson encodes."""
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
        """Return hidden states in SGLang's form.

        There is one entry for each token, and the first is the whole prompt's; or only the entry of the last token.
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
    """Return the output without its token, which scoring drops."""
    reason = FinishReason.LENGTH if output.finish_reason is FinishReason.STOP else output.finish_reason
    return msgspec.structs.replace(output, text="", token_ids=[], logprobs=None, extras=None, finish_reason=reason)


class NativeAnswer:
    """The answer to one request. single: whether it has one prompt, which was not in a list"""

    def __init__(
        self, generation: Generation, options: list[NativeOptions], texts: TokenTexts, *, single: bool
    ) -> None:
        self._generation = generation
        self._single = single
        self.held_bytes = generation.held_bytes
        self._choices = [
            [NativeChoice(prompt.request_id, prompt, shown, texts) for _ in range(prompt.params.n)]
            for prompt, shown in zip(generation.prompts, options, strict=True)
        ]

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield an event for each output, with the whole text so far or, if incremental, only its new part."""
        async with aclosing(self._generation.outputs()) as outputs:
            async for number, output in outputs:
                choice = self._choices[number][output.index]
                choice.add(output)
                result = choice.result()
                if not self._single or len(self._choices[number]) > 1:
                    result["index"] = number * len(self._choices[number]) + output.index
                yield event(orjson.dumps(result))

    async def whole(self) -> Any:
        """Return the unstreamed answer: an object, or a list of all choices."""
        async with aclosing(self._generation.outputs()) as outputs:
            async for number, output in outputs:
                self._choices[number][output.index].add(output)
        results = [choice.result() for group in self._choices for choice in group]
        return results[0] if self._single and len(results) == 1 else results
