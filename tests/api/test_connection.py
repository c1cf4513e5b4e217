"""Clients that are slow, silent or too talkative, on real sockets: each is cut by itself, and others are served."""

import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from jaxserve.config import Config
from tests.waiting import LAST_RESORT

from .conftest import LiveServer, reply_with

TEXT = {"model": "demo", "prompt": "Hi"}
CHUNKED = (
    b"POST /v1/completions HTTP/1.1\r\nhost:\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
)


@pytest.fixture(scope="module")
def strict() -> Iterator[LiveServer]:
    limits = {"header_timeout": 0.4, "body_timeout": 0.4, "send_timeout": 0.4}
    with LiveServer(Config().replace(server=limits)) as server:
        yield server


def connect(server: LiveServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=LAST_RESORT)


def read_all(connection: socket.socket) -> bytes:
    data = b""
    while part := connection.recv(65536):
        data += part
    return data


def request_of(body: dict[str, Any], **headers: str) -> bytes:
    data = json.dumps(body).encode()
    lines = {"host": "localhost", "content-type": "application/json", "content-length": str(len(data))} | headers
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"POST /v1/completions HTTP/1.1\r\n{head}\r\n".encode() + data


def error_of(answer: bytes) -> tuple[int, Any]:
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]


CHAT = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
STREAMS: dict[str, dict[str, Any]] = {
    "/v1/completions": TEXT | {"max_tokens": 4},
    "/v1/chat/completions": CHAT,
    "/v1/messages": CHAT,
    "/v1/responses": {"input": "Hi", "max_output_tokens": 4, "store": False},
    "/generate": {"text": "Hi", "sampling_params": {"max_new_tokens": 4}},
    "/api/chat": {name: CHAT[name] for name in ("model", "messages")},
    "/api/generate": TEXT,
}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", STREAMS)
def test_http_1_0_gets_no_chunks(server: LiveServer, path: str, stream: bool) -> None:
    """The end of the connection ends an answer whose length is not known; one that fails begins with its length."""
    reply_with(server, "one two three")
    head, _, body = _over_1_0(server, path, STREAMS[path] | {"stream": stream}).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200") and b"transfer-encoding" not in head and b"connection: close" in head
    if not stream:
        assert f"content-length: {len(body)}".encode() in head and json.loads(body)
        return
    assert b"content-length" not in head
    if path.startswith("/api/"):
        lines = [json.loads(line) for line in body.splitlines()]
        assert lines[-1]["done"] and len(lines) > 1
    else:
        events = [event for event in body.split(b"\n\n") if event]
        assert len(events) > 1 and all(event.startswith((b"data: ", b"event: ", b":")) for event in events)
        assert path == "/v1/messages" or events[-1] == b"data: [DONE]"
    refused = _over_1_0(server, path, {"stream": stream})
    assert refused.startswith(b"HTTP/1.1 400") and b"content-length" in refused


def _over_1_0(server: LiveServer, path: str, body: dict[str, Any]) -> bytes:
    sent = request_of(body).replace(b"/v1/completions HTTP/1.1", f"{path} HTTP/1.0".encode(), 1)
    with connect(server) as connection:
        connection.sendall(sent)
        return read_all(connection)


