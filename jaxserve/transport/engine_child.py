"""An engine process as its parent sees it: the process, its private directory, and the stdin that keeps it alive.

It may be started before the parent has an event loop, so that both import their modules at the same time.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Collection, Mapping

from jaxserve.transport.child import child_environment, python_command
from jaxserve.transport.socket_directory import SocketDirectory

ENGINE_MODULE = "jaxserve.engine.process"


class EngineChild:
    """A child process that runs `module`. Raises ConfigError if there is no place for its directory.

    config: its configuration as JSON. environment: variables added to this process's. cores: cores that it may use;
    None: all. niceness: 0 to 19, by how much its priority is below this process's
    """

    def __init__(
        self,
        module: str,
        config: str,
        *,
        environment: Mapping[str, str] | None = None,
        cores: Collection[int] | None = None,
        niceness: int = 0,
    ) -> None:
        self._is_closed = False
        self.directory = SocketDirectory()
        try:
            self._process = subprocess.Popen(
                python_command(module, str(self.directory.path)),
                env={**child_environment(), **(environment or {})},
                stdin=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError:
            self.directory.remove()
            raise
        assert self._process.stdin is not None
        with contextlib.suppress(ProcessLookupError, BrokenPipeError):  # it has ended, which `ended` reports
            if cores is not None:  # before its first line of configuration, so before it has threads
                os.sched_setaffinity(self._process.pid, cores)
            if niceness:
                own = os.getpriority(os.PRIO_PROCESS, 0)
                os.setpriority(os.PRIO_PROCESS, self._process.pid, min(19, own + niceness))
            self._process.stdin.write(config.encode() + b"\n")
            self._process.stdin.flush()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def ended(self) -> asyncio.Future[int]:
        """Return a future of the exit status. Call it once, in the event loop."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[int] = loop.create_future()

        def wait() -> None:
            status = self._process.wait()
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(lambda: future.done() or future.set_result(status))

        threading.Thread(target=wait, name="engine-end", daemon=True).start()
        return future

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, unless the process has ended."""
        self._process.send_signal(number)

    def close(self) -> None:
        """Kill the process if it still runs, and remove its directory. A second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        self._process.kill()  # before its directory goes, which it may be about to open
        self._process.wait()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self.directory.remove()
