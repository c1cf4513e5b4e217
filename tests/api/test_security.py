"""Keys on every route that the application has, whatever the request looks like; templates, logs, TLS, one port."""

import hmac
import json
import logging
import shutil
import socket
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from jaxserve.api import keys
from jaxserve.api.http import middleware
from jaxserve.cli.http_server import bind
from jaxserve.config import Config, LoggingSection
from jaxserve.errors import ConfigError
from jaxserve.log import JsonFormatter, TextFormatter, configure_logging
from tests.waiting import LAST_RESORT, wait_until

from .conftest import LiveServer

KEY, ADMIN = "a-key-of-the-operator", "another-key"
OPEN = {"/health", "/live", "/metrics", "/"}
POSTS = (
    "/flush_cache /reset_prefix_cache /abort_request /update_weights_from_disk /update_weights_from_tensor "
    "/update_weight_version /get_weights_by_name /pause_generation /continue_generation /release_memory_occupation "
    "/resume_memory_occupation /pause /resume /sleep /wake_up /v1/load_lora_adapter /v1/unload_lora_adapter "
    "/load_lora_adapter /unload_lora_adapter"
)
GETS = ("/key_usage", "/is_paused", "/is_sleeping")
ADMIN_ROUTES = dict.fromkeys(POSTS.split(), "POST") | dict.fromkeys(GETS, "GET")
NEED_MORE = {
    "/get_weights_by_name",
    "/update_weights_from_disk",
    "/update_weights_from_tensor",
    "/update_weight_version",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/load_lora_adapter",
    "/unload_lora_adapter",
}
WRONG = ["", "x", KEY[:-1], KEY + "x", KEY.upper(), KEY[:1], "schlüssel", "k" * 20_000]


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    config = Config().replace(server={"api_key": KEY, "admin_api_key": ADMIN})
    with LiveServer(config, store=tmp_path_factory.mktemp("store")) as server:
        yield server


def routes(server: LiveServer) -> list[tuple[str, str]]:
    """Each method and path of the application itself, and methods that a route does not have."""
    document = server.http.get("/openapi.json", headers=bearer(KEY)).json()
    paths = set(document["paths"]) | {"/docs", "/redoc", "/openapi.json", "/get_server_info"}
    paths |= {getattr(route, "path", "/docs") for route in server.app.routes}
    return [(method, path) for path in sorted(paths) for method in ("GET", "POST", "DELETE", "HEAD", "OPTIONS", "PUT")]


def bearer(key: str) -> Any:
    return {"authorization": f"Bearer {key}".strip().encode()}


def raw(server: LiveServer, target: str, *lines: str) -> int:
    """The status of a request written by hand: no client tidies its path or its headers."""
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=LAST_RESORT) as connection:
        head = "".join(f"{line}\r\n" for line in lines or ("host: localhost",))
        connection.sendall(f"GET {target} HTTP/1.1\r\n{head}connection: close\r\n\r\n".encode())
        return int(connection.recv(4096).split()[1])


def test_every_route_asks_for_the_key(guarded: LiveServer) -> None:
    found = routes(guarded)
    assert len({path for _, path in found}) > 25
    for method, path in found:
        expected_open = path in OPEN
        for key in [None, *WRONG]:
            headers = {} if key is None else bearer(key)
            status = guarded.http.request(method, path.replace("{", "").replace("}", ""), headers=headers).status_code
            assert (status not in (401, 403)) == expected_open, (method, path, key)
            if expected_open:
                break
    for path in ("/v1/models", "/v1/files", "/version"):
        assert guarded.http.get(path, headers=bearer(KEY)).status_code == 200
        assert guarded.http.get(path, headers={"authorization": f"Basic {KEY}"}).status_code == 401
        assert guarded.http.get(path, headers={"x-api-key": KEY}).status_code == 200
        assert guarded.http.get(path, headers={"x-api-key": f"{KEY}x"}).status_code == 401


