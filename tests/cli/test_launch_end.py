"""How a server ends: what was not asked for is an exception that becomes one line and an exit code, never 0."""

import asyncio
import datetime
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx2
import pytest
import uvicorn
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID
from fastapi import FastAPI

from jaxserve.cli import http_server, main
from jaxserve.cli.http_server import REPEATED, Server, bind, check_certificates, on_signals
from jaxserve.cli.launch import Launch
from jaxserve.client import supervisor
from jaxserve.config import Config
from jaxserve.errors import ConfigError, UnexpectedEndError
from jaxserve.store import Store
from jaxserve.store.records import ResponseStatus
from jaxserve.types.sampling import SamplingParams
from jaxserve.types.step import FinishReason
from tests.client.test_async_engine import HandLink

Work = Callable[[Launch, HandLink], Awaitable[None]]


def serve(tmp_path: Path, work: Work | None = None, **server: Any) -> int:
    """The exit code of a server whose engine is in the test's hand. Raises what ends it. work: once it is ready.

    server: keys of this section
    """

    async def run(listener: socket.socket) -> int:
        link = HandLink()
        launch = Launch(config, listener, quiet=True, make_link=lambda _: link)
        task = asyncio.create_task(launch.serve())
        if work is not None:
            await launch.engine.wait_ready()
            await work(launch, link)
        return await asyncio.wait_for(task, 60)

    config = Config().replace(store={"path": str(tmp_path)}, server={"port": 0, **server})
    with bind(config.server) as listener:
        return asyncio.run(run(listener))


async def read(launch: Launch) -> list[int]:
    """The tokens of a request."""
    return [token async for output in launch.engine.generate([1], SamplingParams()) for token in output.token_ids]


async def kill_for_good(launch: Launch, link: HandLink) -> None:
    while launch.engine.status.phase != "dead":
        link.die()
        await launch.engine.next_status()


def test_an_end_that_was_asked_for(tmp_path: Path) -> None:
    async def work(launch: Launch, link: HandLink) -> None:
        launch.stop()

    assert serve(tmp_path, work) == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("running", [False, True])
