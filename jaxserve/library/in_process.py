"""Define the public Engine: the engine in this process (jaxserve.engine), and chat as over HTTP.

    engine = Engine("DIR")
    engine.chat([{"role": "user", "content": "Hello"}], max_tokens=32).choices[0].message.content

The HTTP route's own code reads the fields and builds the answer. Its coroutines run in a thread with an event loop,
because the caller may already be inside a running loop (a notebook). The caller waits for them.
"""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Unpack, overload

import msgspec
import orjson
from pydantic import BaseModel

from jaxserve.api.answers import ChatCompletion, ChatCompletionChunk
from jaxserve.api.http.body import validated
from jaxserve.api.keys import DEFAULT_CALLER
from jaxserve.api.openai.answer import ChatAnswer
from jaxserve.api.openai.protocol import ChatCompletionRequest
from jaxserve.api.openai.routes import answer_chat
from jaxserve.api.state import GrammarChecks, ServerState, check_template, check_vocabulary
from jaxserve.client.async_engine import GenerateOptions
from jaxserve.client.replicas import ReplicaState
from jaxserve.client.supervisor import EngineStatus
from jaxserve.config import Config
from jaxserve.engine.engine import TextEngine
from jaxserve.errors import InvalidValueError
from jaxserve.library.serving import LoopThread
from jaxserve.telemetry.metrics import Metrics
from jaxserve.telemetry.tracing import make_tracing
from jaxserve.text.detokenizer import RequestOutput
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.types.messages import EngineInfo, EngineStats, WaitingRequest
from jaxserve.types.sampling import SamplingParams


