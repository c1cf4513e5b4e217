"""`jaxserve chat` at a real server: in a pipe, and in a real terminal with Ctrl-C, commands and hostile text."""

import http.server
import io
import json
import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from jaxserve import launch_server
from jaxserve.cli.chat import _Page, split_blocks
from jaxserve.library.serving import RunningServer
from tests.conftest import SMALL
from tests.waiting import LAST_RESORT

# Makes stdin the controlling terminal, whose Ctrl-C is a signal. Not a preexec_fn: that forks a process that has jax.
OWN_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""
QUESTION = "What is the capital of France?"


@pytest.fixture(scope="module")
def server(compile_cache: str) -> Iterator[RunningServer]:
    with launch_server(compile_cache=compile_cache, api_key="secret", **SMALL) as running:
        yield running


def command(url: str, *words: str) -> list[str]:
    return [sys.executable, "-m", "jaxserve", "chat", "--url", url, *words]


def piped(url: str, text: str, *words: str) -> subprocess.CompletedProcess[str]:
    environ = {key: value for key, value in os.environ.items() if key != "OPENAI_API_KEY"}
    return subprocess.run(
        command(url, *words), input=text, env=environ, capture_output=True, text=True, timeout=LAST_RESORT, check=False
    )


class Terminal:
    """The terminal of a running chat."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor, self.seen = descriptor, ""

    def type(self, text: str) -> None:
        os.write(self.descriptor, text.encode())

    def wait(self, text: str) -> str:
        """What was shown up to `text`."""
        end = time.monotonic() + LAST_RESORT
        while text not in self.seen:
            assert time.monotonic() < end, self.seen
            if select.select([self.descriptor], [], [], 1.0)[0]:
                self.seen += os.read(self.descriptor, 4096).decode(errors="replace")
        before, _, self.seen = self.seen.partition(text)
        return before

    def leave(self, process: subprocess.Popen[bytes]) -> int:
        """Press Ctrl-D until the program ends, because the system drops one that is pressed between two prompts."""
        end = time.monotonic() + LAST_RESORT
        while process.poll() is None:
            assert time.monotonic() < end, self.seen
            self.type("\x04")
            if select.select([self.descriptor], [], [], 0.5)[0]:
                with suppress(OSError):  # it has closed the terminal
                    self.seen += os.read(self.descriptor, 4096).decode(errors="replace")
        return process.returncode


@contextmanager
def terminal(url: str, home: Path, *words: str) -> Iterator[tuple[Terminal, subprocess.Popen[bytes]]]:
    try:
        own, its = pty.openpty()
    except OSError as error:  # a container without devpts
        pytest.skip(f"no terminal can be opened here: {error}")
    environ = os.environ | {"HOME": str(home), "TERM": "xterm", "JAXSERVE_SERVER__API_KEY": "secret", "COLUMNS": "80"}
    process = subprocess.Popen(
        [sys.executable, "-c", OWN_TERMINAL, *command(url, *words)], stdin=its, stdout=its, stderr=its, env=environ,
        start_new_session=True,
    )  # fmt: skip
    os.close(its)
    try:
        yield Terminal(own), process
    finally:
        process.kill()
        process.wait()
        os.close(own)


def test_a_pipe_gets_the_answer_alone(server: RunningServer) -> None:
    done = piped(server.url, QUESTION, "--api-key", "secret")
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout and "\x1b" not in done.stdout
    assert done.stdout.endswith("\n") and not done.stdout.endswith("\n\n")


def test_without_an_address_a_server_is_started_and_ended(compile_cache: str, tmp_path: Path) -> None:
    environ = {"JAXSERVE_RUNTIME__COMPILE_CACHE": compile_cache, "HF_HUB_OFFLINE": "1"}
    few = ("--store.path", str(tmp_path), "--max-num-seqs", "64", "--max-num-batched-tokens", "256")
    done = subprocess.run(
        [sys.executable, "-m", "jaxserve", "chat", *few],
        input=QUESTION,
        env=os.environ | environ,
        capture_output=True,
        text=True,
        timeout=LAST_RESORT,
        check=False,
    )
    assert done.returncode == 0 and "Paris" in done.stdout, done.stderr
    left = [each for each in psutil.process_iter(["cmdline"]) if str(tmp_path) in (each.info["cmdline"] or ())]
    assert left == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--api-key", "wrong"), "--api-key"),
        (("--api-key", "secret", "--max-num-seqs", "4"), "unknown argument --max-num-seqs"),
        (("nothing", "--api-key", "secret"), "nothing"),
        (("demo", "other", "--api-key", "secret"), "unknown argument other"),
    ],
)
def test_what_is_refused_is_one_line(server: RunningServer, words: tuple[str, ...], said: str) -> None:
    done = piped(server.url, QUESTION, *words)
    assert done.returncode == 2 and done.stdout == ""
    assert len(done.stderr.splitlines()) == 1 and said in done.stderr, done.stderr


class Cut(http.server.BaseHTTPRequestHandler):
    """A server whose answers are at the end of their context after two words."""

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        self._reply(json.dumps({"data": [{"id": "m"}]}))

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        deltas = [({"content": "two words"}, None), ({}, "length")]
        chunks = [json.dumps({"choices": [{"delta": delta, "finish_reason": end}]}) for delta, end in deltas]
        self._reply("".join(f"data: {chunk}\n\n" for chunk in [*chunks, "[DONE]"]))

    def _reply(self, text: str) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())


def test_an_answer_that_is_cut_is_not_taken_for_whole() -> None:
    with http.server.HTTPServer(("127.0.0.1", 0), Cut) as cut, ThreadPoolExecutor(1) as pool:
        pool.submit(cut.serve_forever, 0.01)
        done = piped(f"http://127.0.0.1:{cut.server_address[1]}", QUESTION)
        cut.shutdown()
    assert (done.returncode, done.stdout) == (1, "two words\n")
    assert done.stderr == "jaxserve: the answer is not whole, it ended: length\n"


@pytest.mark.parametrize("address", ["http://[::1", "ftp://127.0.0.1", "127.0.0.1:8000", ""])
def test_an_address_that_is_none_is_one_line(address: str) -> None:
    done = piped(address, QUESTION)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr


def test_a_question_that_is_no_text_is_one_line(server: RunningServer) -> None:
    environ = {key: value for key, value in os.environ.items() if key != "OPENAI_API_KEY"}
    line = command(server.url, "--api-key", "secret")
    done = subprocess.run(line, input=b"\xff\xfe", env=environ, capture_output=True, timeout=LAST_RESORT, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (2, b"", b"jaxserve: the question is not UTF-8\n")


def test_a_chat_that_is_killed_leaves_no_server(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "jaxserve", "chat", "--store.path", str(tmp_path)],
        stdin=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as chat:
        started = _children(tmp_path, lambda found: len(found) > 0)
        chat.kill()
    assert started and not _children(tmp_path, lambda found: not found)


def _children(tmp_path: Path, fits: Callable[[list[int]], bool]) -> list[int]:
    """Return the processes of the server that chat started, once there are as many as wanted."""
    end = time.monotonic() + LAST_RESORT
    while True:
        processes = [each for each in psutil.process_iter(["cmdline"]) if str(tmp_path) in (each.info["cmdline"] or ())]
        found = [each.pid for each in processes if "chat" not in each.info["cmdline"]]
        if fits(found) or time.monotonic() > end:
            return found
        time.sleep(0.1)


def test_no_server_and_no_question(server: RunningServer) -> None:
    assert "no server answers at http://127.0.0.1:9" in piped("http://127.0.0.1:9/v1", QUESTION).stderr
    assert "there is no question" in piped(server.url, " \n", "--api-key", "secret").stderr


def test_without_a_question_no_server_is_started() -> None:
    """Its model is not there, which would be the reason if one were started."""
    words = [sys.executable, "-m", "jaxserve", "chat", "/nonexistent/model"]
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "jaxserve: there is no question -> echo question | jaxserve chat\n"


def test_a_session_in_a_terminal(server: RunningServer, tmp_path: Path) -> None:
    saved = tmp_path / "talk.json"
    with terminal(server.url, tmp_path) as (screen, process):
        screen.wait(">>> ")
        screen.type("/set temperature 0\n")
        screen.wait(">>> ")
        screen.type(f"{QUESTION}\n")
        screen.wait("Paris")
        screen.wait(">>> ")
        screen.type('"""What is\n2 + 3?"""\n')
        screen.wait(">>> ")
        screen.type("/image a.png\n")
        screen.wait("cannot be read")
        screen.type("/set top_p NaN\n/save ~nobody-of-this-name/x\n")
        screen.wait("there is no such user")
        os.write(screen.descriptor, b"a \xff b\n")
        screen.wait("not UTF-8")
        screen.type("/set top_p\n/nope\n")
        screen.wait("no command /nope")
        for wrong, why in (
            ("temperature hot", "valid number"),
            ("temperature 9", "less than or equal to 2"),
            ("max_tokens 0", "greater than or equal to 1"),
            ("temprature 0.5", "did you mean temperature"),
        ):
            screen.type(f"/set {wrong}\n")
            screen.wait(why)
            screen.wait(">>> ")
        screen.type("/set temperature 0\n/system Be brief.\n")
        screen.type(f"/save {saved}\n/clear\n/load {saved}\n")
        screen.type("/system\n")
        screen.wait("/system\r\n")
        screen.wait("Be brief.")
        screen.wait(">>> ")
        assert screen.leave(process) == 0
    talk = json.loads(saved.read_text())
    assert [message["content"] for message in talk["messages"] if message["role"] == "user"] == [
        QUESTION,
        "What is\n2 + 3?",
    ]
    assert talk["settings"] == {"temperature": 0} and saved.stat().st_mode & 0o077 == 0
    assert (tmp_path / ".local/share/jaxserve/chat_history").stat().st_mode & 0o077 == 0


def test_control_c_stops_the_answer_and_not_the_program(server: RunningServer, tmp_path: Path) -> None:
    with terminal(server.url, tmp_path) as (screen, process):
        screen.wait(">>> ")
        screen.type("/set ignore_eos true\n/set max_tokens 1900\n/set min_tokens 1900\n")
        for _ in range(3):
            screen.wait(">>> ")
        screen.type("Once upon a time there was a king.\n")
        screen.wait("king.")
        time.sleep(0.5)  # into the answer; at any other moment Ctrl-C does as well
        screen.type("\x03")
        screen.wait(">>> ")
        screen.type("/set\n")
        screen.wait('"max_tokens": 1900')
        assert process.poll() is None


def test_hostile_text_does_not_reach_the_terminal() -> None:
    shown = io.StringIO()
    page = _Page(Console(file=shown, force_terminal=True, width=60), markdown=True)
    page.add("\x1b]0;owned\x07 a \x9b2J [bold]b[/bold] [link](javascript:x) \r\x08\n\n")
    page.add("x" * 100_000)
    page.close()
    assert "\x1b]" not in shown.getvalue() and "\x9b" not in shown.getvalue() and "\x07" not in shown.getvalue()
    assert "[bold]b[/bold]" in shown.getvalue() and "javascript:x" in shown.getvalue()


def test_a_fence_is_one_block() -> None:
    assert split_blocks("a\n\nb") == ("a\n\n", "b")
    assert split_blocks("```\na\n\nb") == ("", "```\na\n\nb")
    assert split_blocks("```\na\n\n```\n\nc") == ("```\na\n\n```\n\n", "c")
