"""Where a template is rendered: here if it is cheap by construction, else in a worker that is ended at its limits."""

import inspect
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxserve.errors import ConfigError, InvalidValueError, ServerError
from jaxserve.text import template_process
from jaxserve.text.chat_template import ChatTemplate
from jaxserve.text.plain_template import MAX_PLAIN_SECONDS, MAX_TEXT_CHARS
from jaxserve.text.renderer import LONG_BYTES, Renderer
from jaxserve.text.sandbox import RenderLimitError
from jaxserve.text.template_process import TemplateProcess
from jaxserve.text.template_worker import TemplateInput, TemplateSetup
from jaxserve.text.tokenizer import Tokenizer
from tests.waiting import LAST_RESORT

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
def test_both_places_write_the_same_prompt(demo: Renderer, messages: Any, tools: Any) -> None:
    conversation = TemplateInput(messages, tools, kwargs={"enable_thinking": True, "huge": 10**30})
    here = demo.render_here(conversation)
    assert here is not None and here == demo.render(conversation)


def test_what_has_no_room_on_the_stack_is_for_the_worker(demo: Renderer) -> None:
    """At every depth of the caller's stack the answer is the whole prompt, or that a worker has to tell it."""
    call = CALL | {"function": {"name": "f", "arguments": '{"a":' + "[" * 60 + "]" * 60 + "}"}}
    conversation = TemplateInput([HELLO[0], {"role": "assistant", "content": None, "tool_calls": [call]}], TOOLS)
    expected = demo.render(conversation)

    def below(depth: int) -> str | None:
        return below(depth - 1) if depth else demo.render_here(conversation)

    deepest = sys.getrecursionlimit() - len(inspect.stack(0)) - 10
    found = [below(depth) for depth in range(deepest - 160, deepest)]
    assert set(found) == {None, expected}


def test_both_places_refuse_alike(demo: Renderer) -> None:
    conversation = TemplateInput([{"role": "nobody", "content": "x"}])
    messages = set()
    for render in (demo.render_here, demo.render):
        with pytest.raises(InvalidValueError, match="Unknown role") as caught:
            render(conversation)
        messages.add((caught.value.message, caught.value.param))
    assert len(messages) == 1


def test_no_worker_runs_before_it_is_needed() -> None:
    renderer = Renderer.load(Tokenizer.from_directory(DEMO))
    assert renderer is not None
    assert renderer.render_here(TemplateInput(HELLO)) and renderer.process.pid is None


def test_a_long_conversation_delays_no_short_one() -> None:
    renderer = Renderer.load(Tokenizer.from_directory(DEMO))
    assert renderer is not None
    conversation = TemplateInput(HELLO)
    try:
        short = renderer.render(conversation, LONG_BYTES)
        assert renderer.long_process.pid is None, "it is started when it is needed"
        assert renderer.render(conversation, LONG_BYTES + 1) == short
        worker = renderer.long_process.pid
        assert worker is not None and worker != renderer.process.pid
        os.kill(worker, signal.SIGSTOP)
        assert renderer.render(conversation, LONG_BYTES) == short
    finally:
        renderer.stop()


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


def test_an_exchange_that_breaks_off_leaves_no_answer_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = process("{{ messages[0].content }}")

    def interrupted(*_: Any) -> bytes:
        raise MemoryError

    try:
        worker.start()
        with monkeypatch.context() as patch:
            patch.setattr(template_process, "_receive", interrupted)
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


@pytest.mark.parametrize("source", COSTLY)
def test_costly_templates_are_not_plain(source: str) -> None:
    template = ChatTemplate.load_plain(source)
    if template is not None:
        with pytest.raises(RenderLimitError):
            template.render(HELLO)


