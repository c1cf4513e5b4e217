"""Turn RequestOutputs into the choices of /v1/completions.

One function makes the deltas. An unstreamed answer joins those deltas, so both forms are equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from jaxserve.api.generate.generation import Generation
from jaxserve.api.respond.extra_fields import ExtraFieldWriter
from jaxserve.api.respond.extras import last_vector
from jaxserve.api.respond.logprobs import CompletionLogprobs, prompt_logprobs
from jaxserve.api.respond.wire import finish_fields
from jaxserve.api.shared.state import ServerState
from jaxserve.api.tasks.completion import CompletionOptions
from jaxserve.text.detokenizer import RequestOutput
from jaxserve.types.step import FinishReason, TokenLogprobs

_ARRAYS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


class CompletionChoices:
    """The choices of one request, numbered prompt by prompt."""

    def __init__(
        self, generation: Generation, options: CompletionOptions, prompt_texts: list[str], state: ServerState
    ) -> None:
        self._prompts = generation.prompts
        self._options = options
        self._output = options.output
        self._prompt_texts = prompt_texts
        self._texts = state.token_texts
        self._hidden = state.engine.tokenizer.special_ids if options.hides_special else frozenset[int]()
        self._tokenizer = state.engine.tokenizer
        self._logprobs: dict[int, CompletionLogprobs] = {}
        self._begun: set[int] = set()
        extras, request_id = self._output.extras, generation.options.request_id
        self._extra_fields = ExtraFieldWriter(extras, request_id, scoring=options.scoring)

    def delta(self, number: int, output: RequestOutput) -> dict[str, Any]:
        """Return what `output` of prompt `number` adds to its choice."""
        index = number * self._options.made + output.index
        first = index not in self._begun
        self._begun.add(index)
        text = "" if self._options.scoring else output.text
        if first and self._options.echo:
            text = self._prompt_texts[number] + text
        choice: dict[str, Any] = {"index": index, "text": text, "logprobs": None, "finish_reason": None}
        if self._output.logprobs is not None:
            choice["logprobs"] = self._take_logprobs(index, number, output, first)
        if output.finish_reason is not None:
            choice |= self._finish(number, output)
        return choice | self._extras(number, output, first)

    def _take_logprobs(self, index: int, number: int, output: RequestOutput, first: bool) -> dict[str, Any]:
        shown, scoring, prompt = self._output, self._options.scoring, self._prompts[number]
        if index not in self._logprobs:
            watched = prompt.params.extras.logprob_token_ids
            self._logprobs[index] = CompletionLogprobs(
                shown.logprobs or 0,
                self._texts,
                self._hidden,
                shown.tokens_as_ids,
                watched,
                drops_space=self._drops_space(prompt.prompt_token_ids),
            )
        entries = [] if scoring else list(output.logprobs or ())
        token_ids = [] if scoring else output.token_ids
        if first and self._options.echo:
            entries = [*map(_without_watched, output.prompt_logprobs or ()), *entries]
            token_ids = [*prompt.prompt_token_ids, *token_ids]
        return self._logprobs[index].take(entries, token_ids)

    def _drops_space(self, prompt_token_ids: Sequence[int]) -> bool:
        """Return whether the choice's text lacks the space of its first token, which begins a sentencepiece text."""
        begins = self._options.echo or all(i in self._tokenizer.special_ids for i in prompt_token_ids)
        return begins and self._tokenizer.strips_first_space and self._tokenizer.decoder_kind == "byte_fallback"

    def _finish(self, number: int, output: RequestOutput) -> dict[str, Any]:
        if self._options.scoring and output.finish_reason is not FinishReason.ABORT:
            return {"finish_reason": "length", "matched_stop": None, "stop_reason": None}
        return finish_fields(output, self._prompts[number].params.stop_token_ids)

    def _extras(self, number: int, output: RequestOutput, first: bool) -> dict[str, Any]:
        shown, prompt, ended = self._output, self._prompts[number], output.finish_reason is not None
        extras: dict[str, Any] = {}
        if shown.token_ids:
            extras["token_ids"] = [] if self._options.scoring else output.token_ids
        if first and shown.prompt_token_ids:
            extras["prompt_token_ids"] = prompt.prompt_token_ids
        if self._extra_fields.wanted:
            self._extra_fields.note(number, output)
            if ended:
                extras |= self._extra_fields.finish(number, prompt, output)
        if ended and shown.prompt_text:
            extras["prompt_text"] = self._prompt_texts[number]
        if ended and shown.hidden_state:
            extras["hidden_states"] = last_vector(output)
        if shown.prompt_logprobs is not None and output.prompt_logprobs is not None:
            extras["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs, shown.prompt_logprobs, self._texts)
        return extras


def _without_watched(entry: TokenLogprobs | None) -> TokenLogprobs | None:
    """Drop the log-probabilities of requested ids: for the prompt, only its most likely tokens are shown."""
    return msgspec.structs.replace(entry, watched=[]) if entry is not None and entry.watched else entry


class JoinedText:
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