def test_a_missing_a_wrong_and_another_key_are_told_apart(guarded: LiveServer) -> None:
    """No client sends such a request again; a key that opens other routes is told that this one needs the admin key."""
    for path, kind in (("/v1/models", "API key"), ("/flush_cache", "admin key")):
        method = "POST" if path == "/flush_cache" else "GET"
        texts = []
        for headers in ({}, bearer("wrong"), {"x-api-key": "wrong"}, bearer("")):
            answer = guarded.http.request(method, path, headers=headers)
            assert (answer.status_code, answer.headers["x-should-retry"]) == (401, "false")
            assert kind in answer.text
            texts.append(answer.json()["error"]["message"])
        missing, wrong, also_wrong, empty = texts
        assert missing == empty and "has no API key" in missing
        assert wrong == also_wrong and "is wrong" in wrong
    for path, method in ADMIN_ROUTES.items():
        answer = guarded.http.request(method, path, headers=bearer(KEY))
        assert answer.status_code == 403 and "server.admin_api_key" in answer.json()["error"]["message"], path
        assert answer.headers["x-should-retry"] == "false"


def test_a_slash_at_the_end_opens_no_other_route(guarded: LiveServer) -> None:
    assert raw(guarded, "/health/") == 200 == raw(guarded, "/live/")
    assert raw(guarded, "/flush_cache/") in (401, 403) and raw(guarded, "/health//") == 401


TARGETS = ["//v1/models", "/v1/../v1/models", "/health/../v1/models", "/%2e/v1/models", "/v1/models?x=/health"]
TARGETS += [
    "/v1/models/",
    "/HEALTH",
    "/health%00",
    "/health;/v1/models",
    "http://x/v1/models",
    "/v1/models#/live",
]


@pytest.mark.parametrize("target", TARGETS)
def test_no_spelling_of_a_path_opens_it(guarded: LiveServer, target: str) -> None:
    assert raw(guarded, target) in (400, 401)


@pytest.mark.parametrize(
    "line", ["host: /health?x=", "host: x/health", "x-original-url: /health", "x-forwarded-path: /live"]
)
def test_no_header_opens_a_route(guarded: LiveServer, line: str) -> None:
    assert raw(guarded, "/v1/models", "host: localhost", line) in (400, 401)
    assert raw(guarded, "/v1/models", line) in (400, 401)


def test_admin_routes_need_the_admin_key(guarded: LiveServer) -> None:
    tagged = {path for path, operations in guarded.app.openapi()["paths"].items() if path in ADMIN_ROUTES}
    assert tagged == set(ADMIN_ROUTES) == set(middleware.ADMIN_PATHS)
    for path, method in ADMIN_ROUTES.items():
        body = {"abort_all": True} if method == "POST" else None
        for key in [KEY, *WRONG]:
            answer = guarded.http.request(method, path, json=body, headers=bearer(key))
            assert answer.status_code == (403 if key == KEY else 401), (path, key)
        assert guarded.http.request(method, path, json=body, headers=bearer(ADMIN)).status_code == (
            400 if path in NEED_MORE else 200
        )


def test_admin_routes_are_off_without_an_admin_key() -> None:
    with LiveServer(Config().replace(server={"api_key": KEY})) as server:
        for path, method in ADMIN_ROUTES.items():
            for headers in ({}, bearer(KEY), bearer("None"), bearer("")):
                assert server.http.request(method, path, headers=headers).status_code == 403


