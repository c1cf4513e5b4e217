"""Checks grammars in a separate process, which can be killed, off the event loop and the engine's thread.

    compiler = GrammarChecker(tokenizer.to_json(), vocab_size=..., eos_token_ids=...)
    await compiler.start()
    spec = await compiler.check(spec, param="response_format")  # or raises InvalidSchemaError with the reason
    await compiler.stop()

The returned spec has the text that was checked. The engine builds it (`matcher.MatcherFactory`) under the same
limits and runs no Python code over a client's schema.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import struct
from collections import OrderedDict
from dataclasses import dataclass

import msgspec

from jaxserve.errors import InvalidSchemaError, QueueFullError, ServerError
from jaxserve.grammar.translate import check_source
from jaxserve.grammar.worker import Cancel, Check, GrammarSetup, Verdict
from jaxserve.transport.child import child_environment, frame, python_command
from jaxserve.types.sampling import GrammarSpec

log = logging.getLogger(__name__)


_VERDICT = msgspec.msgpack.Decoder(Verdict)


@dataclass(frozen=True, slots=True)
class CheckLimits:
    """Limits of the checks.

    cpu_seconds    CPU time of one check
    wall_seconds   time of one check, in case the machine gives it too little CPU
    memory_bytes   memory of one check, beside the tokenizer
    parallel       checks that run at once; `waiting` more may queue
    cache_bytes    size of the cache of verdicts
    """

    wall_seconds: float = 10.0
    cpu_seconds: float = 1.0
    memory_bytes: int = 1 << 30
    parallel: int = 4
    waiting: int = 256
    cache_bytes: int = 16 << 20


class GrammarChecker:
    """Client of the worker process, for one event loop. Restarts the worker whenever it ends."""

    def __init__(
        self,
        tokenizer_json: str,
        *,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        limits: CheckLimits | None = None,
    ) -> None:
        self.limits = limits or CheckLimits()
        self._setup = GrammarSetup(
            tokenizer_json=tokenizer_json,
            vocab_size=vocab_size,
            eos_token_ids=list(eos_token_ids),
            wall_seconds=self.limits.wall_seconds,
            cpu_seconds=self.limits.cpu_seconds,
            memory_bytes=self.limits.memory_bytes,
        )
        self._cache = VerdictCache(self.limits.cache_bytes)
        self._slots = asyncio.Semaphore(self.limits.parallel)
        self._waiting = 0
        self._next_id = 0
        self._pending: dict[int, asyncio.Future[Verdict]] = {}
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self._stopped = False

    async def start(self) -> None:
        """Start the worker, which then builds its tokenizer. Checks wait for it. Do not call after `stop`."""
        async with self._starting:
            if self._stopped or (self._process is not None and self._process.returncode is None):
                return
            self._process = await asyncio.create_subprocess_exec(
                *python_command("jaxserve.grammar.worker"),
                env=child_environment(),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                start_new_session=True,  # Ctrl-C in a terminal is handled by the server, which drains
            )
            self._reader = asyncio.create_task(self._read(self._process))
            await self._send(self._process, self._setup)

    async def stop(self) -> None:
        """Kill the worker and wait until it has ended."""
        self._stopped = True
        async with self._starting:
            process, self._process = self._process, None
        if process is not None and process.returncode is None:
            process.kill()
        if process is not None:
            await process.wait()
        if self._reader is not None:
            await self._reader
            self._reader = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    async def check(self, spec: GrammarSpec, *, param: str = "response_format") -> GrammarSpec:
        """Return the checked spec for the engine.

        Raises InvalidSchemaError (400, `param`) with the reason, and QueueFullError if too many checks wait.
        """
        check_source(spec.source, param)
        key = hashlib.sha256(f"{spec.kind}\0{spec.source}".encode()).digest()
        found = self._cache.get(key)
        if found is None:
            found = await self._ask(spec)
            if not found.busy:
                self._cache.put(key, found)
        if found.error is not None:
            raise InvalidSchemaError(f"this grammar cannot be enforced: {found.error}", param=param)
        return msgspec.structs.replace(spec, checked=found.grammar)

    async def _ask(self, spec: GrammarSpec) -> Verdict:
        if self._waiting >= self.limits.waiting:
            raise QueueFullError("too many grammars are being compiled", param="response_format")
        self._waiting += 1
        try:
            async with self._slots:
                verdict = await self._ask_worker(spec)
                return await self._ask_worker(spec, last=True) if verdict.failed else verdict
        finally:
            self._waiting -= 1

    async def _ask_worker(self, spec: GrammarSpec, last: bool = False) -> Verdict:
        await self.start()
        process = self._process
        if process is None:
            raise ServerError("the grammar compiler was stopped")
        self._next_id += 1
        check_id = self._next_id
        future = asyncio.get_running_loop().create_future()
        self._pending[check_id] = future
        try:
            await self._send(process, Check(check_id, spec))
            verdict: Verdict = await future
        except asyncio.CancelledError:
            if process.stdin is not None and not process.stdin.is_closing():
                process.stdin.write(frame(Cancel(check_id)))
            raise
        finally:
            self._pending.pop(check_id, None)
        if verdict.failed and last:
            raise ServerError("the grammar compiler ended; try again")
        return verdict

    async def _send(self, process: asyncio.subprocess.Process, message: msgspec.Struct) -> None:
        assert process.stdin is not None
        try:
            process.stdin.write(frame(message))
            await process.stdin.drain()
        except (BrokenPipeError, ConnectionResetError):
            pass  # the reader sees the end and fails all pending checks

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        try:
            while True:
                head = await process.stdout.readexactly(4)
                body = await process.stdout.readexactly(struct.unpack(">I", head)[0])
                verdict = _VERDICT.decode(body)
                future = self._pending.get(verdict.id)
                if future is not None and not future.done():
                    future.set_result(verdict)
        except asyncio.IncompleteReadError:
            await process.wait()
            if self._process is process:
                log.warning("the grammar compiler ended with %s and is started again", process.returncode)
            for check_id, future in self._pending.items():
                if not future.done():
                    future.set_result(Verdict(check_id, failed=True))


class VerdictCache:
    """A cache of verdicts, limited in bytes. Evicts the least recently used ones."""

    ENTRY_BYTES = 200  # key, links and object, measured

    def __init__(self, max_bytes: int) -> None:
        self._entries: OrderedDict[bytes, Verdict] = OrderedDict()
        self._max_bytes = max_bytes
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: bytes) -> Verdict | None:
        if key in self._entries:
            self._entries.move_to_end(key)
        return self._entries.get(key)

    def put(self, key: bytes, verdict: Verdict) -> None:
        self._drop(key)
        self._entries[key] = verdict
        self.num_bytes += self._size(verdict)
        while self.num_bytes > self._max_bytes:
            self._drop(next(iter(self._entries)))

    def _drop(self, key: bytes) -> None:
        old = self._entries.pop(key, None)
        if old is not None:
            self.num_bytes -= self._size(old)

    def _size(self, verdict: Verdict) -> int:
        return self.ENTRY_BYTES + len(verdict.error or "") + len(verdict.grammar)
