"""A small real server that speaks as much of OpenAI's API as the load generator asks for."""

import http.server
import json
import threading
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest


class Handler(http.server.BaseHTTPRequestHandler):
    """Streams as many chunks as max_tokens asks for, without text for a prompt "silent"; refuses a prompt "bad".

    prompts: all that came. refuses_pictures: whether it refuses prompts that are lists of parts too
    """

    models = json.dumps({"data": [{"id": "m"}]}).encode()
    prompts: ClassVar[list[str | list[Any]]] = []
    refuses_pictures = False

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        self._reply(200, self.models)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert body["stream"] and body["ignore_eos"] and body["model"] == "m"
        if self.path == "/v1/chat/completions":
            body["prompt"] = body["messages"][0]["content"]
        self.prompts.append(body["prompt"])
        if body["prompt"] == "bad" or (self.refuses_pictures and "messages" in body):
            self._reply(400, b'{"error": {"message": "no"}}')
            return
        silent = {"text": "", "finish_reason": None} | ({"token_ids": [7]} if body.get("return_token_ids") else {})
        choices = [silent if body["prompt"] == "silent" else {"text": "x", "finish_reason": None}]
        events: list[dict[str, object]] = [{"choices": choices}] * body["max_tokens"]
        if body["prompt"] == "think":
            deltas = [{"role": "assistant"}, {"reasoning_content": "hm"}, {"reasoning": "hm"}, {"content": "x"}]
            events = [{"choices": [{"delta": delta, "finish_reason": None}]} for delta in deltas]
        if body["prompt"] in ("ends", "silent end"):
            events = [] if body["prompt"] == "silent end" else events
            events.append({"choices": [{"text": "", "finish_reason": "length"}]})
        events.append({"choices": [], "usage": {"completion_tokens": body["max_tokens"], "prompt_tokens": 3}})
        events = events[:-1] if body["prompt"] in ("cut", "uncounted") else events
        text = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
        text += "" if body["prompt"] == "cut" else "data: [DONE]\n\n"
        self._reply(200, b"data: <html>\n\n" if body["prompt"] == "html" else text.encode())

    def _reply(self, status: int, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join()