def test_keys_are_compared_in_constant_time(guarded: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every comparison of a key is hmac's, over digests of one length."""
    seen: list[tuple[int, int]] = []
    real = hmac.compare_digest

    def watched(a: bytes, b: bytes) -> bool:
        seen.append((len(a), len(b)))
        return real(a, b)

    monkeypatch.setattr(keys.hmac, "compare_digest", watched)
    for number, key in enumerate(WRONG, 1):
        assert guarded.http.get("/v1/models", headers=bearer(key)).status_code == 401
        assert len(seen) == 2 * number  # the key's and the admin key's
    assert set(seen) == {(32, 32)}


def test_metrics_ask_for_the_key_where_told_to() -> None:
    with LiveServer(Config().replace(server={"api_key": KEY, "metrics_auth": True})) as server:
        assert server.http.get("/metrics").status_code == 401
        assert server.http.get("/metrics", headers=bearer(KEY)).status_code == 200


@pytest.mark.parametrize(
    ("host", "key", "warns"), [("0.0.0.0", None, True), ("0.0.0.0", KEY, False), ("127.0.0.1", None, False)]
)
def test_listening_to_everybody_without_a_key_warns(
    host: str, key: str | None, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    section = Config().replace(server={"host": host, "api_key": key, "port": 0}).server
    with bind(section):
        pass
    assert ("without an API key" in caplog.text) == warns
    assert Config().server.host == "127.0.0.1"


@pytest.mark.parametrize("host", ["a..b", "a" * 64])
def test_what_is_no_name_of_a_host_is_refused(host: str) -> None:
    with (
        pytest.raises(ConfigError, match=r"cannot use the host .*: it is no name of a host"),
        bind(Config().replace(server={"host": host, "port": 0}).server),
    ):
        pass


def test_secrets_and_texts_stay_out_of_the_logs(caplog: pytest.LogCaptureFixture) -> None:
    secret = "my deepest secret"
    config = Config().replace(server={"api_key": KEY, "admin_api_key": ADMIN}, logging={"requests": True})
    with caplog.at_level(logging.DEBUG), LiveServer(config) as server:
        for body in (
            {"model": "demo", "prompt": secret},
            {"model": "demo", "prompt": secret, "n": -1},
            {"prompt": secret},
        ):
            server.post("/v1/completions", body, headers=bearer(KEY))
            server.post("/v1/completions", body, headers=bearer(KEY + "x"))
        answer = server.http.get("/server_info", headers=bearer(KEY)).text
    for text in (caplog.text, answer):
        assert KEY not in text and ADMIN not in text and secret not in text
    assert "/v1/completions 200" in caplog.text


def record(message: str) -> logging.LogRecord:
    return logging.LogRecord("jaxserve.x", logging.INFO, "x.py", 1, "path %s", (message,), None)


def test_a_logged_value_cannot_forge_a_line() -> None:
    forged = "x\r\n00:00:00 ERROR jaxserve: forged\x1b[31m\u2028\0"
    text = TextFormatter("%(message)s").format(record(forged))
    assert "\n" not in text and "\r" not in text and "\x1b" not in text and "\u2028" not in text
    line = JsonFormatter().format(record(forged))
    assert len(line.splitlines()) == 1 and json.loads(line)["message"].startswith("path x")
    assert json.loads(line)["level"] == "info"


def test_json_lines_are_a_choice(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(LoggingSection(format="json"))  # type: ignore[call-arg]
    logging.getLogger("jaxserve").warning("one %s", "line")
    assert json.loads(capsys.readouterr().err)["message"] == "one line"


NEEDS_OPENSSL = pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificate with openssl")


def certified(directory: Path, kind: str = "rsa:2048") -> tuple[Path, Path]:
    """Make a certificate for 127.0.0.1 and its key. kind: of the key"""
    certificate, key = directory / "cert.pem", directory / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", *kind.split(), "-nodes", "-days", "1", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-out", str(certificate), "-keyout", str(key)]
    subprocess.run(command, check=True, capture_output=True)
    return certificate, key


@NEEDS_OPENSSL
def test_tls(tmp_path: Path) -> None:
    certificate, key = certified(tmp_path)
    config = Config().replace(server={"ssl_certfile": str(certificate), "ssl_keyfile": str(key)})
    with LiveServer(config) as server:
        url = server.url.replace("http:", "https:")
        trusted: Any = ssl.create_default_context(cafile=str(certificate))
        assert httpx2.get(f"{url}/live", verify=trusted, timeout=LAST_RESORT).json() == {"status": "live"}
        with pytest.raises(httpx2.HTTPError):
            httpx2.get(f"{server.url}/live", timeout=LAST_RESORT)


@NEEDS_OPENSSL
def test_a_certificate_is_replaced_while_the_server_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As one that expires must be, also by one of another kind. Half of the new files, or none, change nothing."""
    monkeypatch.setattr("jaxserve.cli.http_server.CERTIFICATE_INTERVAL", 0)
    certificate, key = certified(tmp_path, "ec -pkeyopt ec_paramgen_curve:prime256v1")
    (tmp_path / "new").mkdir()
    first, (new_certificate, new_key) = certificate.read_text(), certified(tmp_path / "new")
    second = new_certificate.read_text()

    with LiveServer(Config().replace(server={"ssl_certfile": str(certificate), "ssl_keyfile": str(key)})) as server:

        def shown() -> str:
            return ssl.get_server_certificate(("127.0.0.1", server.listener.getsockname()[1]))

        assert shown() == first
        new_certificate.rename(certificate)
        wait_until(lambda: "the old certificate stays in use" in caplog.text, "the half is seen")
        assert shown() == first
        new_key.rename(key)
        wait_until(lambda: shown() == second, "the new certificate")
        certificate.unlink()
        wait_until(lambda: caplog.text.count("the old certificate stays in use") > 1, "it is missed")
        assert shown() == second
