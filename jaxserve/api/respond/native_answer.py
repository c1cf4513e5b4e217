"""Write the answer of /generate, streamed or whole."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import orjson

from jaxserve.api.generate.generation import Generation
from jaxserve.api.http.sse import event
from jaxserve.api.respond.native_choice import NativeChoice
from jaxserve.api.shared.token_texts import TokenTexts
from jaxserve.api.tasks.native import NativeOptions


class NativeAnswer:
    """The answer to one request. single: it has one prompt, which was not in a list."""

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
        """Yield the text so far in every event, or only what is new with `incremental`."""
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
