"""The interface of an engine as the HTTP side uses it: the whole boundary between api/ and the engine.

`AsyncEngine` (jaxserve.client.async_engine) implements `EngineProtocol`; so does the fake of the tests.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol, Unpack

from jaxserve.client.async_engine import GenerateOptions
from jaxserve.client.replicas import ReplicaState
from jaxserve.config import Config
from jaxserve.text.detokenizer import RequestOutput
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.types.messages import EngineInfo, EngineStats, WaitingRequest
from jaxserve.types.sampling import SamplingParams


class StatusProtocol(Protocol):
    """The engine's progress. `done` of `total` counts in the unit of the current phase."""

    @property
    def phase(self) -> str: ...  # "loading" | "ready" | "draining" | "dead"
    @property
    def detail(self) -> str: ...
    @property
    def done(self) -> int: ...
    @property
    def total(self) -> int: ...


class EngineProtocol(Protocol):
    """An engine that may still be loading. Read `info` and `tokenizer` only once it is ready."""

    @property
    def config(self) -> Config: ...
    @property
    def info(self) -> EngineInfo: ...
    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def status(self) -> StatusProtocol: ...
    @property
    def alive(self) -> bool: ...  # ready, and its loop is running

    @property
    def restarts(self) -> int: ...  # engine processes that died and were replaced
    @property
    def num_live(self) -> int: ...  # sequences accepted and not finished

    @property
    def replicas(self) -> Sequence[ReplicaState]: ...  # the state of each engine

    def stats(self) -> EngineStats: ...

    def check_ready(self) -> None:
        """Raises NotReadyError or EngineDeadError if requests are not accepted."""
        ...

    def check_queue(self, n: int = 1, num_prompt_tokens: int = 0) -> None:
        """Raises QueueFullError if `n` more sequences of such a prompt do not fit into the queue."""
        ...

    def generate(
        self, prompt_token_ids: list[int], params: SamplingParams, **options: Unpack[GenerateOptions]
    ) -> AsyncIterator[RequestOutput]:
        """Yield the outputs of all choices of one prompt. Closing the iterator aborts. Errors are HTTPErrors."""
        ...

    async def waiting(self) -> list[WaitingRequest]:
        """Return the requests that have no slot yet, the first 1,024 of them, each with the reason why it waits."""
        ...

    async def call(self, method: str, **args: Any) -> Any:
        """Make a call that the engine's server knows: flush_cache, waiting, or one of EngineControl.

        Raises an HTTPError.
        """
        ...
