"""What is wrong with a template or a tokenizer ends the start, with one line that says what to do."""

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers import AddedToken

from jaxserve.api.app import check_chat_template, create_app, warm_up
from jaxserve.api.state import ServerState, check_template, check_vocabulary
from jaxserve.config import Config
from jaxserve.errors import ConfigError

from .fakes import FakeLink, fake_engine

PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"
RAISES = "{{ raise_exception('no') }}"
NO_TOOLS = PLAIN + "{% if tools %}{{ raise_exception('no tools') }}{% endif %}<tool_call>"


async def start(link: FakeLink, **model: Any) -> ServerState:
    config = Config().replace(model=model)
    engine, _ = fake_engine(config, link)
    await engine.start()
    state: ServerState = create_app(engine, config).state.server
    await engine.stop()
    return state


@pytest.fixture
def started() -> Iterator[Callable[..., ServerState]]:
    """The states of servers whose engines were ready."""
    with ExitStack() as stack:

        def make(link: FakeLink, **model: Any) -> ServerState:
            state = asyncio.run(start(link, **model))
            stack.callback(state.stop_rendering)
            return state

        yield make


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("/nothing/here.jinja", "neither a readable file nor a Jinja template"),
        ("{% if %}", "does not parse"),
        (RAISES, "trying a plain conversation"),
        ("{{ messages[7].content }}{{ undefined_name.x }}", "trying a plain conversation"),
        ("{% for i in range(99999999) %}{{ i }}{% endfor %}", "trying a plain conversation"),
    ],
)
def test_a_template_that_cannot_be_used(template: str, reason: str, started: Callable[..., ServerState]) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        check_template(started(FakeLink(), chat_template=template))
    assert caught.value.fix


def test_a_template_that_cannot_render_tools(
    caplog: pytest.LogCaptureFixture, started: Callable[..., ServerState]
) -> None:
    with pytest.raises(ConfigError, match="trying a conversation with tools"):
        check_template(started(FakeLink(), chat_template=NO_TOOLS, tool_parser="hermes"))
    check_template(started(FakeLink(), chat_template=NO_TOOLS, tool_parser="none"))
    assert "tools" not in caplog.text
    check_template(started(FakeLink(), chat_template=NO_TOOLS))
    assert "requests with tools will be refused" in caplog.text


def test_good_files_pass_in_silence(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, started: Callable[..., ServerState]
) -> None:
    path = tmp_path / "a.jinja"
    path.write_text(PLAIN)
    for model in ({}, {"chat_template": str(path)}):
        state = started(FakeLink(), **model)
        check_template(state)
        check_vocabulary(state)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_before_the_tokenizer_is_loaded_nothing_is_known() -> None:
    async def check() -> bool:
        engine, _ = fake_engine()
        return check_chat_template(create_app(engine, Config()))

    assert asyncio.run(check()) is False


@pytest.mark.parametrize("padded", [0, 64])
def test_a_model_with_a_larger_vocabulary_is_usual(padded: int, started: Callable[..., ServerState]) -> None:
    link = FakeLink()
    link.info = msgspec.structs.replace(link.info, vocab_size=link.info.vocab_size + padded)
    check_vocabulary(started(link))


def test_a_tokenizer_of_another_model() -> None:
    link = FakeLink()
    link.info = msgspec.structs.replace(link.info, vocab_size=link.info.vocab_size - 300)
    with pytest.raises(ConfigError, match="unknown to the model") as caught:
        asyncio.run(warm_up_of(link))
    assert "model.tokenizer" in str(caught.value.fix)


async def warm_up_of(link: FakeLink) -> None:
    engine, _ = fake_engine(link=link)
    await engine.start()
    app = create_app(engine, Config())
    try:
        await warm_up(app)
    finally:
        app.state.server.stop_rendering()
        await engine.stop()


@pytest.mark.parametrize("template", [None, PLAIN + "<added>"])
def test_an_added_special_token_without_a_row_is_an_error_only_if_it_is_used(
    template: str | None, caplog: pytest.LogCaptureFixture, started: Callable[..., ServerState]
) -> None:
    state = started(FakeLink(), chat_template=template)
    tokenizer: Any = state.engine.tokenizer
    tokenizer.backend.add_special_tokens([AddedToken("<added>", special=True)])
    changed = type(tokenizer)(tokenizer.backend, tokenizer.config, chat_templates=tokenizer.chat_templates)
    state.engine._tokenizer = changed  # type: ignore[attr-defined]
    if template is None:
        check_vocabulary(state)
        assert "1 special tokens of the tokenizer are unknown" in caplog.text
    else:
        with pytest.raises(ConfigError, match="unknown to the model"):
            check_vocabulary(state)


def test_a_late_system_message_must_be_taken_by_both_templates(
    monkeypatch: pytest.MonkeyPatch, started: Callable[..., ServerState]
) -> None:
    """A template for requests with tools that refuses it made Messages and Responses with tools a 400."""
    refusing = PLAIN + "{% if messages[1].role == 'system' %}{{ raise_exception('no') }}{% endif %}"
    for templates, takes in (({"default": PLAIN, "tool_use": refusing}, False), ({"default": PLAIN}, True)):
        state = started(FakeLink())
        monkeypatch.setattr(state.engine.tokenizer, "chat_templates", templates)
        assert state.takes_late_system is takes
