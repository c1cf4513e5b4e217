"""The server as its operator ends it, or as it is ended: SIGTERM, a second one, a limit, SIGKILL."""

import json
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import psutil

from jaxserve.cli.http_server import REPEATED
from tests.faults.helpers import is_engine
from tests.faults.launched import Launched
from tests.waiting import LAST_RESORT, wait_until

LONG: dict[str, Any] = {"model": "demo", "prompt": "a", "max_tokens": 400, "ignore_eos": True, "stream": True}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


class Stream(threading.Thread):
    """A client that reads a stream to its end."""

    def __init__(self, server: Launched, body: dict[str, Any]) -> None:
        super().__init__()
        self.events: list[str] = []
        self.error: Exception | None = None
        self._server, self._body = server, body
        self.start()
        while not self.events and self.error is None:
            time.sleep(0.005)

    def run(self) -> None:
        try:
            with httpx2.stream(
                "POST", f"{self._server.url}/v1/completions", json=self._body, timeout=LAST_RESORT
            ) as response:
                self.events += [line.removeprefix("data: ") for line in self._lines(response)]
        except httpx2.HTTPError as error:
            self.error = error

    def _lines(self, response: httpx2.Response) -> list[str]:
        lines = []
        for line in response.iter_lines():
            if line:
                lines.append(line)
                self.events.append("first") if not self.events else None
        return lines

    @property
    def finish_reasons(self) -> list[str]:
        chunks = [json.loads(event) for event in self.events[1:-1]]
        return [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]]


def post(server: Launched, **fields: Any) -> httpx2.Response:
    body = {"model": "demo", "prompt": "a"} | fields
    return httpx2.post(f"{server.url}/v1/completions", json=body, timeout=LAST_RESORT)


def health(server: Launched) -> int:
    return httpx2.get(f"{server.url}/health", timeout=LAST_RESORT).status_code


def everyone(server: Launched) -> list[psutil.Process]:
    """All processes of a server, the one that compiles grammars among them."""
    body = {"model": "demo", "prompt": "a", "max_tokens": 1, "response_format": {"type": "json_object"}}
    assert httpx2.post(f"{server.url}/v1/completions", json=body, timeout=LAST_RESORT).status_code == 200
    children = server.children()
    assert len(children) >= 2
    return [*children, server.api]


def test_sigterm_drains(compile_cache: str, tmp_path: Path) -> None:
    with Launched(compile_cache, tmp_path) as server:
        processes = everyone(server)
        streams = [Stream(server, LONG) for _ in range(3)]
        [engine] = [process for process in processes if is_engine(process)]
        engine.suspend()  # neither a stream nor the beams end before the server was seen to drain
        tasks = server.state().tasks
        beams = ThreadPoolExecutor().submit(post, server, n=2, use_beam_search=True, max_tokens=60, ignore_eos=True)
        try:
            wait_until(lambda: server.state().tasks > tasks, "a request that needs the engine again and again")
            server.send(signal.SIGTERM)
            wait_until(lambda: health(server) == 503, "the server drains")
            refused = post(server)
        finally:
            engine.resume()
        assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
        assert "draining" in refused.text
        for stream in streams:
            stream.join()
            assert stream.error is None and stream.events[-1] == "[DONE]" and stream.finish_reasons == ["length"]
        assert beams.result().status_code == 200
        assert server.process.wait(LAST_RESORT) == 0
        assert psutil.wait_procs(processes, timeout=LAST_RESORT)[1] == [] and server.port_is_free()


def test_ctrl_c_in_a_terminal(compile_cache: str, tmp_path: Path) -> None:
    """It drains, says so, and neither it nor a child of it prints a traceback."""
    with Launched(compile_cache, tmp_path) as server:
        processes = everyone(server)
        stream = Stream(server, LONG)
        server.send_as_a_terminal(signal.SIGINT)
        stream.join()
        assert stream.error is None and stream.finish_reasons == ["length"]
        assert server.process.wait(10) == 0
        assert psutil.wait_procs(processes, timeout=1)[1] == []
        log = server.log()
        assert "jaxserve: SIGINT: draining: 1 running, at most 30 s; a second signal ends it at once\n" in log
        assert "Traceback" not in log and "the grammar compiler ended" not in log


def test_a_drain_has_a_limit(compile_cache: str, tmp_path: Path) -> None:
    """Who is not done by then is told so: nothing hangs and nothing ends without a word. On a busy machine some are
    done before the signal comes.
    """
    with Launched(compile_cache, tmp_path, **{"server.drain_timeout": 0.05}) as server:
        streams = [Stream(server, LONG | {"n": 8}) for _ in range(6)]
        server.send(signal.SIGTERM)
        errors = []
        for stream in streams:
            stream.join(LAST_RESORT)
            assert stream.error is None and stream.events[-1] == "[DONE]"
            error = json.loads(stream.events[-2]).get("error")
            assert error is not None or stream.finish_reasons == ["length"] * 8
            errors += [] if error is None else [error["code"]]
        assert errors and set(errors) == {"engine_dead"}
        assert server.process.wait(LAST_RESORT) == 0


def test_a_second_signal_ends_at_once(compile_cache: str, tmp_path: Path) -> None:
    with Launched(compile_cache, tmp_path) as server:
        processes = everyone(server)
        Stream(server, LONG | {"n": 32})
        server.send(signal.SIGTERM)
        wait_until(lambda: health(server) == 503, "the first signal is seen")
        assert server.process.poll() is None
        time.sleep(REPEATED)
        server.send(signal.SIGTERM)
        assert server.process.wait(LAST_RESORT) == 130  # 0 where the stream was waited for
        assert psutil.wait_procs(processes, timeout=LAST_RESORT)[1] == [] and server.port_is_free()


def test_a_killed_server_leaves_nothing_behind(compile_cache: str, tmp_path: Path) -> None:
    """Not even an engine that cannot run when its parent dies: it goes as soon as it can."""
    with Launched(compile_cache, tmp_path) as server:
        processes = everyone(server)
        Stream(server, LONG | {"n": 8})
        (engine,) = [p for p in processes if "jaxserve.engine.process" in " ".join(p.cmdline())]
        others = [process for process in processes if process != engine]
        engine.suspend()
        server.send(signal.SIGKILL)
        assert psutil.wait_procs(others, timeout=LAST_RESORT)[1] == []
        assert server.port_is_free()
        engine.resume()
        assert psutil.wait_procs([engine], timeout=LAST_RESORT)[1] == []
