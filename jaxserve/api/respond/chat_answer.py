"""Write the answer of /v1/chat/completions, streamed or whole."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from jaxserve.api.generate.planner import ChatPlan
from jaxserve.api.respond.chat_choices import ChatChoices, JoinedMessage
from jaxserve.api.respond.wire import ChunkWriter, Envelope
from jaxserve.api.shared.token_texts import TokenTexts
from jaxserve.api.tasks.chat import ChatOptions


class ChatAnswer:
    """The answer to one conversation."""

    def __init__(self, plan: ChatPlan, options: ChatOptions, model: str, texts: TokenTexts) -> None:
        self._options = options.output
        self._model = model
        self._generation = plan.generation
        self.held_bytes = plan.generation.held_bytes
        self._choices = ChatChoices(plan, options, texts)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the server-sent events of the answer."""
        envelope = Envelope(self._generation.options.request_id, "chat.completion.chunk", self._model)
        writer = ChunkWriter(envelope, self._generation.usage, self._options)
        async with aclosing(self._generation.outputs()) as outputs:
            async for _, output in outputs:
                chunks = self._choices.chunks(output)
                if writer.continuous:
                    for event in writer.counted(chunks, len(output.token_ids), self._choices.take_about_prompt()):
                        yield event
                    chunks = []
                for chunk in chunks:
                    if self._choices.about_prompt:
                        yield writer.chunk_beside(chunk, self._choices.take_about_prompt())
                    else:
                        yield writer.chunk(chunk)
                if self._choices.complete:
                    break
        if writer.include_usage:
            yield writer.usage_chunk()

    async def whole(self) -> dict[str, Any]:
        """Return the unstreamed answer."""
        found: dict[int, JoinedMessage] = {}
        async with aclosing(self._generation.outputs()) as outputs:
            async for _, output in outputs:
                for chunk in self._choices.chunks(output):
                    found.setdefault(chunk["index"], JoinedMessage(chunk["index"])).add(chunk)
                if self._choices.complete:
                    break
        envelope = Envelope(self._generation.options.request_id, "chat.completion", self._model)
        about_prompt = {"prompt_token_ids": None, "prompt_logprobs": None} | self._choices.about_prompt
        return (
            envelope.head()
            | about_prompt
            | {
                "choices": [found[index].result() for index in sorted(found)],
                "usage": self._generation.usage.as_dict(),
                "service_tier": "default",
                "system_fingerprint": None,
            }
        )