class Engine(TextEngine):
    __doc__ = TextEngine.__doc__
    _end_chats: Callable[[], object] = staticmethod(lambda: None)  # no conversation has begun

    @overload
    def chat(
        self,
        messages: Sequence[Any],
        params: SamplingParams | None = None,
        *,
        stream: Literal[False] = False,
        **fields: Any,
    ) -> ChatCompletion: ...

    @overload
    def chat(
        self,
        messages: Sequence[Any],
        params: SamplingParams | None = None,
        *,
        stream: Literal[True],
        **fields: Any,
    ) -> Generator[ChatCompletionChunk, None, None]: ...

    def chat(
        self, messages: Sequence[Any], params: SamplingParams | None = None, *, stream: bool = False, **fields: Any
    ) -> ChatCompletion | Generator[ChatCompletionChunk, None, None]:
        """Answer a conversation as POST /v1/chat/completions does; with `stream`, chunk by chunk.

        messages: dicts, or messages of earlier answers
        params: the sampling, as for `generate`; None: the route's defaults
        fields: fields of the route (docs/routes.md), such as max_tokens, tools, response_format. They replace `params`.
        Closing the stream aborts.
        Raises RequestError, also for a field that the route does not know. Raises ConfigError at the first call if the
        chat template or the tokenizer does not fit the model.
        """
        with self._lock.held():
            self._check_open()
            chats = self._chats
        answer = chats.prepare(_fields(params) | {"messages": messages, "stream": stream} | fields)
        return chats.chunks(answer) if stream else chats.whole(answer)

    @cached_property
    def _chats(self) -> _Chats:
        chats = _Chats(_SteppedEngine(self))
        self._end_chats = weakref.finalize(self, _close, chats.loop, chats.state.grammars, chats.stops)
        return chats

    def close(self) -> None:
        super().close()
        if not self._is_forked:
            self._end_chats()

    async def _outputs(
        self, prompt: list[int], params: SamplingParams, **options: Unpack[GenerateOptions]
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the outputs of a prompt's sequences as they arrive. Closing the generator aborts.

        Raises the error of a failed output.
        """
        name = options.get("request_id") or "chat"
        group = self._siblings(prompt, params, name, options.get("priority", 0), options.get("cache_salt", ""))
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
        return self.engine.core.stats()

    def check_ready(self) -> None: ...

    def check_queue(self, n: int = 1, num_prompt_tokens: int = 0) -> None: ...

    def generate(
        self, prompt_token_ids: list[int], params: SamplingParams, **options: Unpack[GenerateOptions]
    ) -> AsyncGenerator[RequestOutput, None]:
        """Start the sequences of one prompt and yield their outputs."""
        return self.engine._outputs(prompt_token_ids, params, **options)

    async def call(self, method: str, **args: Any) -> Any:
        """Raise InvalidValueError: no route of an operator is served in process."""
        raise InvalidValueError(f"{method}: call the engine")

    async def waiting(self) -> list[WaitingRequest]:
        return self.engine.core.waiting()


class _Chats:
    """The state that all conversations of one engine share."""

    def __init__(self, engine: _SteppedEngine) -> None:
        self.state = ServerState(engine, engine.config, Metrics(), make_tracing(engine.config.logging))
        try:
            check_template(self.state)
            check_vocabulary(self.state)
        except BaseException:
            self.state.stop_rendering()
            raise
        template, texts = self.state.chat_template, self.state.text_work
        # they do not refer to the state, which refers to the engine
        self.stops = [texts.stop, self.state.template_work.stop, *([] if template is None else [template.stop])]
        self.loop = LoopThread("jaxserve-chat")

    def prepare(self, fields: dict[str, Any]) -> ChatAnswer:
        """Validate the fields and start a conversation.

        Raises InvalidValueError for an unknown field, and for a field that names another engine.
        """
        fields = {"model": self.state.engine.info.served_names[0]} | fields
        body, unknown = validated(orjson.dumps(fields, default=_plain), ChatCompletionRequest)
        for name in unknown:
            if name in fields:
                raise InvalidValueError(f"{name}: chat/completions has no such field.", param=name)
        for name in ("data_parallel_rank", "routed_dp_rank"):
            if getattr(body, name):
                raise InvalidValueError(f"{name} is {getattr(body, name)}, and there is one engine, 0", param=name)
        self.state.unknown_fields.note("chat", unknown)
        return self.loop.run(answer_chat(body, self.state, DEFAULT_CALLER))

    def whole(self, answer: ChatAnswer) -> ChatCompletion:
        return ChatCompletion.model_validate_json(orjson.dumps(self.loop.run(answer.whole())))

    def chunks(self, answer: ChatAnswer) -> Generator[ChatCompletionChunk, None, None]:
        """Parse the HTTP events back into chunks."""
        events = answer.events()
        try:
            while event := self.loop.run(_next(events)):
                yield ChatCompletionChunk.model_validate_json(event.removeprefix(b"data: "))
        finally:
            self.loop.settle(_end(events))


# fields of SamplingParams that chat/completions does not have under the same name -> its own field or way
_OF_THE_ROUTE = {
    "grammar": "response_format",
    "bad_words_token_ids": "bad_words",
    "thinking": "thinking_token_budget",
    "extras": "the field of docs/routes.md that asks for it",
    "watermark_key": "watermark",
    "visible_token_ids": "skip_special_tokens",
    "embed": "Engine.generate",
    "second_text": "Engine.generate",
}


def _fields(params: SamplingParams | None) -> dict[str, Any]:
    """Return sampling parameters as fields of the route. Raises InvalidValueError for one that the route lacks."""
    if params is None:
        return {}
    if not isinstance(params, SamplingParams):
        raise InvalidValueError(f"params are SamplingParams, not {type(params).__name__}", param="params")
    given = msgspec.structs.asdict(params)
    usual = msgspec.structs.asdict(SamplingParams())
    for name, instead in _OF_THE_ROUTE.items():
        if given.pop(name) != usual[name]:
            raise InvalidValueError(f"params.{name}: in a conversation give {instead}", param=name)
    given.pop("grouped")  # only batches use it
    if given["logprobs"] is not None:
        given |= {"logprobs": True, "top_logprobs": given["logprobs"]}
    given["logit_bias"] = {str(token_id): bias for token_id, bias in params.logit_bias.items()}
    return {name: value for name, value in given.items() if value not in (None, ())}


async def _next(events: AsyncGenerator[bytes, None]) -> bytes | None:
    return await anext(events, None)


async def _end(events: AsyncGenerator[bytes, None]) -> None:
    await events.aclose()


def _plain(value: Any) -> Any:
    """Convert a message of an earlier answer to the dict that a client would send."""
    if isinstance(value, BaseModel):
        return value.model_dump(exclude_none=True)
    raise TypeError(f"{type(value).__name__} is no JSON")


def _close(loop: LoopThread, grammars: GrammarChecks, stops: Sequence[Callable[[], object]]) -> None:
    loop.settle(grammars.stop())
    for stop in stops:
        stop()
    loop.close()
