"""`jaxserve launch` in a process of its own, as an operator runs it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx2
import psutil

from tests.conftest import SMALL
from tests.scrape import values
from tests.waiting import LAST_RESORT


@dataclass(frozen=True)
class State:
    """What requests hold of a server."""

    running: int
    waiting: int
    pages_used: int
    tasks: int
    descriptors: tuple[int, ...]  # of each process

    @property
    def idle(self) -> bool:
        return not (self.running or self.waiting or self.pages_used)


class Launched:
    """A server that is ready on entering and gone, with all its children, on leaving.

    directory: for its store and its log; devices: more of its environment; keys: configuration by flag
    """

    def __init__(
        self, compile_cache: str, directory: Path, devices: dict[str, str] | None = None, /, **keys: Any
    ) -> None:
        environment = {
            "JAXSERVE_RUNTIME__COMPILE_CACHE": compile_cache,
            "JAXSERVE_STORE__PATH": str(directory / "store"),
            "JAXSERVE_RUNTIME__WAIT_FOR_PROGRAMS": "true",
        }
        self._environment = os.environ | environment | (devices or {})
        self._command = [sys.executable, "-m", "jaxserve", "launch", "--port", "0"]
        for key, value in (SMALL | keys).items():
            self._command += [f"--{key.replace('_', '-')}", str(value)]
        self._log = open(directory / "stderr.txt", "w+", encoding="utf-8")

    def __enter__(self) -> Self:
        self.process = subprocess.Popen(
            self._command,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        lines = iter(self.process.stdout)
        card = next((line for line in lines if line.startswith("URL")), None)
        if card is None:
            log = self.log()
            self._close()
            raise AssertionError(log)
        self.url = card[12:].strip().removesuffix("/v1")
        self.port = int(self.url.rpartition(":")[2])
        self.api = psutil.Process(self.process.pid)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in [*self.children(), self.api]:
            if process.is_running():
                process.kill()
        self._close()

    def _close(self) -> None:
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._log.close()

    def children(self) -> list[psutil.Process]:
        return self.api.children(recursive=True) if self.api.is_running() else []

    def log(self) -> str:
        self._log.flush()
        return Path(self._log.name).read_text(encoding="utf-8")

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def send_as_a_terminal(self, number: signal.Signals) -> None:
        """To the process and to all of its children that have no session of their own."""
        os.killpg(self.process.pid, number)

    def state(self) -> State:
        numbers = self.stats()
        used = numbers["jaxserve:pages_total"] - numbers["jaxserve:pages_free"] - numbers["jaxserve:pages_evictable"]
        return State(
            running=int(numbers["jaxserve:num_requests_running"]),
            waiting=int(numbers["jaxserve:num_requests_waiting"]),
            pages_used=int(used),
            tasks=int(numbers["jaxserve:api_tasks"]),
            descriptors=tuple(process.num_fds() for process in [self.api, *self.children()]),
        )

    def settled(self) -> State:
        """The state once the server is idle and has been the same for a second."""
        deadline, seen = time.monotonic() + LAST_RESORT, self.state()
        while True:
            time.sleep(1.0)
            before, seen = seen, self.state()
            if seen == before and seen.idle:
                return seen
            assert time.monotonic() < deadline, f"never idle: {seen}"

    def settle(self, baseline: State) -> float:
        """Wait until the state is `baseline` again; the time.monotonic() at which it was."""
        deadline = time.monotonic() + LAST_RESORT
        while (seen := self.state()) != baseline:
            assert time.monotonic() < deadline, f"it stays at {seen}; it was: {baseline}"
            time.sleep(0.02)
        return time.monotonic()

    def canaries(self) -> list[str]:
        """Greedy answers that must never change."""
        texts = []
        for prompt in ("What is the capital of France?", "Count from 1 to 10.", "Tell me a short story about a cat."):
            body = {"model": "demo", "messages": [{"role": "user", "content": prompt}], "temperature": 0}
            answer = httpx2.post(f"{self.url}/v1/chat/completions", json=body | {"max_tokens": 60}, timeout=LAST_RESORT)
            texts.append(answer.json()["choices"][0]["message"]["content"])
        return texts

    def stats(self) -> dict[str, float]:
        """Values of /metrics by name."""
        return values(httpx2.get(f"{self.url}/metrics", timeout=LAST_RESORT).text)

    def port_is_free(self) -> bool:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", self.port))
            except OSError:
                return False
        return True
