"""Define the public AsyncEngine: an engine in a process of its own, for programs with an event loop (asyncio).

    async with AsyncEngine("DIR") as engine:
        answer = await engine.chat([{"role": "user", "content": "Hello"}], max_tokens=32)
        async for output in engine.generate("Once upon a time", SamplingParams(max_tokens=32)):
            print(output.text, end="")

The HTTP routes' own code reads the fields and builds the answers, in the caller's event loop.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Self, Unpack, cast, overload

import msgspec
import numpy as np

from jaxserve.api.answers import ChatCompletion, ChatCompletionChunk
from jaxserve.api.openai.answer import ChatAnswer
from jaxserve.api.scoring.protocol import ClassAnswer, RerankResult
from jaxserve.api.state import EngineProtocol
from jaxserve.client import async_engine
from jaxserve.client.async_engine import GenerateOptions
from jaxserve.client.link import EngineLink
from jaxserve.config import Config
from jaxserve.engine.engine import Params, Prompt, content_of, params_for, takes_other_names
from jaxserve.errors import InvalidValueError, NotReadyError, ServerError
from jaxserve.library.routes import Routes, chat_fields, chunk_of, each_of, fields_of_all, shown_progress
from jaxserve.library.serving import config_of
from jaxserve.text.detokenizer import RequestOutput
from jaxserve.types.calls import LoadAdapter, UnloadAdapter
from jaxserve.types.messages import AdapterStatus

# methods that vLLM's AsyncLLM and SGLang's Engine have and ours lacks -> what to use instead
INSTEAD = {
    "add_lora": "load_adapter(name, path)",
    "async_generate": "generate(prompt, params), which streams",
    "encode": "embed(texts), or classify(texts) for labels; no values of single tokens are given",
    "get_tokenizer": "tokenizer",
    "model_config": "info, which describes the model",
    "pause_generation": "call(Pause()), of jaxserve.types.calls",
    "resume_generation": "call(Resume()), of jaxserve.types.calls",
    "shutdown": "stop(), which is awaited, or async with AsyncEngine(...) as engine",
}


class AsyncEngine(async_engine.AsyncEngine):
    """A model in a process of its own, or several with `replicas`. Started by `async with`, or by `start`.

    model: hub id or directory, or a whole Config; None is the embedded demo model. `keys` are those of `Engine`.
    link: the connection to the engine, or one for each replica; None: child processes
    Raises ConfigError. The methods that answer raise NotReadyError before the engine is ready.
    """

    def __init__(
        self,
        model: str | Config | None = None,
        link: EngineLink | Sequence[EngineLink] | None = None,
        *,
        config: Config | None = None,
        **keys: Any,
    ) -> None:
        name, whole = (None, model) if isinstance(model, Config) else (model, config)
        super().__init__(config_of(name, keys, whole), link)
        self._routes: asyncio.Future[Routes] | None = None
        self._started = self._stopped = False

    if not TYPE_CHECKING:  # a type checker reports unknown names by itself

        def __getattr__(self, name: str) -> Any:
            """Raise AttributeError, for a peer's name with ours."""
            if name in INSTEAD:
                raise AttributeError(f"AsyncEngine has no {name}: use {INSTEAD[name]}", name=name, obj=self)
            return super().__getattribute__(name)  # again, because it raised: it says which name was missing

    async def start(self, *, wait: bool = True) -> None:
        """Start the engine; with `wait`, return when it is ready. Raises ConfigError if it cannot start."""
        self._started = True
        await super().start(wait=wait)

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        """Stop the engine and end its threads and processes. Live requests end with EngineDeadError first."""
        self._stopped = True
        await super().stop()
        if self._routes is None:
            return
        await asyncio.wait((self._routes,))
        if self._routes.exception() is None:  # else there are none to stop
            routes, self._routes = self._routes.result(), None
            await routes.state.grammars.stop()
            for stop in routes.stops:
                await asyncio.to_thread(stop)

    async def _ready_routes(self) -> Routes:
        """Return the routes, which the first call makes in a thread."""
        self._check_started()
        self.check_ready()
        if self._routes is None:
            engine = cast("EngineProtocol", self)  # `generate` takes token ids as there, and texts too
            self._routes = asyncio.ensure_future(asyncio.to_thread(Routes, engine))
        return await asyncio.shield(self._routes)

    def _check_started(self) -> None:
        if self._stopped:
            raise ServerError("the engine is stopped")
        if not self._started:
            raise NotReadyError("the engine is not started: use `async with`")

    @takes_other_names
    def generate(  # pyright: ignore[reportIncompatibleMethodOverride]  # it takes texts too
        self, prompt: Prompt, params: Params | None = None, **options: Unpack[GenerateOptions]
    ) -> AsyncIterator[RequestOutput]:
        """Generate `params.n` sequences of a prompt and yield the new text and tokens of each as they come.

        prompt: a text, token ids, or one of them in a mapping
        adapter: name of a loaded adapter, or its digest
        request_id, priority, cache_salt: as in `Engine.add_request`
        deadline: seconds from now after which the request ends with RequestTimeoutError
        options: these, and the others of `GenerateOptions`

        Closing the iterator aborts. Raises RequestError for a wrong prompt; before the first output NotReadyError,
        QueueFullError or RequestError.
        """
        if unknown := sorted(options.keys() - GenerateOptions.__annotations__.keys()):
            raise InvalidValueError(f"generate has no {unknown[0]}", param=unknown[0])
        (own,) = params_for([prompt], params)
        given = content_of(prompt)
        self._check_started()
        if name := options.get("adapter"):  # the routes give the digest
            digests = {each.name: each.digest for each in self.stats().adapters}
            options["adapter"] = digests.get(name, name)
        return super().generate(self.tokenizer.encode(given) if isinstance(given, str) else given, own, **options)

    async def load_adapter(self, name: str, source: str | os.PathLike[str], *, pinned: bool = False) -> str:
        """Load an adapter under a name in all engines, or replace the one that has it; return NAME@VERSION.

        source: directory of peft's save_pretrained
        pinned: whether it stays on the devices

        Requests that have begun with an adapter end with it. An engine that is started again loads it from there again.
        Raises RequestError that names what does not fit, also for arrays: `Engine`, in the same process, takes these.
        """
        if isinstance(source, Mapping):
            raise InvalidValueError("source is a directory: arrays do not reach another process", param="source")
        call = LoadAdapter(name, os.path.abspath(source), replace=True, pinned=pinned)
        return f"{name}@{msgspec.convert(await self.call(call), AdapterStatus).version}"

    async def unload_adapter(self, name: str) -> None:
        """Forget an adapter. Requests that have begun with it go on. Raises ModelNotFoundError."""
        await self.call(UnloadAdapter(name))

    async def embed(self, texts: Prompt | Sequence[Prompt], **fields: Any) -> np.ndarray:
        """Return the embedding of each text, float32 [n, D], as POST /v1/embeddings does. Raises RequestError."""
        routes = await self._ready_routes()
        with shown_progress(fields, "text"):
            return await routes.embed(texts, fields)

    async def score(self, queries: str | Sequence[str], documents: str | Sequence[str], **fields: Any) -> list[float]:
        """Return the score of each pair, as POST /v1/score does. One query is scored with every document."""
        routes = await self._ready_routes()
        with shown_progress(fields, "pair"):
            return await routes.score(queries, documents, fields)

    async def rerank(self, query: str, documents: Sequence[str], **fields: Any) -> list[RerankResult]:
        """Return the documents by their relevance to a query, the best first, as POST /v1/rerank does."""
        routes = await self._ready_routes()
        with shown_progress(fields, "document"):
            return await routes.rerank(query, documents, fields)

    async def classify(self, texts: Prompt | Sequence[Prompt], **fields: Any) -> list[ClassAnswer]:
        """Return the most likely label of each text and the probability of every label, as POST /v1/classify does."""
        routes = await self._ready_routes()
        with shown_progress(fields, "text"):
            return await routes.classify(texts, fields)

    @overload
    async def chat(
        self, messages: Sequence[Any], params: Params | None = None, *, stream: Literal[False] = False, **fields: Any
    ) -> ChatCompletion: ...

    @overload
    async def chat(
        self, messages: Sequence[Any], params: Params | None = None, *, stream: Literal[True], **fields: Any
    ) -> AsyncGenerator[ChatCompletionChunk, None]: ...

    async def chat(
        self, messages: Sequence[Any], params: Params | None = None, *, stream: bool = False, **fields: Any
    ) -> ChatCompletion | AsyncGenerator[ChatCompletionChunk, None]:
        """Answer a conversation as POST /v1/chat/completions does; with `stream`, chunk by chunk.

        Arguments and errors are those of `Engine.chat`. Closing the stream aborts.
        """
        routes = await self._ready_routes()
        if stream:
            return _chunks(await routes.begin({"messages": messages, "stream": True} | chat_fields(params, fields)))
        with shown_progress(fields, "conversation"):
            answer = await routes.begin({"messages": messages, "stream": False} | chat_fields(params, fields))
            return (await routes.whole([answer]))[0]

    async def chat_all(
        self, conversations: Sequence[Sequence[Any]], params: Params | Sequence[Params] | None = None, **fields: Any
    ) -> list[ChatCompletion]:
        """Answer several conversations in one batch. Arguments and errors are those of `chat`.

        params: for all, or a list of one for each
        """
        routes = await self._ready_routes()
        with shown_progress(fields, "conversation"):
            own = fields_of_all(len(each_of(conversations)), params, fields)
            each = zip(conversations, own, strict=True)
            return await routes.whole(
                [await routes.begin(own | {"messages": messages, "stream": False}) for messages, own in each]
            )


async def _chunks(answer: ChatAnswer) -> AsyncGenerator[ChatCompletionChunk, None]:
    events = answer.events()
    try:
        async for event in events:
            yield chunk_of(event)
    finally:
        await events.aclose()
