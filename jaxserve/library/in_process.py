"""Define the public Engine: the engine in this process (jaxserve.engine), and answers as over HTTP.

    engine = Engine("DIR")
    engine.chat([{"role": "user", "content": "Hello"}], max_tokens=32).choices[0].message.content
    Engine("EMBEDDER").embed(["one", "two"])  # float32 [2, D]

The HTTP routes' own code reads the fields and builds the answers. Its coroutines run in a thread with an event loop,
because the caller may already be inside a running loop (a notebook). The caller waits for them.
"""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

import numpy as np

from jaxserve.api.answers import ChatCompletion, ChatCompletionChunk
from jaxserve.api.openai.answer import ChatAnswer
from jaxserve.api.scoring.protocol import ClassAnswer, RerankResult
from jaxserve.api.state import GrammarChecks
from jaxserve.client.async_engine import GenerateOptions
from jaxserve.client.replicas import ReplicaState
from jaxserve.client.supervisor import EngineStatus
from jaxserve.config import Config
from jaxserve.engine.engine import Params, Prompt, TextEngine
from jaxserve.errors import InvalidValueError
from jaxserve.library.routes import Routes, chat_fields, chunk_of, each_of, fields_of_all, shown_progress
from jaxserve.library.serving import LoopThread, config_of
from jaxserve.text.detokenizer import RequestOutput
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.types.calls import EngineCall
from jaxserve.types.messages import EngineInfo, EngineStats, Located, WaitingRequest
from jaxserve.types.sampling import SamplingParams

# methods and attributes that vLLM's LLM and SGLang's Engine have and ours lacks -> what to use instead
INSTEAD = {
    **dict.fromkeys(("apply_model", "collective_rpc"), "runner, which has the arrays and the compiled programs"),
    **dict.fromkeys(("flush_cache", "reset_prefix_cache"), "core.flush_prefix_cache()"),
    **dict.fromkeys(
        ("start_profile", "stop_profile"), "jax.profiler.trace(directory), which records what runs inside it"
    ),
    "async_generate": "AsyncEngine, whose generate(prompt, params) streams",
    "beam_search": "chat(messages, use_beam_search=True, n=...)",
    "encode": "embed(texts), or classify(texts) for labels; no values of single tokens are given",
    "get_metrics": "core.stats()",
    "get_tokenizer": "tokenizer",
    "has_unfinished_requests": "has_unfinished, which is no method",
    "llm_engine": "add_request(prompt, params, request_id=...) and step()",
    "reward": "classify(texts)",
    "update_weights_from_tensor": "update_weights(pairs of names and arrays)",
}
# methods of theirs -> ours that do the same
SAME = {"shutdown": "close", "wake_up": "wake"}