TEXT = "{% set n = namespace(x='aaaa<\\'') %}{% for i in range(64) %}{% set n.x = EXPR %}{% endfor %}{{ n.x|length }}"
LIST = "{% set n = namespace(x=messages) %}{% for i in range(64) %}{% set n.x = EXPR %}{% endfor %}{{ n.x|tojson }}"
TEXTS = ["n.x ~ n.x", "n.x + n.x", "n.x|tojson", "[n.x]|string", "n.x|replace('a', 'aa')", "n.x.replace('a', 'aa')"]
TEXTS += ["n.x.join(n.x)", "n.x|join(n.x)", "n.x * 2"]
LISTS = ["[n.x, n.x]", "n.x + n.x", "n.x * 2", "{'a': n.x, 'b': n.x}", "(n.x, n.x)", "namespace(a=n.x, b=n.x)"]
LISTS += ["{}.fromkeys(['a', 'b'], n.x)", "dict(a=n.x, b=n.x)"]
GROWING = [
    *(TEXT.replace("EXPR", each) for each in TEXTS),
    *(LIST.replace("EXPR", each) for each in LISTS),
    "{% set n = namespace() %}{% for i in range(64) %}{% set n.a = namespace(a=n.a, b=n.a) %}{% endfor %}{{ n }}",
    "{% macro f(n) %}{{ kwargs }}{{ f(n, a=kwargs, b=kwargs) }}{% endmacro %}{{ f(1, a=1) }}",
    "{% macro f(x) %}{{ x }}{{ x }}{% endmacro %}{% set n = namespace(x='aaaa') %}"
    "{% for i in range(64) %}{% set n.x = f(n.x) %}{% endfor %}",
    "{% macro f() %}{% for i in range(9999) %}" + "a" * 9000 + "{% endfor %}{% endmacro %}{{ f()|length }}",
    "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{% if messages == messages[:] %}{% endif %}{% endfor %}",
    "{{ range(99999)|list|length }}{{ range(99999)|list|length }}{{ range(99999)|list|length }}",
    "{% set n = namespace(x=3) %}{% for i in range(64) %}{% set n.x = n.x * n.x %}{% endfor %}{{ n.x }}",
    "{{ '%999d' % 1 }}",
    "{{ '{:>999}'.format(1) }}",
    "{{ [1, 2]|map('string')|list }}",
    "{% set x %}{{ messages }}{% endset %}{{ x }}",
    "{% set r = range(99999) %}{% set k = {}.keys() %}" + "{% set y = k - r %}" * 20,
    "{% set l = range(8000)|list %}{% set y = " + "l == l[:] == " * 1000 + "l %}",
    "{% set l = range(8000)|list %}{% macro f() %}" + "{{ l }}" * 100 + "{% endmacro %}{{ f()|length }}",
    "{{ '" + "a" * 90 + "'.strip(messages[0].content * 20) }}",
    "{{ -('" + "f" * 90 + "'|int(0, 16)) }}",
    "{{ ('" + "f" * 90 + "'|int(0, 16)) // 3 }}",
    "{{ messages[0].content|join('', attribute='" + ".".join("0" * 90) + "') }}",
    "{{ messages|tojson(separators=('" + "a" * 90 + "', ':')) }}",
]


@pytest.mark.parametrize("source", GROWING)
def test_what_grows_is_refused_here_within_the_time(source: str) -> None:
    """Asked for CPU time: ten times the limit and more would be a way around it."""
    template = ChatTemplate.load_plain(source)
    if template is None:
        return
    start = time.thread_time()
    with pytest.raises(RenderLimitError):
        template.render(HELLO)
    assert time.thread_time() - start < 10 * MAX_PLAIN_SECONDS


def test_a_long_prompt_is_for_the_worker(demo: Renderer) -> None:
    conversation = TemplateInput([{"role": "user", "content": "a" * MAX_TEXT_CHARS}])
    assert demo.render_here(conversation) is None
    assert len(demo.render(conversation)) > MAX_TEXT_CHARS


def test_published_templates_are_plain_and_write_the_same(shared_data: Any) -> None:
    """Three of four are; the rest go to the worker."""
    groups = json.loads((shared_data / "golden/chat_templates/hfjs_e2e.json").read_text())
    sources = [case["chat_template"] for group in groups.values() for case in group.values()]
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    plain = [
        (ChatTemplate(source, special_tokens=names), ChatTemplate.load_plain(source, special_tokens=names))
        for source in sources
    ]
    rendered = 0
    for full, template in plain:
        if template is None:
            continue
        try:
            here = template.render(HELLO)
        except (RenderLimitError, InvalidValueError):
            continue
        rendered += 1
        assert here == full.render(HELLO)
    assert rendered > 0.75 * len(sources)
