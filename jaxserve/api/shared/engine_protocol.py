"""What the HTTP side asks of an engine: the whole of the border between api/ and engine/.

`AsyncEngine` (jaxserve.client.async_engine) satisfies `EngineProtocol`; so does the fake of the tests.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from jaxserve.client.abort_signal import AbortSignal
from jaxserve.client.sequence_table import Outbox
from jaxserve.config import Config
from jaxserve.text.output.sequence_text import RequestOutput
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.types.messages import EngineInfo, EngineStats, WaitingRequest
from jaxserve.types.sampling import SamplingParams


class StatusProtocol(Protocol):
    """How far the engine is. `done` of `total` counts the present phase's own unit."""

    @property
    def phase(self) -> str: ...  # "loading" | "ready" | "draining" | "dead"
    @property
    def detail(self) -> str: ...
    @property
    def done(self) -> int: ...
    @property
    def total(self) -> int: ...


class EngineProtocol(Protocol):
    """An engine that may still be loading. `info` and `tokenizer` may be read only once it is ready."""

    @property
    def config(self) -> Config: ...
    @property
    def info(self) -> EngineInfo: ...
    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def status(self) -> StatusProtocol: ...
    @property
    def alive(self) -> bool: ...  # ready, and its loop ticks

    @property
    def restarts(self) -> int: ...  # engines that died and were replaced
    @property
    def num_live(self) -> int: ...  # sequences that were accepted and have not ended

    def stats(self) -> EngineStats: ...

    def check_ready(self) -> None:
        """Raises NotReadyError or EngineDeadError unless requests can be taken."""
        ...

    def check_queue(self, n: int = 1, num_prompt_tokens: int = 0) -> None:
        """Raises QueueFullError unless `n` more sequences of a prompt so long may wait."""
        ...

    def generate(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        deadline: float | None = None,
        signal: AbortSignal | None = None,
        outbox: Outbox | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Outputs of all choices of one prompt. Closing the iterator aborts; errors are HTTPErrors.

        signal: ends them with finish_reason abort. outbox: where they wait for the reader.
        """
        ...

    async def waiting(self) -> list[WaitingRequest]:
        """The requests that have no slot yet, the first 1,024 of them, each with the reason why it waits."""
        ...

    async def flush_cache(self) -> bool:
        """Drop the prefix cache; False while requests use it."""
        ...