class Engine(TextEngine):
    """A model with its scheduler and text processing in this process.

    model: hub id or directory; None is the embedded demo model. `keys` are configuration keys by bare name
    (`max_num_seqs=8`), or arguments of vLLM's LLM or SGLang's Engine that mean the same (`tensor_parallel_size=2`);
    alternatively pass a whole `config`. Raises ConfigError.

    Its methods may be called in several threads. Ctrl-C takes effect between two steps. With `progress=True`, or
    vLLM's `use_tqdm=True`, the methods that answer show a bar on stderr.
    """

    _end_routes: Callable[[], object] = staticmethod(lambda: None)  # nothing was asked as over HTTP

    def __init__(self, model: str | None = None, *, config: Config | None = None, **keys: Any) -> None:
        super().__init__(config=config_of(model, keys, config))

    if not TYPE_CHECKING:  # a type checker reports unknown names by itself

        def __getattr__(self, name: str) -> Any:
            """Return a method under a peer's name, or raise AttributeError, for a peer's name with ours."""
            if name in SAME:
                return getattr(self, SAME[name])
            if name in INSTEAD:
                raise AttributeError(f"Engine has no {name}: use {INSTEAD[name]}", name=name, obj=self)
            return super().__getattribute__(name)  # again, because it raised: it says which name was missing

    def embed(self, texts: Prompt | Sequence[Prompt], **fields: Any) -> np.ndarray:
        """Return the embedding of each text, float32 [n, D], as POST /v1/embeddings does.

        texts: one or several, as text or token ids
        fields: of the route, such as dimensions

        Raises RequestError, also if the model makes no embeddings or the route has no such field.
        """
        routes = self._ready_routes()
        with shown_progress(fields, "text"):
            return routes.loop.run(routes.embed(texts, fields))

    def score(self, queries: str | Sequence[str], documents: str | Sequence[str], **fields: Any) -> list[float]:
        """Return the score of each pair, as POST /v1/score does. One query is scored with every document.

        fields: of the route, such as instruction. Raises RequestError.
        """
        routes = self._ready_routes()
        with shown_progress(fields, "pair"):
            return routes.loop.run(routes.score(queries, documents, fields))

    def rerank(self, query: str, documents: Sequence[str], **fields: Any) -> list[RerankResult]:
        """Return the documents by their relevance to a query, the best first, as POST /v1/rerank does.

        fields: of the route, such as top_n. Raises RequestError.
        """
        routes = self._ready_routes()
        with shown_progress(fields, "document"):
            return routes.loop.run(routes.rerank(query, documents, fields))

    def classify(self, texts: Prompt | Sequence[Prompt], **fields: Any) -> list[ClassAnswer]:
        """Return the most likely label of each text and the probability of every label, as POST /v1/classify does.

        fields: of the route. Raises RequestError, also if the model has no labels.
        """
        routes = self._ready_routes()
        with shown_progress(fields, "text"):
            return routes.loop.run(routes.classify(texts, fields))

    @overload
    def chat(
        self,
        messages: Sequence[Any],
        params: Params | None = None,
        *,
        stream: Literal[False] = False,
        **fields: Any,
    ) -> ChatCompletion: ...

    @overload
    def chat(
        self,
        messages: Sequence[Any],
        params: Params | None = None,
        *,
        stream: Literal[True],
        **fields: Any,
    ) -> Generator[ChatCompletionChunk, None, None]: ...

    def chat(
        self, messages: Sequence[Any], params: Params | None = None, *, stream: bool = False, **fields: Any
    ) -> ChatCompletion | Generator[ChatCompletionChunk, None, None]:
        """Answer a conversation as POST /v1/chat/completions does; with `stream`, chunk by chunk.

        messages: dicts, or messages of earlier answers
        params: the sampling, as for `generate`; None: the route's defaults
        fields: fields of the route (docs/routes.md), such as max_tokens, tools, response_format. They replace `params`

        Closing the stream aborts. Raises RequestError, also for a field that the route does not know. Raises
        ConfigError at the first call if the chat template, the tokenizer or the processor of pictures does not fit the
        model.
        """
        routes = self._ready_routes()
        if stream:
            given = {"messages": messages, "stream": True} | chat_fields(params, fields)
            return routes.chunks(routes.conversation(given))
        with shown_progress(fields, "conversation"):
            answer = routes.conversation({"messages": messages, "stream": False} | chat_fields(params, fields))
            return routes.loop.run(routes.whole([answer]))[0]

    def chat_all(
        self, conversations: Sequence[Sequence[Any]], params: Params | Sequence[Params] | None = None, **fields: Any
    ) -> list[ChatCompletion]:
        """Answer several conversations in one batch. Arguments and errors are those of `chat`.

        params: for all, or a list of one for each
        """
        routes = self._ready_routes()
        with shown_progress(fields, "conversation"):
            own = fields_of_all(len(each_of(conversations)), params, fields)
            each = zip(conversations, own, strict=True)
            answers = [routes.conversation(own | {"messages": messages, "stream": False}) for messages, own in each]
            return routes.loop.run(routes.whole(answers))

    def get_default_sampling_params(self) -> SamplingParams:
        """Return what the model's generation_config.json recommends, for `generate`. The name is vLLM's.

        `generate` without params takes the defaults of SamplingParams, `chat` takes these.
        """
        recommended: dict[str, Any] = dict(self.info.generation_defaults)
        return SamplingParams(**recommended)

    def _ready_routes(self) -> _Routes:
        with self._lock.held():
            self._check_open()
            return self._routes

    @cached_property
    def _routes(self) -> _Routes:
        routes = _Routes(_SteppedEngine(self))
        self._end_routes = weakref.finalize(self, _close, routes.loop, routes.state.grammars, routes.stops)
        return routes

    def close(self) -> None:
        super().close()
        if not self._is_forked:
            self._end_routes()

    async def _outputs(
        self, prompt: list[int], params: SamplingParams, **options: Unpack[GenerateOptions]
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the outputs of a prompt's sequences as they arrive. Closing the generator aborts.

        Raises the error of a failed output.
        """
        name = options.get("request_id") or "chat"
        group = self._siblings(
            prompt,
            params,
            name,
            priority=options.get("priority", 0),
            cache_salt=options.get("cache_salt", ""),
            adapter=options.get("adapter", ""),
            pictures=options.get("pictures", ()),
        )
        ids = [each.request_id for each in group]
        outputs: deque[RequestOutput] = deque()
        async with self._lock.awaited():
            self._queue([group], lambda _: outputs.append)
        try:
            while outputs or not self._sequences.keys().isdisjoint(ids):
                if not outputs:
                    async with self._lock.awaited():
                        self._run_step()
                    self._check_runs()
                    await asyncio.sleep(0)  # so that a cancellation arrives and other beams of a search run
                    continue
                output = outputs.popleft()
                if output.error is not None:
                    raise output.error
                yield output
        finally:
            self._lock.soon(lambda: self._abort(ids))


@dataclass(frozen=True)
class _SteppedEngine:
    """Adapt an Engine to the interface of the HTTP side.

    The server's limits on queue, time and unread outputs do not apply, because there is one user and a step runs only
    when its outputs are requested.
    """

    engine: Engine
    alive: bool = True
    restarts: int = 0
    replicas: Sequence[ReplicaState] = ()  # there is no engine process

    @property
    def config(self) -> Config:
        return self.engine.config

    @property
    def located(self) -> Located:
        return Located(self.engine._tokenizer_dir)

    @property
    def info(self) -> EngineInfo:
        return self.engine.info

    @property
    def tokenizer(self) -> Tokenizer:
        return self.engine.tokenizer

    @property
    def status(self) -> EngineStatus:
        return EngineStatus("ready")

    @property
    def num_live(self) -> int:
        stats = self.stats()
        return stats.num_running + stats.num_waiting

    def stats(self) -> EngineStats:
        """Return the statistics of the core. Waits for other threads, which may be running a step or loading adapters.

        Routes read them in the thread of the event loop.
        """
        with self.engine._lock.held():
            return self.engine.core.stats()

    def check_ready(self) -> None: ...

    def check_queue(self, n: int = 1, num_prompt_tokens: int = 0) -> None: ...

    def generate(
        self, prompt_token_ids: list[int], params: SamplingParams, **options: Unpack[GenerateOptions]
    ) -> AsyncGenerator[RequestOutput, None]:
        """Start the sequences of one prompt and yield their outputs."""
        return self.engine._outputs(prompt_token_ids, params, **options)

    async def call(self, call: EngineCall) -> Any:
        """Raise InvalidValueError: no route of an operator is served in process."""
        raise InvalidValueError(f"{call.name}: call the engine")

    async def finish(self) -> bool:
        """Raise InvalidValueError, as `call` does."""
        raise InvalidValueError("finish: call the engine")

    async def waiting(self) -> list[WaitingRequest]:
        """Return the requests without a slot. Waits as `stats` does."""
        with self.engine._lock.held():
            return self.engine.core.waiting()


class _Routes(Routes):
    """The routes, whose coroutines run in a thread while the caller waits."""

    def __init__(self, engine: _SteppedEngine) -> None:
        super().__init__(engine)
        self.loop = LoopThread("jaxserve-chat")

    def conversation(self, fields: dict[str, Any]) -> ChatAnswer:
        """Start a conversation, see `begin`."""
        return self.loop.run(self.begin(fields))

    def chunks(self, answer: ChatAnswer) -> Generator[ChatCompletionChunk, None, None]:
        """Parse the HTTP events back into chunks."""
        events = answer.events()
        try:
            while event := self.loop.run(_next(events)):
                yield chunk_of(event)
        finally:
            self.loop.settle(_end(events))


async def _next(events: AsyncGenerator[bytes, None]) -> bytes | None:
    return await anext(events, None)


async def _end(events: AsyncGenerator[bytes, None]) -> None:
    await events.aclose()


def _close(loop: LoopThread, grammars: GrammarChecks, stops: Sequence[Callable[[], object]]) -> None:
    loop.settle(grammars.stop())
    for stop in stops:
        stop()
    loop.close()