@pytest.mark.parametrize("sent", [b"", b"POST /v1/comp", b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"])
def test_headers_that_do_not_come(strict: LiveServer, sent: bytes) -> None:
    started = time.monotonic()
    with connect(strict) as connection:
        connection.sendall(sent)
        status, error = error_of(read_all(connection))
        assert status == 408 and set(error) == {"message", "type", "param", "code"}
        assert time.monotonic() - started > 0.3


def test_headers_that_trickle(strict: LiveServer) -> None:
    """Each byte is in time, and the whole is not."""
    with connect(strict) as connection, pytest.raises(OSError):
        for byte in b"GET /live HTTP/1.1\r\n" + b"x-slow: 1\r\n" * 20:
            connection.sendall(bytes([byte]))
            time.sleep(0.02)


def test_the_second_request_of_a_connection_has_the_same_limit(strict: LiveServer) -> None:
    with connect(strict) as connection:
        connection.sendall(b"GET /live HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert b"200" in connection.recv(4096)
        time.sleep(0.6)  # idle between two requests is not slow
        connection.sendall(b"GET /live HTT")
        assert error_of(read_all(connection))[0] == 408


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/nowhere", "/v1/files"])
def test_a_body_that_does_not_come(tmp_path: Any, path: str, chunked: bool) -> None:
    config = Config().replace(server={"body_timeout": 0.4})
    with LiveServer(config, store=tmp_path) as server, connect(server) as connection:
        kind = "multipart/form-data; boundary=x" if path == "/v1/files" else "application/json"
        size = "transfer-encoding: chunked" if chunked else "content-length: 100"
        connection.sendall(f"POST {path} HTTP/1.1\r\nhost: [::1]\r\ncontent-type: {kind}\r\n{size}\r\n\r\n".encode())
        connection.sendall(b"5\r\n" * chunked + b"--x\r\n")
        status, _ = error_of(read_all(connection))
        assert status == (404 if path == "/nowhere" else 408)


@pytest.mark.parametrize("head", [b"x-a: " + b"a" * 70_000, b"x: 1\r\n" * 200, b"x-b: " + b"b" * 1_000_000])
def test_headers_over_the_limit(server: LiveServer, head: bytes) -> None:
    with connect(server) as connection:
        try:
            connection.sendall(b"GET /live HTTP/1.1\r\n" + head + b"\r\n\r\n")
            answer = read_all(connection)
        except ConnectionError:  # it was cut while we still sent
            return
        assert error_of(answer)[0] == 431
    assert server.http.get("/live").status_code == 200


@pytest.mark.parametrize("begin", [b"0\r\nx: ", b"0\r\n", b"5;", b"5\r\nabcde\r\n0\r\nx: "])
def test_trailers_without_an_end(server: LiveServer, begin: bytes) -> None:
    """What follows a chunked body is no part of the body's limit: its parser would keep it all."""
    with connect(server) as connection, pytest.raises(OSError):
        connection.sendall(CHUNKED + begin)
        for _ in range(2000):
            connection.sendall((b"x" * 1000 if begin != b"0\r\n" else b"name: " + b"x" * 994 + b"\r\n") * 100)
            time.sleep(0.005)


@pytest.mark.parametrize("end", [b"zz\r\n", b"1\r\n{XX", b"2\r\n{}\r\n0\r\nno trailer\r\n\r\n", b"f" * 20 + b"\r\n"])
def test_a_malformed_chunk_is_answered(server: LiveServer, end: bytes) -> None:
    """It was a closed connection, which clients take for a server that died."""
    for head, answers in ((CHUNKED, 1), (request_of(TEXT | {"max_tokens": 1}) + CHUNKED, 2)):
        with connect(server) as connection:
            connection.sendall(head)
            time.sleep(0.2)  # the first answer is complete
            connection.sendall(end)
            answer = read_all(connection)
        assert answer.count(b"HTTP/1.1") == answers and b"HTTP/1.1 400" in answer
    server.wait(lambda: server.engine.num_live == 0, "a request was not ended")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/files", "/v1/messages", "/api/chat"])
def test_a_compressed_body_is_refused_by_name(server: LiveServer, path: str) -> None:
    for name in ("gzip", "BR", "identity, gzip"):
        answer = server.http.post(path, content=b"{}", headers={"content-encoding": name})
        assert answer.status_code == 415 and name.lower() in answer.text
    headers = {"content-encoding": "identity"}
    assert server.http.post("/v1/completions", json=TEXT | {"max_tokens": 1}, headers=headers).status_code == 200


def test_a_chunked_body_with_trailers(server: LiveServer) -> None:
    """They are read and forgotten; the connection goes on."""
    data = json.dumps(TEXT).encode()
    chunks = b"".join(b"1;x=y\r\n%c\r\n" % byte for byte in data) + b"0\r\ncontent-type: text/plain\r\n\r\n"
    with connect(server) as connection:
        for headers in ({}, {"connection": "close"}):
            connection.sendall(CHUNKED + chunks + request_of(TEXT, **headers))
            time.sleep(0.2)
        assert read_all(connection).count(b"HTTP/1.1 200 OK") == 4


def test_a_url_over_the_limit(server: LiveServer) -> None:
    with connect(server) as connection:
        connection.sendall(b"GET /" + b"a" * 65_600 + b" HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert error_of(read_all(connection))[0] == 431


def test_bytes_that_are_no_http(server: LiveServer) -> None:
    with connect(server) as connection:
        connection.sendall(b"\x16\x03\x01 hello\r\n\r\n")
        status, error = error_of(read_all(connection))
        assert status == 400 and error["type"] == "invalid_request_error"


def test_a_body_deeper_than_the_limit(server: LiveServer) -> None:
    """Deeper than JSON may be, and with more lists than a body may have."""
    for depth, status in ((250, 400), (100_000, 413)):
        for nested in (b"[" * depth + b"]" * depth, b'{"a":' * depth + b"1" + b"}" * depth):
            body = b'{"model": "demo", "prompt": "x", "max_tokens": 1, "user": ' + nested + b"}"
            answer = server.http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
            assert answer.status_code == status and answer.json()["error"]["type"] == "invalid_request_error"


def test_a_client_that_stops_reading_is_cut_and_its_request_ends(strict: LiveServer) -> None:
    """It asks for more than the kernel's and the server's buffers hold, and never reads a byte of it."""
    strict.link.delay = 0.01
    strict.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # inherited: a megabyte less to fill
    with connect(strict) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        many = {"n": 8, "max_tokens": 500, "ignore_eos": True, "stream": True, "logprobs": 20, "return_token_ids": True}
        connection.sendall(request_of(TEXT | many))
        strict.wait(lambda: len(strict.link.running) == 8, "it never began")
        strict.wait(lambda: strict.engine.num_live == 0 and not strict.link.running, "it never ended")
        assert len(strict.link.aborted) == 8
    strict.link.delay = 0.0
    reply_with(strict, "fine")
    assert strict.post("/v1/completions", TEXT).json()["choices"][0]["text"] == "fine"


def test_headers_in_one_read_with_a_large_body_are_not_over_the_limit() -> None:
    """A client sends its next request while the server has not read the body of the one before, whose answer came."""
    with LiveServer() as server:
        server.listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**20)
        following = request_of(TEXT, connection="close")
        with connect(server) as connection, ThreadPoolExecutor(1) as pool:
            busy = pool.submit(server.call, lambda: time.sleep(0.3))  # so that all of it is in one read
            connection.sendall(request_of(TEXT | {"user": "x" * 150_000}) + following[:60])
            busy.result()
            time.sleep(0.1)
            connection.sendall(following[60:])
            assert read_all(connection).count(b"HTTP/1.1 200") == 2


def test_a_client_that_pipelines_and_leaves_ends_its_request(server: LiveServer) -> None:
    server.link.delay = 0.05
    with connect(server) as connection:
        connection.sendall(request_of(TEXT | {"max_tokens": 400, "ignore_eos": True}) * 3)
        server.wait(lambda: len(server.link.running) == 1, "the first did not start")
    server.wait(lambda: not server.link.running and server.engine.num_live == 0, "it went on")
    assert len(server.link.aborted) == 1


UPGRADES = [
    {
        "connection": "Upgrade, HTTP2-Settings",
        "upgrade": "h2c",
        "http2-settings": "AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA",
    },
    {"connection": "keep-alive, upgrade", "upgrade": "anything"},
    {"connection": "Upgrade", "upgrade": "websocket", "sec-websocket-key": "AAAAAAAAAAAAAAAAAAAAAA=="},
]


@pytest.mark.parametrize("headers", UPGRADES)
@pytest.mark.parametrize("pieces", [1, 2, 40])
def test_an_upgrade_is_ignored_and_the_body_is_read(server: LiveServer, headers: dict[str, str], pieces: int) -> None:
    """As java.net.http.HttpClient sends it. A second request on the connection is answered too."""
    data = request_of(TEXT | {"max_tokens": 1}, **headers)
    size = -(-len(data) // pieces)
    with connect(server) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for start in range(0, len(data), size):
            connection.sendall(data[start : start + size])
            time.sleep(0.001 * (pieces > 1))
        connection.sendall(request_of(TEXT | {"max_tokens": 1}, connection="close"))
        answers = read_all(connection)
    assert answers.count(b"HTTP/1.1 200") == 2 and answers.count(b"HTTP/1.1") == 2


@pytest.mark.parametrize("pieces", [1, 2])
@pytest.mark.parametrize("framing", ["length", "chunked"])
def test_a_body_behind_an_upgrade_is_no_request(server: LiveServer, pieces: int, framing: str) -> None:
    inner = b"GET /live HTTP/1.1\r\nHost: localhost\r\nX-Request-Id: smuggled\r\n\r\n"
    if framing == "length":
        how, body = f"content-length: {len(inner)}", inner
    else:
        how, body = "transfer-encoding: chunked", b"%x\r\n%b\r\n0\r\n\r\n" % (len(inner), inner)
    head = f"POST /v1/completions HTTP/1.1\r\nhost:\r\nconnection: upgrade\r\nupgrade: x\r\n{how}\r\n\r\n".encode()
    with connect(server) as connection:
        if pieces == 1:
            connection.sendall(head + body)
        else:
            connection.sendall(head)
            time.sleep(0.05)
            connection.sendall(body)
        connection.sendall(b"GET /live HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        answers = read_all(connection)
    assert answers.count(b"HTTP/1.1") == 2 and answers.startswith(b"HTTP/1.1 400") and b"smuggled" not in answers


def test_connect_is_refused(server: LiveServer) -> None:
    with connect(server) as connection:
        connection.sendall(b"CONNECT example.org:443 HTTP/1.1\r\nhost: example.org\r\n\r\nGET /live HTTP/1.1\r\n\r\n")
        assert error_of(read_all(connection))[0] == 400


def test_uvicorn_still_calls_what_the_connection_overrides() -> None:
    """These names of uvicorn's are private. Without `_start_asgi_task` a cut connection would not end its request."""
    own = {name for name in vars(HttpToolsProtocol) if not name.startswith("__")}
    assert {"_start_asgi_task", "send_400_response", "on_message_begin", "on_header", "on_body"} <= own
    called = HttpToolsProtocol.on_headers_complete.__code__.co_names
    assert "_start_asgi_task" in called and "parser" in HttpToolsProtocol.data_received.__code__.co_names
