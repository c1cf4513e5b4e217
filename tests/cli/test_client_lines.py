"""The lines that point clients at the server: in the ready card and in docs/clients.md."""

import json
import shlex
from pathlib import Path

import msgspec

from jaxserve.cli.progress import LINES, agent_lines, client_line
from jaxserve.text.tokenizer import Tokenizer
from tests.api.fakes import DEMO, demo_info

URL = "http://127.0.0.1:8000"


def test_the_documents_show_the_same_lines() -> None:
    text = (Path(__file__).parents[2] / "docs" / "clients.md").read_text("utf-8")
    for client in LINES:
        assert f"- {client}: `{client_line(client, URL, 'NAME', 'KEY', 131_072)}`\n" in text


def test_agents_are_shown_if_their_prompts_fit() -> None:
    info = demo_info(Tokenizer.from_directory(DEMO))
    large = msgspec.structs.replace(info, max_model_len=131_072, served_names=["org/model", "model"])
    lines = agent_lines(large, URL, api_key=True)
    assert lines[0] == "in a shell with JAXSERVE_SERVER__API_KEY set to the server's key:"
    assert " ANTHROPIC_AUTH_TOKEN=$JAXSERVE_SERVER__API_KEY ANTHROPIC_MODEL=model " in lines[1]
    assert all(len(shlex.split(line)) > 3 for line in lines[1:])
    assert agent_lines(info, URL, api_key=True) == []
    assert agent_lines(msgspec.structs.replace(large, served_names=["it's"]), URL, api_key=False) == []
    assert agent_lines(msgspec.structs.replace(large, is_embedding=True), URL, api_key=False) == []


def variables(line: str) -> dict[str, str]:
    return dict(word.split("=", 1) for word in shlex.split(line) if word[0].isupper() and "=" in word)


def test_agents_are_told_the_model_of_each_kind_and_the_context() -> None:
    for context, compact in (
        (131_072, {"CLAUDE_CODE_AUTO_COMPACT_WINDOW": "131072"}),
        (65_536, {"CLAUDE_CODE_AUTO_COMPACT_WINDOW": "100000", "CLAUDE_AUTOCOMPACT_PCT_OVERRIDE": "52"}),
    ):
        found = variables(client_line("Claude Code", URL, "model", "none", context))
        assert {name: value for name, value in found.items() if "COMPACT" in name} == compact
        assert [
            found[f"ANTHROPIC_{name}MODEL"] for name in ("", *(f"DEFAULT_{k}_" for k in ("HAIKU", "SONNET", "OPUS")))
        ] == ["model"] * 4
        assert f"model_context_window={context}" in shlex.split(client_line("Codex", URL, "model", "none", context))
        config = variables(client_line("OpenCode", URL, "model", "none", context))["OPENCODE_CONFIG_CONTENT"]
        limit = {"context": context, "output": context // 4}
        assert json.loads(config)["provider"]["jaxserve"]["models"] == {"model": {"limit": limit}}


def test_a_key_in_a_quoted_text_is_read_by_the_program() -> None:
    config = variables(client_line("OpenCode", URL, "model", "$KEY", 65_536))["OPENCODE_CONFIG_CONTENT"]
    assert json.loads(config)["provider"]["jaxserve"]["options"]["apiKey"] == "{env:KEY}"
    config = variables(client_line("OpenCode", URL, "model", "none", 65_536))["OPENCODE_CONFIG_CONTENT"]
    assert json.loads(config)["provider"]["jaxserve"]["options"]["apiKey"] == "none"
