"""One engine over two processes on this machine with simulated devices, as an operator starts it."""

from __future__ import annotations

import functools
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx2
import psutil

from tests.faults.launched import Launched
from tests.waiting import LAST_RESORT, wait_until

# few and small programs: both processes compile them for devices that share the cores
TINY: dict[str, Any] = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "max_model_len": 256,
    "cache.num_pages": 64,
    "scheduler.policy": "priority",
}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def devices(count: int) -> dict[str, str]:
    """The environment of a process with so many simulated devices."""
    return {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--xla_force_host_platform_device_count={count}"}


class FollowerCommand:
    """`jaxserve launch --node-rank 1` in a process of its own. words: its flags; environment: of its devices"""

    def __init__(self, compile_cache: str, directory: Path, words: list[str], environment: dict[str, str]) -> None:
        self.log_file = directory / "follower.txt"
        self.port = free_port()
        cache = {"JAXSERVE_RUNTIME__COMPILE_CACHE": compile_cache}
        command = [sys.executable, "-m", "jaxserve", "launch", "--port", str(self.port), "--node-rank", "1", *words]
        with self.log_file.open("w") as log:
            self.process = subprocess.Popen(
                command, env=os.environ | environment | cache, stdout=log, stderr=log, start_new_session=True
            )

    @property
    def engine(self) -> psutil.Process | None:
        """Its engine process."""
        children = psutil.Process(self.process.pid).children() if self.process.poll() is None else []
        return next((child for child in children if "jaxserve.engine.hosts.follower_process" in child.cmdline()), None)

    def health(self) -> tuple[int, dict[str, Any]]:
        try:
            answer = httpx2.get(f"http://127.0.0.1:{self.port}/health", timeout=LAST_RESORT)
        except httpx2.ConnectError:
            return 0, {}
        return answer.status_code, json.loads(answer.text)

    def close(self) -> None:
        for process in filter(None, (self.engine, psutil.Process(self.process.pid))):
            process.kill()
        self.process.wait()


class Group:
    """leader: its HTTP server. follower: the other host's command. num_devices: of each host"""

    def __init__(self, compile_cache: str, directory: Path, num_devices: int, **keys: Any) -> None:
        self.port = free_port()
        self.directory = directory
        shared = {"mesh.hosts": 2, "mesh.leader_port": self.port, "mesh.tensor": 2 * num_devices}
        words = [f"--{key.replace('_', '-')}={value}" for key, value in shared.items()]
        leader = functools.partial(Launched, compile_cache, directory, devices(num_devices), **(TINY | keys | shared))
        self._new_leader: Callable[[], Launched] = leader
        self.leader = leader()
        self.follower = FollowerCommand(compile_cache, directory, words, devices(num_devices))

    def __enter__(self) -> Self:
        try:
            self.leader.__enter__()
        except BaseException:
            self.follower.close()
            raise
        wait_until(lambda: self.follower.health()[0] == 200, "the follower serves")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leader.__exit__(kind, error, trace)
        self.follower.close()

    def restart_leader(self) -> None:
        """Kill the leader's command, as a machine does that loses its power, and start it again."""
        self.leader.send(signal.SIGKILL)
        self.leader.__exit__(None, None, None)
        self.leader = self._new_leader()
        self.leader.__enter__()

    @property
    def leader_engine(self) -> psutil.Process:
        return next(child for child in self.leader.children() if "jaxserve.engine.process" in child.cmdline())
