"""Pictures by URL: allowed hosts and public addresses only, also behind redirects; servers that stall and lie."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from jaxserve.errors import InvalidValueError
from jaxserve.media.fetch import Fetcher, is_public

BODY = b"a picture" * 100


def answer(body: bytes, status: str = "200 OK", **headers: str) -> bytes:
    given = {"Content-Length": str(len(body)), "Connection": "close"} | {
        k.replace("_", "-"): v for k, v in headers.items()
    }
    head = "".join(f"{name}: {value}\r\n" for name, value in given.items())
    return f"HTTP/1.1 {status}\r\n{head}\r\n".encode() + body


class Site:
    """A web server at a loopback address that says what the path asks for."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.requests: list[bytes] = []
        self.done = threading.Event()
        threading.Thread(target=self._serve, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://localhost:{self.port}"

    def _serve(self) -> None:
        while not self.done.is_set():
            try:
                line, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(line,), daemon=True).start()

    def _answer(self, line: socket.socket) -> None:
        with line:
            asked = line.recv(8192)
            if not asked:
                return
            self.requests.append(asked)
            try:
                self._say(line, asked.split()[1].decode())
            except OSError:
                return

    def _say(self, line: socket.socket, path: str) -> None:
        word, _, rest = path.partition("?")[0].strip("/").partition("/")
        whole = {
            "good": answer(BODY),
            "away": answer(b"", "302 Found", Location="http://example.org/good"),
            "no-url": answer(b"", "302 Found", Location="http://["),
            "file": answer(b"", "302 Found", Location="file:///etc/passwd"),
            "missing": answer(BODY, "404 Not Found"),
            "gzip": answer(BODY, Content_Encoding="gzip"),
            "short": answer(BODY, Content_Length=str(2 * len(BODY))),
            "long": answer(b"x" * 20_000),
            "endless": b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 100_000,
            "no-http": b"\x00\xff no HTTP\r\n\r\n",
        }
        if word == "chain":
            line.sendall(answer(b"", "302 Found", Location=f"/chain/{int(rest) - 1}" if int(rest) else "/good"))
        elif word == "silent":
            self.done.wait(60)
        elif word == "trickle":
            for byte in answer(BODY):
                line.sendall(bytes([byte]))
                if self.done.wait(0.05):
                    return
        else:
            line.sendall(whole[word])

    def close(self) -> None:
        self.done.set()
        self.listener.close()


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    made = Site()
    yield made
    made.close()


def fetcher(*hosts: str, seconds: float = 60.0, public: bool = False) -> Fetcher:
    allowed = is_public if public else lambda address: True
    return Fetcher(hosts or ("localhost",), 10_000, allowed, seconds)


@contextmanager
def refused(match: str) -> Iterator[None]:
    with pytest.raises(InvalidValueError, match=match) as error:
        yield
    assert error.value.code == "invalid_image_url" and error.value.param == "here"


def test_a_picture_is_fetched_with_the_name_of_its_host(site: Site) -> None:
    assert fetcher().fetch(f"{site.url}/good?a=1", "here") == BODY
    asked = site.requests[-1].decode()
    assert asked.startswith("GET /good?a=1 HTTP/1.1") and f"Host: localhost:{site.port}" in asked
    assert "Accept-Encoding: identity" in asked and "Cookie" not in asked and "User-Agent" not in asked
    assert fetcher("*.example.com", "localhost").fetch(f"{site.url}/chain/2", "here") == BODY


@pytest.mark.parametrize(
    "path", ["missing", "gzip", "short", "no-http", "chain/3", "away", "file", "no-url", "long", "endless"]
)
def test_a_server_that_redirects_and_lies(site: Site, path: str) -> None:
    with refused("could not be fetched|redirects|larger|not one of|not valid"):
        fetcher().fetch(f"{site.url}/{path}", "here")


@pytest.mark.parametrize("path", ["trickle", "silent"])
def test_a_server_that_stalls_is_cut_at_the_deadline(site: Site, path: str) -> None:
    began = time.monotonic()
    with refused("could not be fetched"):
        fetcher(seconds=0.5).fetch(f"{site.url}/{path}", "here")
    assert time.monotonic() - began < 45  # trickling takes 50 s