def test_signals_drain_and_say_so(
    number: signal.Signals,
    running: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SIGHUP of a terminal that has closed does, too."""
    terminal = iter([True])
    monkeypatch.setattr(http_server, "_has_terminal", lambda: next(terminal, False))

    async def work(launch: Launch, link: HandLink) -> None:
        launch.handle_signals()
        answers = [asyncio.create_task(read(launch))] if running else []
        while len(link.requests) < len(answers):
            await asyncio.sleep(0)
        os.kill(os.getpid(), number)
        while launch.engine.status.phase != "draining":
            await launch.engine.next_status()
        for request in link.requests:
            link.give(request.request_id, 5, FinishReason.STOP)
        assert await asyncio.gather(*answers) == [[5]] * running

    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the test may run under nohup
    try:
        assert serve(tmp_path, work) == 0
    finally:
        signal.signal(signal.SIGHUP, before)
    what = "draining: 1 running, at most 30 s" if running else "stopping"
    assert f"jaxserve: {number.name}: {what}; a second signal ends it at once\n" in capsys.readouterr().err


def test_one_signal_that_comes_twice_is_one() -> None:
    """Sent to the process and to its group, as some supervisors do."""
    seen: list[signal.Signals] = []

    async def work() -> None:
        on_signals(seen.append)
        for pause in (0.01, 0.01, 1.2 * REPEATED):
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(pause)
        assert seen == [signal.SIGTERM]
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(0.01)

    asyncio.run(work())
    assert seen == [signal.SIGTERM, signal.SIGINT]


def test_sigterm_before_the_server_handles_signals() -> None:
    """A handler is there: the first process of a container gets no signal without one, so a stop waited for a kill."""
    script = """
import os, signal, sys
from jaxserve.cli import main, start

def imported(module):
    if module == sys.argv[1]:
        os.kill(os.getpid(), signal.SIGTERM)
    return start

start.start_engine = lambda config: None
start.imported = sys.modules["jaxserve.cli.main"].imported = imported
main(["launch", "--store.path", "null"])
"""
    for module in ("jaxserve.cli.start", "jaxserve.cli.launch"):
        command = [sys.executable, "-c", script, module]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0 and done.stderr.endswith("jaxserve: SIGTERM: stopping\n"), done


KEYED: dict[str, Any] = {"keys": [{"name": "a", "value": "first", "tokens_per_minute": 600}], "port": 0}


def test_sighup_reads_keys_and_limits_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What a key has used stays. What needs a restart is named, and a configuration that is wrong changes nothing."""
    caplog.set_level(logging.INFO)
    path = {"store": {"path": str(tmp_path)}}
    other = {**KEYED, "keys": [KEYED["keys"][0] | {"tokens_per_minute": 1200}, {"name": "b", "value": "second"}]}
    readings: list[Config | ConfigError] = [
        Config().replace(server={**other, "request_timeout": 5, "max_body_bytes": 2048}, **path),
        ConfigError("server.keys: a bad key"),
        Config().replace(server={"port": 0}, **path),
    ]

    def reread() -> Config:
        found = readings.pop(0)
        if isinstance(found, ConfigError):
            raise found
        return found

    async def work(launch: Launch, link: HandLink) -> None:
        async with httpx2.AsyncClient(base_url=launch.url) as client:

            async def status(key: str) -> int:
                return (await client.get("/v1/models", headers={"authorization": f"Bearer {key}"})).status_code

            assert (await status("first"), await status("second")) == (200, 401)
            usage = launch._app.state.server.key_usages.of("a")
            usage.begin(1, 7)
            launch.handle_signals(reread)
            for left, line in ((2, "changed: server.keys"), (1, "a bad key"), (0, "whether clients need a key cannot")):
                os.kill(os.getpid(), signal.SIGHUP)
                while len(readings) > left:
                    await asyncio.sleep(0.01)
                await asyncio.sleep(0.01)
                assert any(line in each.message for each in caplog.records), caplog.text
                assert (await status("first"), await status("second")) == (200, 200)
            headers = usage.headers()
            assert headers["x-ratelimit-limit-tokens"] == "1200" and usage.prompt_tokens == 7
            assert launch._app.state.server.config.server.request_timeout == 5
        launch.stop()

    assert serve(tmp_path, work, **KEYED) == 0
    taken, wrong, refused = [each for each in caplog.records if "SIGHUP" in each.message]
    assert taken.message == (
        "SIGHUP: changed: server.keys, server.request_timeout; these need a restart: server.max_body_bytes"
    )
    assert wrong.levelno == refused.levelno == logging.ERROR


def test_an_idle_connection_at_the_end_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    """A client that keeps a TLS connection lets uvicorn wait for it and cancel nothing."""

    class Connection:
        def shutdown(self) -> None: ...

    async def end(*tasks: asyncio.Task[None]) -> None:
        server = Server(uvicorn.Config(FastAPI(), timeout_graceful_shutdown=0, lifespan="off", log_config=None))
        server.config.load()
        server.lifespan = server.config.lifespan_class(server.config)
        server.servers, server.server_state.connections = [], {Connection()}  # type: ignore[arg-type]
        server.server_state.tasks = set(tasks)
        await server.shutdown()

    async def both() -> None:
        await end()
        assert "Cancel" not in caplog.text
        await end(asyncio.create_task(asyncio.sleep(60)))

    asyncio.run(both())
    assert "Cancel 1 running task(s)" in caplog.text


def test_a_background_response_outlives_a_drain_that_takes_too_long(tmp_path: Path) -> None:
    """As it outlives a kill: no client has read an event of it, so the next start runs it again."""
    made: list[dict[str, Any]] = []

    async def work(launch: Launch, link: HandLink) -> None:
        body = {"model": "demo", "input": "a", "background": True}
        async with httpx2.AsyncClient(base_url=launch.url) as client:
            made.append((await client.post("/v1/responses", json=body)).json())
        while not link.requests:
            await asyncio.sleep(0.01)
        link.give(link.requests[0].request_id, 5)
        await asyncio.sleep(0.05)  # its answer has begun
        launch.stop()

    async def kept() -> ResponseStatus:
        store = Store(tmp_path)
        record, _ = await store.responses.get(made[0]["id"], owner="")
        await store.close()
        return record.status

    assert serve(tmp_path, work, drain_timeout=0.05) == 0
    assert asyncio.run(kept()) == ResponseStatus.IN_PROGRESS


def test_a_server_under_nohup_outlives_its_terminal(tmp_path: Path) -> None:
    async def work(launch: Launch, link: HandLink) -> None:
        launch.handle_signals()
        os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.sleep(0.05)
        assert launch.engine.status.phase == "ready"
        launch.stop()

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert serve(tmp_path, work) == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_an_engine_that_is_dead_for_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "RESTART_DELAYS", (0.0,))
    with pytest.raises(UnexpectedEndError, match="the engine is dead: killed by the test, after 1 restarts"):
        serve(tmp_path, kill_for_good)


