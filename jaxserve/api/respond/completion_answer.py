"""Write the answer of /v1/completions, streamed or whole."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from jaxserve.api.generate.generation import Generation
from jaxserve.api.respond.completion_choices import CompletionChoices, JoinedText
from jaxserve.api.respond.wire import ChunkWriter, Envelope
from jaxserve.api.tasks.completion import CompletionOptions

# vLLM's fields, null unless requested
_UNASKED = {"token_ids": None, "prompt_token_ids": None, "prompt_logprobs": None}


class CompletionAnswer:
    """The answer to one request."""

    def __init__(
        self, generation: Generation, options: CompletionOptions, model: str, choices: CompletionChoices
    ) -> None:
        self._generation = generation
        self._options = options
        self.held_bytes = generation.held_bytes
        self._choices = choices
        self._envelope = Envelope(generation.options.request_id, "text_completion", model)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the server-sent events of the answer."""
        writer = ChunkWriter(self._envelope, self._generation.usage, self._options.output)
        async with aclosing(self._generation.outputs()) as outputs:
            async for number, output in outputs:
                self._cut_usage()
                delta = self._choices.delta(number, output)
                if _says_something(delta):
                    yield writer.chunk(delta)
        if writer.include_usage:
            yield writer.usage_chunk()

    async def whole(self) -> dict[str, Any]:
        """Return the unstreamed answer."""
        found: dict[int, JoinedText] = {}
        scores: dict[int, list[float]] = {}
        async with aclosing(self._generation.outputs()) as outputs:
            async for number, output in outputs:
                delta = self._choices.delta(number, output)
                index = delta["index"]
                found.setdefault(index, JoinedText()).add(delta)
                scores.setdefault(index, []).extend(entry.logprob for entry in output.logprobs or ())
        self._cut_usage()
        ordered = [found[index].result() for index in sorted(found)]
        return self._envelope.head() | {
            "choices": [_UNASKED | choice for choice in self._best(ordered, scores)],
            "usage": self._generation.usage.as_dict(),
            "system_fingerprint": None,
        }

    def _cut_usage(self) -> None:
        """With max_tokens 0, leave the one token that the engine always samples out of the usage."""
        if self._options.scoring:
            self._generation.usage.completion_tokens = 0

    def _best(self, choices: list[dict[str, Any]], scores: dict[int, list[float]]) -> list[dict[str, Any]]:
        """Return, per prompt, the n of best_of choices with the highest mean log-probability, renumbered.

        Of a beam search, the first ones.
        """
        n, made = self._options.num_choices, self._options.made
        if made <= n:
            return choices
        kept = []
        for start in range(0, len(choices), made):
            group = choices[start : start + made]
            if not self._options.best_first:
                group.sort(key=lambda choice: -_mean(scores[choice["index"]]))
            kept += group[:n]
        return [choice | {"index": index} for index, choice in enumerate(kept)]


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _says_something(delta: dict[str, Any]) -> bool:
    """Return False for a token whose text is held back (part of a character or of a stop string)."""
    tokens = delta["logprobs"]["tokens"] if delta["logprobs"] is not None else delta.get("token_ids")
    about_prompt = "prompt_logprobs" in delta or "prompt_token_ids" in delta
    return bool(delta["text"] or tokens or delta["finish_reason"] or about_prompt)
