"""`logging.format: json`: every line of stderr is an object with named fields, from the first to the last."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest

from tests.conftest import ONE_ROW
from tests.waiting import LAST_RESORT, wait_until

JSON = ("--logging.format", "json")
FEWEST = [word for key, value in ONE_ROW.items() for word in (f"--{key.replace('_', '-')}", str(value))]


class Log:
    """The stderr of a process, as the objects of its lines. Raises ValueError for a line that is none."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def records(self, event: str | None = None) -> list[dict[str, Any]]:
        lines = self._path.read_text(encoding="utf-8").splitlines(keepends=True)
        found = [json.loads(line) for line in lines if line.endswith("\n")]
        assert all({"time", "level", "logger", "pid", "message"} <= set(record) for record in found)
        return [record for record in found if event is None or record.get("event") == event]

    def wait(self, event: str) -> dict[str, Any]:
        wait_until(lambda: bool(self.records(event) or self.records("end")), event)
        found = self.records(event)
        assert found, self.records("end")
        return found[-1]


def test_a_server_from_its_start_to_its_end(tmp_path: Path, compile_cache: str) -> None:
    path = tmp_path / "stderr.txt"
    keys = json.dumps([{"name": "anna", "value": "secret-of-anna"}])
    environ = {"JAXSERVE_RUNTIME__COMPILE_CACHE": compile_cache, "JAXSERVE_STORE__PATH": str(tmp_path / "store")}
    words = (*JSON, "--port", "0", "--logging.requests", "--enforce-eager", "--server.workers", "2", *FEWEST)
    command = [sys.executable, "-m", "jaxserve", "launch", "--server.keys", keys, *words]
    with (
        path.open("wb") as file,
        subprocess.Popen(command, env=os.environ | environ, stdout=subprocess.PIPE, stderr=file) as process,
    ):
        log = Log(path)
        try:
            ready = log.wait("ready")
            assert ONE_ROW["max_num_seqs"] == ready["max_num_seqs"] and ready["models"] == ["demo"]
            assert [record["phase"] for record in log.records("phase")][-1] == "programs"
            assert "--enforce-eager" in log.records()[0]["message"]
            url, headers = ready["url"], {"Authorization": "Bearer secret-of-anna", "x-request-id": "of-a-test"}
            body = {"model": "demo", "prompt": "one two three", "max_tokens": 5, "temperature": 0, "ignore_eos": True}
            answer = httpx2.post(f"{url}/v1/completions", json=body, headers=headers, timeout=LAST_RESORT)
            httpx2.post(f"{url}/v1/completions", json=body, timeout=LAST_RESORT)
            wait_until(lambda: len(log.records("request")) == 2, "both are logged")  # after the answer is sent
            served, refused = sorted(log.records("request"), key=lambda record: record["status"])
            assert (served["method"], served["path"], served["status"]) == ("POST", "/v1/completions", 200)
            assert (served["request_id"], served["key"]) == ("of-a-test", "anna")
            usage = answer.json()["usage"]
            assert served["prompt_tokens"] == usage["prompt_tokens"] and served["output_tokens"] == 5
            assert served["cached_tokens"] == 0 and 0 < served["time_to_first_token"] < served["seconds"]
            assert refused["status"] == 401 and refused["key"] is None and "prompt_tokens" not in refused

            engine = next(
                child for child in psutil.Process(process.pid).children() if "engine" in " ".join(child.cmdline())
            )
            engine.send_signal(signal.SIGUSR1)  # its stacks, which no logger writes
            wait_until(lambda: any("Thread 0x" in each["message"] for each in log.records()), "stacks")
            engine.kill()
            assert log.wait("engine_died")["level"] == "error"
            process.send_signal(signal.SIGTERM)
            assert process.wait(LAST_RESORT) == 0
            assert process.stdout is not None and process.stdout.read() == b""
        finally:
            process.kill()
    assert log.records("drain")[0]["signal"] == "SIGTERM"
    assert path.read_bytes().endswith(b"}\n")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((*JSON, "--model", "/no/such/model"), "/no/such/model"),
        (("--scheduler.max-num-sequences", "1", "--logging.format=json"), "--scheduler.max-num-seqs?"),
        ((*JSON, "--port", "TAKEN"), "cannot listen"),
        (("--config", "CONFIG"), "max_num_sequences"),
    ],
)
def test_a_start_that_fails(tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    config = tmp_path / "wrong.yaml"
    config.write_text("logging: {format: json}\nscheduler: {max_num_sequences: 1}\n")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        values = {"TAKEN": str(taken.getsockname()[1]), "CONFIG": str(config)}
        command = [sys.executable, "-m", "jaxserve", "launch", *(values.get(word, word) for word in words)]
        environ = os.environ | {"JAXSERVE_STORE__PATH": str(tmp_path / "store")}
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=LAST_RESORT)
    assert done.returncode == 2 and done.stdout == ""
    last = [json.loads(line) for line in done.stderr.splitlines()][-1]
    assert (last["event"], last["level"]) == ("end", "critical") and last["error"] in ("ConfigError", "ModelLoadError")
    assert said in last["message"] and "fix" in last


def test_what_no_logger_writes_is_wrapped() -> None:
    """Prints, warnings, tracebacks of threads, another process, and bytes that are no UTF-8."""
    script = """
import os, subprocess, sys, threading, warnings
from jaxserve.config import LoggingSection
from jaxserve.log import configure_logging
configure_logging(LoggingSection(format="json"), is_command=True)
configure_logging(LoggingSection(format="json", level="debug"), is_command=True)
print("a print", file=sys.stderr)
warnings.warn("a warning")
thread = threading.Thread(target=lambda: 1 / 0, name="of-a-test")
thread.start()
thread.join()
subprocess.run([sys.executable, "-c", "import os; os.write(2, b'\\\\xff of a child, without an end')"])
raise LookupError("at the end")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=LAST_RESORT)
    found = [json.loads(line) for line in done.stderr.splitlines()]
    assert done.returncode == 1
    assert any("a warning" in record["message"] for record in found if record["logger"] == "py.warnings")
    assert {"a print", "\\xff of a child, without an end"} <= {record["message"] for record in found}
    errors = [record for record in found if "exception" in record]
    assert "ZeroDivisionError" in errors[0]["exception"] and "LookupError: at the end" in errors[1]["exception"]
