"""What a chat template may cost the server: over HTTP, with the real worker."""

import json
import os
import resource
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from jaxserve.api.batch.request import RouteHandler
from jaxserve.api.openai.routes import create_chat_completion
from jaxserve.config import Config
from jaxserve.text.renderer import LONG_BYTES, Renderer
from jaxserve.text.tokenizer import Tokenizer
from tests.waiting import with_quick_collections

from .conftest import LiveServer
from .loop_meter import LoopMeter

COSTLY = """{% if messages[0].content == 'now' %}{{ ([[1, 2, 3]] * 50000)|map('string')|list|length }}{% endif %}
{%- if messages[0].content == 'all' %}{% set n = namespace(x=[]) %}
{%- for i in range(999) %}{% set n.x = n.x + ['a' * 16000000 ~ i] %}{% endfor %}{% endif %}fine"""


def test_a_request_waits_for_no_long_conversation() -> None:
    say = {"model": "demo", "max_tokens": 1}
    hello, long = ({"messages": [{"role": "user", "content": text}]} for text in ("hello", "word " * LONG_BYTES))
    with LiveServer(Config().replace(model={"chat_template": COSTLY})) as server:
        state = server.app.state.server
        assert server.post("/v1/chat/completions", say | long).status_code == 200
        worker = state.chat_template.long_process.pid
        os.kill(worker, signal.SIGSTOP)
        with ThreadPoolExecutor() as threads:
            late = [threads.submit(server.post, "/v1/chat/completions", say | long) for _ in range(2)]
            server.wait(lambda: state.template_work.long.waiting.jobs == 2, "two long conversations wait")
            assert server.post("/v1/chat/completions", say | hello).status_code == 200
            os.kill(worker, signal.SIGCONT)
            assert [each.result().status_code for each in late] == [200, 200]


@pytest.mark.parametrize("batch", [False, True])
def test_the_template_is_loaded_once_and_off_the_loop(batch: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []
    load = Renderer.load

    def loaded(tokenizer: Tokenizer, override: str | None = None) -> Renderer | None:
        threads.append(threading.current_thread().name)
        return load(tokenizer, override)

    monkeypatch.setattr(Renderer, "load", loaded)
    body = {"model": "demo", "max_tokens": 1, "messages": [{"role": "user", "content": "hello"}]}
    with LiveServer(Config()) as server, ThreadPoolExecutor(4) as clients:
        line = RouteHandler(server.app, "/v1/chat/completions", create_chat_completion)

        def ask(number: int) -> int:
            if batch:
                return server.run(line(json.dumps(body).encode(), f"req-{number}", "")).status
            return server.post("/v1/chat/completions", body).status_code

        assert list(clients.map(ask, range(4))) == [200] * 4
        assert len(threads) == 1
        assert threads[0] != server.call(lambda: threading.current_thread().name)


def test_a_costly_template_holds_nobody_up() -> None:
    """The render is somewhere else: the loop takes its turns, and the memory is not this process's."""
    say = {"model": "demo", "max_tokens": 1}
    with (
        LiveServer(Config().replace(model={"chat_template": COSTLY})) as server,
        with_quick_collections(),
        LoopMeter(server) as meter,
    ):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for text, status in (("now", 200), ("all", 400), ("hello", 200)):
            answer = server.post("/v1/chat/completions", say | {"messages": [{"role": "user", "content": text}]})
            assert answer.status_code == status, answer.text
            if status == 400:
                assert answer.json()["error"]["param"] == "messages"
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024  # KiB
    assert meter.longest < 0.25