def test_an_engine_that_is_dead_for_good_in_a_drain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was asked to end, and not to lose what was running."""
    monkeypatch.setattr(supervisor, "RESTART_DELAYS", (0.0,))

    async def work(launch: Launch, link: HandLink) -> None:
        answer = asyncio.create_task(read(launch))
        while not link.requests:
            await asyncio.sleep(0)
        launch.stop()
        await kill_for_good(launch, link)
        await asyncio.gather(answer, return_exceptions=True)

    with pytest.raises(UnexpectedEndError, match="the engine is dead"):
        serve(tmp_path, work)


@pytest.mark.parametrize(
    ("cause", "expected"),
    [
        (OSError("disk I/O error"), UnexpectedEndError("the HTTP server ended: OSError: disk I/O error", fix="")),
        (ConfigError("the store is damaged"), ConfigError("the store is damaged")),
    ],
)
def test_an_application_that_does_not_start(
    cause: Exception, expected: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @asynccontextmanager
    async def broken(app: Any) -> AsyncIterator[None]:
        raise cause
        yield

    monkeypatch.setattr("jaxserve.api.app.batches_running", broken)
    with pytest.raises(type(expected)) as caught:
        serve(tmp_path)
    assert str(caught.value) == str(expected)


@pytest.mark.parametrize("error", [None, RuntimeError("no more sockets")])
def test_an_http_server_that_ends_by_itself(
    error: Exception | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main_loop(server: Any) -> None:
        if error is not None:
            raise error

    monkeypatch.setattr("uvicorn.Server.main_loop", main_loop)
    with pytest.raises(UnexpectedEndError, match=r"the HTTP server ended: (RuntimeError: no more sockets|it stopped)"):
        serve(tmp_path)


# exit codes


def command(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> int:
    """The exit code of a command that raises."""

    def run(words: list[str]) -> int:
        raise error

    module = ModuleType("raising")
    module.run = run  # type: ignore[attr-defined]
    monkeypatch.setattr("importlib.import_module", lambda name: module)
    return main(["launch"])


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ConfigError("a cause", fix="a fix"), 2, "a cause -> a fix"),
        (UnexpectedEndError("a cause", fix="a fix"), 1, "a cause -> a fix"),
        (ZeroDivisionError("zero"), 1, "ZeroDivisionError: zero -> a bug: report it with the lines above"),
    ],
)
def test_the_last_line_says_why(
    error: Exception, code: int, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(monkeypatch, error) == code
    assert capsys.readouterr().err.splitlines()[-1] == f"jaxserve: {line}"


def test_ctrl_c_has_an_exit_code_and_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(monkeypatch, KeyboardInterrupt()) == 130
    assert capsys.readouterr().err == ""


# certificates


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"ssl_certfile": "/nonexistent.pem"}, "No such file"),
        ({"ssl_certfile": "/etc/passwd"}, "certificate cannot be used"),
        ({"ssl_certfile": "/"}, "certificate cannot be used"),
        ({"ssl_keyfile": "/etc/passwd"}, "server.ssl_certfile is not"),
    ],
)
def test_certificates_that_cannot_be_used_are_refused(files: dict[str, str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        check_certificates(Config().replace(server=files).server)
    assert "--ssl-certfile" in (caught.value.fix or "")


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificate with openssl")
def test_a_key_with_a_password_is_refused_and_asked_for_nothing(tmp_path: Path) -> None:
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    words = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-passout", "pass:secret", "-subj", "/CN=localhost"]
    subprocess.run([*words, "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True)
    config = Config().replace(server={"ssl_certfile": str(certificate), "ssl_keyfile": str(key)})
    with pytest.raises(ConfigError, match="certificate cannot be used"):
        check_certificates(config.server)


@pytest.mark.parametrize(("begin", "line"), [(-2, "expired on"), (1, "is valid from"), (-0.5, None)])
def test_a_start_warns_of_a_certificate_that_clients_refuse_by_its_dates(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, begin: float, line: str | None
) -> None:
    """begin: of the one day that it is valid, in days from now"""
    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "x")])
    first, day = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=begin), datetime.timedelta(days=1)
    made = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), first, first + day)
    path, (encoding, form) = tmp_path / "both.pem", (Encoding.PEM, PrivateFormat.PKCS8)
    path.write_bytes(
        key.private_bytes(encoding, form, NoEncryption()) + made.sign(key, SHA256()).public_bytes(encoding)
    )
    check_certificates(Config().replace(server={"ssl_certfile": str(path)}).server)
    found = [each.message for each in caplog.records]
    assert len(found) == (line is not None) and all(str(line) in each for each in found)
