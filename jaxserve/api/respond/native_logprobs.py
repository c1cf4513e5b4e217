"""Log-probabilities in SGLang's form: lists of [log-probability, token id, text] in `meta_info`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxserve.api.respond.growing_json import GrowingArray
from jaxserve.api.respond.logprobs import floor
from jaxserve.api.shared.token_texts import TokenTexts
from jaxserve.api.tasks.native import NativeOptions
from jaxserve.text.detokenizer import RequestOutput
from jaxserve.types.step import TokenLogprobs

Entries = Sequence[TokenLogprobs | None]


class NativeLogprobs:
    """The lists of one choice. Every entry is encoded once.

    incremental: the output's lists hold only what is new since the last `fields`. The prompt's lists are complete in
    the event that brings them and in the last event, and empty in between.
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
        shows_inputs, self._shows_inputs = self._shows_inputs or last, not self._options.incremental
        result: dict[str, Any] = {}
        for kind in self._kinds:
            result[f"input_{kind}_logprobs"] = self._inputs[kind].fragment if shows_inputs else []
            result[f"output_{kind}_logprobs"] = self._outputs[kind].fragment
            if self._options.incremental:
                self._outputs[kind].clear()
        return result

    def _extend(self, arrays: dict[str, GrowingArray], entries: Entries, ids: Sequence[int]) -> None:
        """Append entries and their token ids; an entry is None for a prompt's first token, which is not predicted."""
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
