"""System messages after the first turn stay in their place, so that each request finds the one before in the cache."""

from collections.abc import Iterator
from itertools import pairwise, takewhile
from typing import Any

import pytest

from jaxserve.api.generate.tools import in_place
from jaxserve.config import Config
from tests.api.agent_turns import FORMS, REFUSES, SYSTEM, TAKES, template
from tests.api.conftest import LiveServer, reply_with, serving

TURNS = 20


@pytest.fixture(scope="module", params=[REFUSES, TAKES], ids=["refuses", "takes"])
def agents_server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    path = tmp_path_factory.mktemp("template") / "chat_template.jinja"
    path.write_text(template(request.param))
    with (
        LiveServer(Config().replace(model={"chat_template": str(path)})) as server,
        serving(server, max_model_len=65536),
    ):
        assert server.app.state.server.takes_late_system == (request.param == TAKES)
        reply_with(server, "word")
        yield server


def num_common(first: list[int], second: list[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


@pytest.mark.parametrize("path", FORMS)
def test_a_request_has_the_one_before_as_its_prefix(agents_server: LiveServer, path: str) -> None:
    prompts = []
    for number in range(TURNS):
        answer = agents_server.post(path, FORMS[path](number))
        assert answer.status_code == 200, answer.text
        prompts.append(agents_server.link.seen[-1].prompt_token_ids)
    for before, after in pairwise(prompts):
        assert num_common(before, after) >= 0.99 * len(before)
    text = agents_server.engine.tokenizer.decode(prompts[-1], skip_special_tokens=False)
    places = [text.index(f"The list has {number} things to do.") for number in range(TURNS - 1)]
    results = [text.index(f"def f_{number}()") for number in range(TURNS - 1)]
    assert all(result < place for result, place in zip(results, places, strict=True))
    assert all(place < result for place, result in zip(places, results[1:], strict=False))
    assert text.count(SYSTEM.strip()) == 1 and "billing" not in text


SAID = {
    "user": {"role": "user", "content": "U"},
    "assistant": {"role": "assistant", "content": "A"},
    "tool": {"role": "tool", "tool_call_id": "1", "content": "T"},
    "system": {"role": "system", "content": "S"},
    "developer": {"role": "developer", "content": "D"},
    "parts": {"role": "user", "content": [{"type": "text", "text": "P"}]},
    "empty": {"role": "system", "content": ""},
}
PLACES = [
    ("system developer user", "system:S\nD user:U"),
    ("system user system", "system:S user:U\nS"),
    ("user system assistant", "user:U\nS assistant:A"),
    ("user system user", "user:U\nS\nU"),
    ("user assistant tool system assistant", "user:U assistant:A tool:T\nS assistant:A"),
    ("user assistant tool system developer user", "user:U assistant:A tool:T\nS\nD user:U"),
    ("user assistant system user", "user:U assistant:A user:S\nU"),
    ("user assistant system", "user:U assistant:A user:S"),
    ("user assistant system system user assistant user", "user:U assistant:A user:S\nS\nU assistant:A user:U"),
    ("parts system", "user:P+S"),
    ("parts system user", "user:P+S+U"),
    ("user empty assistant", "user:U assistant:A"),
    ("system", "system:S"),
    ("", ""),
]


@pytest.mark.parametrize(("given", "expected"), PLACES)
def test_the_place_of_a_late_system_message(given: str, expected: str) -> None:
    messages = [SAID[name] for name in given.split()]
    assert " ".join(f"{each['role']}:{_shown(each['content'])}" for each in in_place(messages)) == expected


def _shown(content: Any) -> str:
    return content if isinstance(content, str) else "+".join(part["text"] for part in content)
