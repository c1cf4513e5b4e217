"""The server's own counts of cached tokens over an agent's turns, with a reminder after every result of a tool."""

from pathlib import Path

import httpx2
import pytest

from jaxserve.library.serving import launch_server
from tests.api.agent_turns import FORMS, REFUSES, TAKES, template
from tests.conftest import SMALL

TURNS = 20
PAGE = 16  # tokens; a prefix is cached in whole pages


def _tokens(path: str, answer: dict) -> tuple[int, int]:
    """(prompt tokens, those of them that were cached)"""
    usage = answer["usage"]
    if path == "/v1/messages":
        cached = usage["cache_read_input_tokens"]
        return usage["input_tokens"] + cached, cached
    name = "input" if path == "/v1/responses" else "prompt"
    return usage[f"{name}_tokens"], usage[f"{name}_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("late", [REFUSES, TAKES], ids=["refuses", "takes"])
def test_every_turn_finds_the_turn_before_in_the_cache(late: str, compile_cache: str, tmp_path: Path) -> None:
    path = tmp_path / "chat_template.jinja"
    path.write_text(template(late))
    with (
        launch_server(compile_cache=compile_cache, chat_template=str(path), **SMALL) as server,
        httpx2.Client(base_url=server.url, timeout=300) as http,
    ):
        for route in ("/v1/messages", "/v1/chat/completions", "/v1/responses"):
            before = 0
            for number in range(TURNS):
                answer = http.post(route, json=FORMS[route](number))
                assert answer.status_code == 200, answer.text
                prompt, cached = _tokens(route, answer.json())
                assert cached >= 0.99 * before - PAGE, (route, number, prompt, cached)
                before = prompt
            assert before > 40 * TURNS