def test_a_resolver_that_is_silent_is_left_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, done, ended = threading.Event(), threading.Event(), threading.Event()

    def silent(*args: object, **kwargs: object) -> list[tuple[object, ...]]:
        asked.set()
        done.wait(60)
        ended.set()
        raise OSError

    monkeypatch.setattr(socket, "getaddrinfo", silent)
    with refused("could not be fetched"):
        fetcher(seconds=0.2).fetch("http://localhost/good", "here")
    assert asked.is_set() and not ended.is_set()
    done.set()


def test_the_addresses_of_a_name_are_tried_in_turn(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """One is silent, the next refuses, the last answers. If one of them is not allowed, none is tried."""
    tried: list[str] = []

    class Recorded(socket.socket):
        def connect(self, address: Any) -> None:
            tried.append(address[0])
            if address[0] == "127.0.0.3":  # silent
                assert self.gettimeout() == pytest.approx(20, abs=1), "not a third of the time"
                raise TimeoutError
            super().connect(address)

    def look_up(host: str, port: int, **options: Any) -> list[tuple[Any, ...]]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (f"127.0.0.{last}", port)) for last in (3, 2, 1)]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(socket, "socket", Recorded)
    assert fetcher().fetch(f"{site.url}/good", "here") == BODY
    assert tried == ["127.0.0.3", "127.0.0.2", "127.0.0.1"]
    tried.clear()
    checked = Fetcher(("localhost",), 10_000, lambda address: address != "127.0.0.1", 60.0)
    with refused("could not be fetched"):
        checked.fetch(f"{site.url}/good", "here")
    assert not tried


def test_the_connection_is_closed_if_its_encryption_cannot_begin(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[socket.socket] = []

    class Recorded(socket.socket):
        def connect(self, address: Any) -> None:
            super().connect(address)
            made.append(self)

    def broken() -> ssl.SSLContext:
        raise OSError("no certificates")

    monkeypatch.setattr(ssl, "create_default_context", broken)
    monkeypatch.setattr(socket, "socket", Recorded)
    with refused("could not be fetched"):
        fetcher().fetch(f"{site.url.replace('http', 'https')}/good", "here")
    (sock,) = made
    assert sock.fileno() == -1


@pytest.mark.parametrize(
    "url",
    [
        "http://other/good",
        "http://localhost.evil.example/",
        "http://localhost@evil.example/",
        "http://evil.example\\@localhost/",
        "http://user:word@localhost/",
        "http://localhost\t/",
        "http://lo\u0441alhost/",
        "ftp://localhost/",
        "gopher://localhost/",
        "http:///good",
        "http://localhost:0/",
        "http://localhost:99999/",
        "http://localhost./",
        "//localhost/good",
        "http://" + "a" * 5000,
    ],
)
def test_urls_of_other_places_and_forms_are_refused_without_a_connection(site: Site, url: str) -> None:
    before = len(site.requests)
    with refused("not valid|not one of"):
        fetcher().fetch(url, "here")
    assert len(site.requests) == before


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "2130706433", "0x7f.1", "[::1]", "[::ffff:127.0.0.1]"])
def test_no_address_of_this_machine_or_its_network_is_reached(site: Site, host: str) -> None:
    """With any host allowed; an open and a closed port give one message."""
    before = len(site.requests)
    messages = set()
    for port in (site.port, 1):
        with pytest.raises(InvalidValueError) as error:
            fetcher("*", public=True).fetch(f"http://{host}:{port}/good", "here")
        messages.add(error.value.message)
    assert messages == {"here: The image could not be fetched."} and len(site.requests) == before


def test_which_addresses_are_public() -> None:
    for address in ("8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"):
        assert is_public(address), address
    private = ["127.0.0.1", "10.0.0.1", "192.168.1.1", "172.16.0.1", "169.254.169.254", "100.64.0.1", "0.0.0.0"]
    private += ["::1", "fe80::1", "fe80::1%eth0", "fc00::1", "::ffff:10.0.0.1", "64:ff9b::a00:1", "2002:a00:1::"]
    private += ["224.0.0.1", "ff02::1", "::", "255.255.255.255"]
    for address in private:
        assert not is_public(address), address
