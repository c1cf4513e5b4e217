"""The lines that point clients at the server: in the ready card and in docs/clients.md."""

import shlex
from pathlib import Path

import msgspec

from jaxserve.cli.terminal.client_lines import LINES, agent_lines, client_line
from jaxserve.text.tokenizer import Tokenizer
from tests.api.fakes import DEMO, demo_info

URL = "http://127.0.0.1:8000"


def test_the_documents_show_the_same_lines() -> None:
    text = (Path(__file__).parents[2] / "docs" / "clients.md").read_text("utf-8")
    for client in LINES:
        assert f"- {client}: `{client_line(client, URL, 'NAME', 'KEY')}`\n" in text


def test_agents_are_shown_if_their_prompts_fit() -> None:
    info = demo_info(Tokenizer.from_directory(DEMO))
    large = msgspec.structs.replace(info, max_model_len=131_072, served_names=["org/model", "model"])
    lines = agent_lines(large, URL, api_key=True)
    assert lines[0].endswith("ANTHROPIC_AUTH_TOKEN=$JAXSERVE_SERVER__API_KEY ANTHROPIC_MODEL=model claude")
    assert all(len(shlex.split(line)) > 3 for line in lines)
    assert agent_lines(info, URL, api_key=True) == []
    assert agent_lines(msgspec.structs.replace(large, served_names=["it's"]), URL, api_key=False) == []
    assert agent_lines(msgspec.structs.replace(large, is_embedding=True), URL, api_key=False) == []
