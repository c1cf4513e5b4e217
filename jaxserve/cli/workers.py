"""Run the workers of a server with `server.workers`: start them, watch them, and start them again if they die."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import socket
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec

from jaxserve.api.process_group import MAIN, GroupKeeper, ProcessGroup, num_columns
from jaxserve.cli.worker import WorkerStart
from jaxserve.client.async_engine import AsyncEngine
from jaxserve.client.relay import WorkerBridge, WorkerBridges
from jaxserve.client.supervisor import DUMP_TIME, LOOK_INTERVAL, Restarts
from jaxserve.config import Config
from jaxserve.errors import HTTPError, UnexpectedEndError
from jaxserve.telemetry.metrics import Families, counted, merge_families
from jaxserve.transport.child import child_environment, python_command
from jaxserve.transport.shared_state import SharedCounters
from jaxserve.transport.socket_directory import SocketDirectory
from jaxserve.types.calls import AbortRequests, Finish, IsAlive, Prepare, ReadMetrics

WRITE_INTERVAL = 0.05  # seconds between two writes to the board
WORKER_CALL_SECONDS = 2.0  # a worker must answer a call within this time
WORKER_FINISH_SECONDS = 8.0  # a worker must end its open answers within this time; uvicorn takes 5

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Workers:
    """All workers of one server.

    listener: the socket whose connections they accept
    main_socket: path of the socket on which the main process serves the requests that they forward
    """

    def __init__(self, config: Config, engine: AsyncEngine, listener: socket.socket, encryption_key: bytes) -> None:
        self._config = config
        self._rows = range(1, config.server.workers + 1)
        self._listener = listener
        self._directory = SocketDirectory()
        self.main_socket = str(self._directory.path / "http")
        shape = self._shape = len(self._rows) + 1, num_columns(len(config.server.keys))
        self._board = SharedCounters.create(*shape)
        self.group = ProcessGroup(SharedCounters(self._board, *shape), MAIN, encryption_key=encryption_key)
        self._bridges = WorkerBridges(engine)
        self._engine = engine
        self._numbers: dict[WorkerBridge, int] = {}
        self._readings: dict[int, Families] = {}  # the latest metrics of each worker
        self._ended: Families = []  # the last metrics of workers that have ended
        self._starts = 0
        self._is_stopping = False
        self._processes: dict[int, asyncio.subprocess.Process] = {}
        self._seed = secrets.randbits(62) if config.runtime.random_seed is None else config.runtime.random_seed

    async def run(self, keeper: GroupKeeper) -> None:
        """Keep all workers running until cancelled. Raises UnexpectedEndError if one dies again and again."""
        work = [self._bridges.run(), self._write(keeper), *(self._keep(row, keeper) for row in self._rows)]
        tasks = [asyncio.create_task(each) for each in work]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _write(self, keeper: GroupKeeper) -> None:
        while True:
            keeper.write()
            await asyncio.sleep(WRITE_INTERVAL)

    async def _keep(self, row: int, keeper: GroupKeeper) -> None:
        restarts = Restarts()
        while True:
            began = time.monotonic()
            try:
                end = f"ended with status {await self._run_one(row)}"
            except OSError as error:  # the system cannot start a process now
                end = f"cannot be started ({error})"
            keeper.ended(row)
            if self._is_stopping:
                return
            delay = restarts.next_delay("counted", time.monotonic() - began)
            if delay is None:
                raise UnexpectedEndError(f"worker {row} {end} again", fix="see the lines above")
            logger.error("worker %d %s: its requests are aborted; restart in %g s", row, end, delay)
            await asyncio.sleep(delay)

    async def _run_one(self, row: int) -> int:
        """Run one worker until it ends, and return its exit status."""
        self._starts += 1
        number = self._starts  # kept, because other workers start during the awaits
        here, there = socket.socketpair()
        with there:
            try:
                process = await asyncio.create_subprocess_exec(
                    *python_command("jaxserve.cli.worker"),
                    env=child_environment(),
                    stdin=asyncio.subprocess.PIPE,
                    start_new_session=True,
                    pass_fds=(there.fileno(), self._listener.fileno(), self._board),
                )
            except OSError:
                here.close()
                raise
            start = WorkerStart(
                config=self._config.with_secrets(),
                row=row,
                id_prefix=f"w{number:x}-",
                listener=self._listener.fileno(),
                relay=there.fileno(),
                board=self._board,
                board_shape=self._shape,
                main_socket=self.main_socket,
                encryption_key=self.group.encryption_key,
                seed=(self._seed + number * 2**32) % 2**63,
            )
        self._processes[row] = process
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(start) + b"\n")
        bridge = await self._bridges.connect(here)
        self._numbers[bridge] = number
        watch = asyncio.create_task(self._watch(row, bridge, process))
        try:
            if self._engine.was_ready:
                await self._prepare(bridge)
            return await process.wait()
        finally:
            watch.cancel()
            if process.returncode is None:
                process.kill()
            bridge.close()
            self._forget(bridge)

    async def _watch(self, row: int, bridge: WorkerBridge, process: asyncio.subprocess.Process) -> None:
        """Kill a worker that does not answer for longer than the watchdog's limit.

        Its start may take any time. Only time in which this process ran counts, so that a pause of the whole machine
        kills no worker.
        """
        await self._answer(bridge.call(IsAlive()), None)
        while not bridge.closed.is_set():
            answer = asyncio.ensure_future(self._answer(bridge.call(IsAlive()), None))
            silent = 0.0
            while not answer.done():
                began = time.monotonic()
                await asyncio.wait((answer,), timeout=LOOK_INTERVAL)
                silent += min(time.monotonic() - began, LOOK_INTERVAL)
                if silent > self._config.server.watchdog_timeout:
                    logger.error("worker %d is stuck (%.0f s): killing it; its stacks follow", row, silent)
                    process.send_signal(signal.SIGUSR1)
                    await asyncio.sleep(DUMP_TIME)
                    process.kill()
                    return
            await asyncio.sleep(LOOK_INTERVAL)

    def _forget(self, bridge: WorkerBridge) -> None:
        number = self._numbers.pop(bridge)
        self._ended = merge_families([self._ended, counted(self._readings.pop(number, []))])

    async def prepare(self) -> None:
        """Wait until every worker answers requests without delay. The engine must be ready."""
        await asyncio.gather(*map(self._prepare, self._bridges.open))

    async def _prepare(self, bridge: WorkerBridge) -> None:
        try:
            await bridge.call(Prepare())
        except HTTPError as error:
            logger.error("a worker is not ready: %s", error)

    async def abort(self, prefix: str, owner: str | None) -> list[str]:
        """See Peers."""
        found = await self._ask(lambda bridge: bridge.call(AbortRequests(prefix, owner)))
        return [request_id for ids in found.values() for request_id in ids]

    async def tell(self) -> None:
        """See Peers."""
        self._bridges.tell()
        await self._ask(lambda bridge: bridge.call(IsAlive()))

    async def metrics(self) -> list[Families]:
        """See Peers."""
        found = await self._ask(lambda bridge: bridge.call(ReadMetrics()))
        running = self._numbers.values()  # a worker that has ended since then is counted in `_ended`
        self._readings |= {number: families for number, families in found.items() if number in running}
        return [*self._readings.values(), self._ended]

    async def _ask(self, call: Callable[[WorkerBridge], Awaitable[T]]) -> dict[int, T]:
        """Call all workers at once, and return the answers by the worker's number. A late answer is left out."""
        numbers = dict(self._numbers)
        found = await asyncio.gather(*(self._answer(call(bridge)) for bridge in numbers))
        return {number: answer for number, answer in zip(numbers.values(), found, strict=True) if answer is not None}

    async def _answer(self, call: Awaitable[T], seconds: float | None = WORKER_CALL_SECONDS) -> T | None:
        """Return the answer; None if it is late, or if the worker has ended."""
        try:
            async with asyncio.timeout(seconds):
                return await call
        except (HTTPError, TimeoutError):
            return None

    async def finish(self) -> None:
        """Let all workers accept no more requests, end their open answers and exit."""
        self._is_stopping = True
        if self._engine.was_ready:  # else no client waits for an answer
            await self._ask(lambda bridge: bridge.call(Finish()))

    async def stop(self) -> None:
        """Wait until the workers have exited after `finish`, and kill workers that do not."""
        running = [process for process in self._processes.values() if process.returncode is None]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WORKER_FINISH_SECONDS if self._engine.was_ready else 0):
                await asyncio.gather(*(process.wait() for process in running))
        for process in running:
            if process.returncode is None:
                process.kill()
        await asyncio.gather(*(process.wait() for process in running))

    def close(self) -> None:
        """Remove the directory and the board. Call this after `run` has ended."""
        os.close(self._board)
        self._directory.remove()
