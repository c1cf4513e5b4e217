"""An engine in a thread of this process: for research scripts and tests that want an AsyncEngine and no child."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from jaxserve.config import Config
from jaxserve.engine.factory import build_engine
from jaxserve.engine.server import BuiltEngine, EngineServer
from jaxserve.errors import ConfigError, EngineDeadError
from jaxserve.transport.shared_state import Pulse, SharedState
from jaxserve.types.messages import MAX_WEIGHT, Failed, FromEngine, Stop, ToEngine, weight


class QueueChannel:
    """A Channel over two queues; the API side lives on an asyncio loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.to_engine: queue.SimpleQueue[ToEngine] = queue.SimpleQueue()
        self.from_engine: asyncio.Queue[FromEngine | None] = asyncio.Queue()
        self._loop = loop

    def receive(self, timeout: float) -> list[ToEngine]:
        messages: list[ToEngine] = []
        deadline, room = time.monotonic() + timeout, MAX_WEIGHT
        while room > 0:
            try:
                wait = 0.0 if messages else max(0.0, deadline - time.monotonic())
                messages.append(self.to_engine.get(timeout=wait) if wait else self.to_engine.get_nowait())
                room -= weight(messages[-1])
            except queue.Empty:
                break
        return messages

    def send(self, message: FromEngine) -> None:
        self._post(message)

    def close(self) -> None:
        self._post(None)

    def _post(self, message: FromEngine | None) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.from_engine.put_nowait, message)


class ThreadLink:
    """An EngineLink to a thread. `build` makes the engine; tests pass one with a fake runner."""

    def __init__(self, config: Config, build: Callable[[Any], BuiltEngine] | None = None) -> None:
        self._config = config
        self._build = build
        self._thread: threading.Thread | None = None
        self._channel: QueueChannel | None = None
        self._state = SharedState()

    async def start(self) -> None:
        await self.stop()
        self._channel = QueueChannel(asyncio.get_running_loop())
        self._state = SharedState()
        self._thread = threading.Thread(
            target=self._run, args=(self._channel, self._state), name="jaxserve-engine", daemon=True
        )
        self._thread.start()

    def _run(self, channel: QueueChannel, state: SharedState) -> None:
        try:
            built = self._build(channel) if self._build else build_engine(self._config, channel.send)
            EngineServer(built, channel, state).run()
        except ConfigError as error:
            channel.send(Failed(str(error), error.fix))
        except Exception as error:
            channel.send(Failed(f"{type(error).__name__}: {error}", expected=False))
        finally:
            channel.close()

    def send(self, message: ToEngine) -> None:
        if self._channel is not None:
            self._channel.to_engine.put(message)

    async def receive(self) -> FromEngine:
        assert self._channel is not None
        message = await self._channel.from_engine.get()
        if message is None:
            raise EngineDeadError("the engine thread ended")
        return message

    def pulse(self) -> Pulse | None:
        return None

    def in_work(self) -> list[str]:
        return self._state.in_work

    def dump_stacks(self) -> None:
        """Its stacks are this process's own."""

    def kill(self) -> None:
        """A thread cannot be killed; it is asked to stop."""
        self.send(Stop())

    async def stop(self) -> None:
        if self._thread is not None:
            self.send(Stop())
            await asyncio.to_thread(self._thread.join)
        self._thread = self._channel = None
