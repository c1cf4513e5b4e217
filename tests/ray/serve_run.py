"""`serve run` of configs/ray.yaml in processes of its own: another port and temporary directory, some keys changed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import yaml

from tests.faults.client import Answer, post

ROOT = Path(__file__).parents[2]
READY_SECONDS = 400.0
# Ray kills a proxy that is not there after 5 s three times, which it is not on a busy machine
SLOW = {"RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "120", "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "120"}
SLOW["RAY_worker_niceness"] = "0"  # by default workers get the least of a busy machine's time, and start in minutes
ENGINES = "ray::ServeReplica:jaxserve:JaxserveEngine"
INGRESS = "ray::ServeReplica:jaxserve:JaxserveIngress"
CONTROLLER = "ray::ServeController"
ENGINE_PROCESS = "jaxserve.engine.process"


class ServeRun:
    """A running Serve instance. Its processes are the descendants of `process`."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, directory: Path) -> None:
        self.directory = directory
        self._popen = process
        self._process = psutil.Process(process.pid)
        self.port = port

    def processes(self, name: str) -> list[psutil.Process]:
        """Return the living processes with this text in their command line, oldest first."""
        found = []
        for each in self._process.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if name in " ".join(each.cmdline()) and each.status() != psutil.STATUS_ZOMBIE:
                    found.append(each)
        return sorted(found, key=lambda each: each.create_time())

    async def chat(self, text: str, **fields: Any) -> Answer:
        body = {"model": "demo", "temperature": 0, "messages": [{"role": "user", "content": text}], **fields}
        return await post(self.port, "/v1/chat/completions", body)

    async def replicas_are(self, count: int, seconds: float) -> float:
        """Wait until so many engines run; return after how many seconds. Raises TimeoutError."""
        began = time.monotonic()
        async with asyncio.timeout(seconds):
            while len(self.processes(ENGINE_PROCESS)) != count:
                await asyncio.sleep(0.5)
        return time.monotonic() - began

    def wait_ready(self, log: Path) -> None:
        """Wait until an engine answers. Raises TimeoutError with the end of the log."""
        deadline = time.monotonic() + READY_SECONDS
        while time.monotonic() < deadline and self._popen.poll() is None:
            with contextlib.suppress(OSError, TimeoutError):
                if asyncio.run(self._is_healthy()):
                    return
            time.sleep(1)
        raise TimeoutError(log.read_text(errors="replace")[-3000:])

    async def _is_healthy(self) -> bool:
        async with asyncio.timeout(30):
            answer = await post(self.port, "/v1/completions", {"model": "demo", "prompt": "Hi", "max_tokens": 1})
            return answer.status == 200


@contextlib.contextmanager
def serve_run(port: int, model_keys: dict[str, Any] | None = None, **deployment: Any) -> Iterator[ServeRun]:
    """Start configs/ray.yaml with other keys of the model and of deployment_config; end every process at the end."""
    said = yaml.safe_load((ROOT / "configs" / "ray.yaml").read_text(encoding="utf-8"))
    said["http_options"]["port"] = port
    model = said["applications"][0]["args"]["llm_configs"][0]
    model |= model_keys or {}
    model["deployment_config"] = {"ray_actor_options": {"num_cpus": 0.5}, **deployment}
    directory = Path(tempfile.mkdtemp(prefix="r", dir="/tmp"))  # a socket's path has at most 107 characters
    config, log = directory / "serve.yaml", directory / "serve.log"
    config.write_text(yaml.safe_dump(said))
    own = {"RAY_TMPDIR": str(directory), "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0"} | SLOW
    command = [sys.executable, "-c", "from ray.serve.scripts import cli; cli()", "run", str(config)]
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, **own}, stdout=out, stderr=out, start_new_session=True
        )
    try:
        run = ServeRun(process, port, directory)
        run.wait_ready(log)
        yield run
    finally:
        _end(process)
        shutil.rmtree(directory, ignore_errors=True)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Let Serve shut down, then kill what is left of the processes that it started."""
    known: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):  # it could not start
        known = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(60)
    process.kill()
    process.wait()
    for each in known:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()  # psutil checks that the id is still that process's
    psutil.wait_procs(known, timeout=10)
