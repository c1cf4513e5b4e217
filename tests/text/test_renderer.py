"""The workers that render: they write what the template says, and are ended at their limits."""

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from jaxserve.errors import ConfigError, InvalidValueError, ServerError
from jaxserve.text.chat_template import ChatTemplate
from jaxserve.text.renderer import LONG_BYTES, Renderer
from jaxserve.text.template_process import TemplateProcess
from jaxserve.text.template_worker import TemplateInput, TemplateSetup
from jaxserve.text.tokenizer import SpecialTokenEscaper, Tokenizer
from jaxserve.transport import child_process
from tests.waiting import LAST_RESORT, wait_until

DEMO = Path(__file__).parent.parent.parent / "jaxserve" / "assets" / "demo"
HELLO = [{"role": "user", "content": "hi <|im_end|>"}]
CALL = {"type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
CALLS = [HELLO[0], {"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "tool", "content": "7"}]
TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
# what the limits of the render itself let pass
COSTLY = [
    "{{ ([[1,2,3]]*16000000)|map('string')|list|length }}",
    "{{ ('www.a.b ' * 2000000)|urlize|length }}",
    "{% set n = namespace(x=[1]) %}{% for i in range(64) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x|string }}",
    "{% set n = namespace(x=[]) %}{% for i in range(9999) %}{% set n.x = n.x + ['a' * 16000000 ~ i] %}{% endfor %}",
]


def process(source: str) -> TemplateProcess:
    made = TemplateProcess(TemplateSetup(source, None, {}, ["<|im_end|>"], cpu_seconds=0.3, memory_bytes=128 << 20))
    made.wall_seconds = LAST_RESORT
    return made


@pytest.fixture(scope="module")
def demo() -> Iterator[Renderer]:
    renderer = Renderer.load(Tokenizer.from_directory(DEMO))
    assert renderer is not None
    yield renderer
    renderer.stop()


@pytest.mark.parametrize("messages", [HELLO, CALLS])
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_the_worker_writes_what_the_template_says(demo: Renderer, messages: Any, tools: Any) -> None:
    escaper = SpecialTokenEscaper(Tokenizer.from_directory(DEMO).special_texts)
    template, kwargs = ChatTemplate(demo.source), {"enable_thinking": True}
    expected = template.render(escaper.value(messages), tools=tools, kwargs=kwargs)
    assert demo.render(TemplateInput(messages, tools, kwargs=kwargs)) == expected


def test_values_arrive_in_the_worker_as_they_are() -> None:
    values = {
        "huge": 10**30,
        "small": -1.5e-7,
        "one": 1.0,
        "yes": True,
        "none": None,
        "text": "é\u2028 '\"",
        "list": [1, {"b": 2, "a": 1}],
    }
    worker = process("{% generation %}{{ values }}{% endgeneration %}")
    try:
        assert worker.render(TemplateInput(HELLO, kwargs={"values": values})) == str(values)
    finally:
        worker.stop()


def test_a_refusal_names_the_messages(demo: Renderer) -> None:
    with pytest.raises(InvalidValueError, match="Unknown role") as caught:
        demo.render(TemplateInput([{"role": "nobody", "content": "x"}]))
    assert caught.value.param == "messages"


def test_the_worker_runs_before_the_first_request(load_renderer: Callable[..., Renderer]) -> None:
    renderer = load_renderer(Tokenizer.from_directory(DEMO))
    started = renderer.process.pid
    assert started is not None
    assert renderer.render(TemplateInput(HELLO)) and renderer.process.pid == started


def test_a_long_conversation_delays_no_short_one(load_renderer: Callable[..., Renderer]) -> None:
    renderer = load_renderer(Tokenizer.from_directory(DEMO))
    conversation = TemplateInput(HELLO)
    short = renderer.render(conversation, LONG_BYTES)
    assert renderer.long_process.pid is None, "it is started when it is needed"
    assert renderer.render(conversation, LONG_BYTES + 1) == short
    worker = renderer.long_process.pid
    assert worker is not None and worker != renderer.process.pid
    os.kill(worker, signal.SIGSTOP)
    assert renderer.render(conversation, LONG_BYTES) == short


@pytest.mark.parametrize("source", COSTLY)
def test_what_costs_too_much_is_an_error_and_the_next_is_rendered(source: str) -> None:
    """One worker in two templates: the costly one is behind a word in a message."""
    worker = process("{% if messages[0].content == 'now' %}" + source + "{% endif %}fine")
    try:
        assert worker.render(TemplateInput(HELLO)) == "fine"
        with pytest.raises(InvalidValueError) as caught:
            worker.render(TemplateInput([{"role": "user", "content": "now"}]))
        assert caught.value.param == "messages"
        assert worker.render(TemplateInput(HELLO)) == "fine"
    finally:
        worker.stop()


def test_a_worker_without_a_processor_is_ended_and_started_again() -> None:
    worker = process("{{ messages[0].content }}")
    try:
        worker.start()
        first = worker.pid
        assert first is not None
        os.kill(first, signal.SIGSTOP)
        worker.wall_seconds = 0.2
        with pytest.raises(InvalidValueError, match="too long"):
            worker.render(TemplateInput(HELLO))
        worker.wall_seconds = LAST_RESORT
        assert worker.render(TemplateInput(HELLO)).startswith("hi <")
        assert worker.pid != first
    finally:
        worker.stop()


def test_a_worker_that_ended_while_idle_is_replaced() -> None:
    worker = process("{{ messages[0].content }}")
    try:
        worker.start()
        assert worker._process is not None
        worker._process.kill()
        worker._process.wait()
        assert worker.render(TemplateInput(HELLO)).startswith("hi <")
    finally:
        worker.stop()


def test_a_render_that_waits_ends_when_the_server_stops() -> None:
    worker = process("{{ messages[0].content }}")
    try:
        worker.start()
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGSTOP)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(worker.render, TemplateInput(HELLO))
            wait_until(worker._lock.locked, "the render waits for the worker")
            worker.stop()
            with pytest.raises(ServerError, match="the server stops"):
                waiting.result()
    finally:
        worker.stop()


def test_an_exchange_that_breaks_off_leaves_no_answer_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = process("{{ messages[0].content }}")

    def interrupted(*_: Any) -> bytes:
        raise MemoryError

    try:
        worker.start()
        with monkeypatch.context() as patch:
            patch.setattr(child_process, "_receive", interrupted)
            with pytest.raises(MemoryError):
                worker.render(TemplateInput([{"role": "user", "content": "a secret"}]))
        assert worker.render(TemplateInput([{"role": "user", "content": "another's"}])) == "another's"
    finally:
        worker.stop()


def test_why_a_worker_does_not_start_is_for_the_log(caplog: pytest.LogCaptureFixture) -> None:
    worker = process("{{ messages[0].content }}{% if %} a secret of the operator")
    with pytest.raises(ServerError) as caught:
        worker.render(TemplateInput(HELLO))
    assert "does not parse" not in caught.value.message
    assert "does not parse" in caplog.text


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{% if %}", "does not parse"),
        ("{% for a in messages %}" * 25 + "{% endfor %}" * 25, "does not parse"),
        ("{{ " + "1" * 5000 + " }}", "does not parse"),
        ("{{ " + "(" * 60000 + "1" + ")" * 60000 + " }}", "parse"),
        ("{{1}}" * 50000, "too"),
    ],
)
def test_a_template_that_cannot_be_compiled_is_one_line(source: str, reason: str) -> None:
    worker = process(source)
    with pytest.raises(ConfigError, match=reason):
        worker.start()
    assert worker.pid is None
