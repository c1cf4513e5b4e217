"""A reverse proxy that serves another server under a path prefix, and nothing beside it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx2

from tests.waiting import LAST_RESORT

_PASSED_ON = ("accept", "authorization", "content-type")


@contextmanager
def behind_prefix(server: str, prefix: str) -> Iterator[str]:
    """The address of `server` under `prefix`, which begins with a slash and ends without."""
    client = httpx2.Client(base_url=server, timeout=LAST_RESORT)

    class Handler(BaseHTTPRequestHandler):
        def forward(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            if not self.path.startswith(f"{prefix}/"):
                return self.send_error(404)
            headers = {name: self.headers[name] for name in _PASSED_ON if name in self.headers}
            path = self.path.removeprefix(prefix)
            with client.stream(self.command, path, content=body, headers=headers) as reply:
                self.send_response(reply.status_code)
                for name in ("content-type", "content-security-policy"):
                    if name in reply.headers:
                        self.send_header(name, reply.headers[name])
                self.end_headers()
                for part in reply.iter_bytes():
                    self.wfile.write(part)

        do_GET = do_POST = forward

        def log_message(self, format: str, *args: Any) -> None: ...

    with client, ThreadingHTTPServer(("127.0.0.1", 0), Handler) as proxy:
        thread = threading.Thread(target=proxy.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{proxy.server_port}{prefix}"
        finally:
            proxy.shutdown()
            thread.join()
