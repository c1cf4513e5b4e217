"""Every known field of every API is served, harmless to ignore, or refused by name: the table, and that it holds."""

from pathlib import Path
from typing import Any

import pytest

from docgen.fields import APIS, listed, reference, verdict
from jaxserve.api.known_fields import EVERYWHERE
from tests.api.conftest import LiveServer, reply_with

DOCS = Path(__file__).parents[2] / "docs"
CHAT: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
BODIES: dict[str, dict[str, Any]] = {
    "chat": CHAT,
    "completions": {"model": "demo", "prompt": "Hi", "max_tokens": 4},
    "embeddings": {"model": "demo", "input": "Hi"},
    "responses": {"model": "demo", "input": "Hi", "store": False},
    "messages": CHAT,
    "count_tokens": {name: CHAT[name] for name in ("model", "messages")},
    "ollama chat": {name: CHAT[name] for name in ("model", "messages")},
    "ollama generate": {"model": "demo", "prompt": "Hi"},
    "ollama embed": {"model": "demo", "input": "Hi"},
    "ollama embeddings": {"model": "demo", "prompt": "Hi"},
    "generate": {"text": "Hi"},
    "rerank": {"model": "demo", "query": "Hi", "documents": ["a"]},
    "score": {"model": "demo", "queries": "Hi", "documents": ["a"]},
    "classify": {"model": "demo", "input": "Hi"},
}
STREAMED = frozenset({"chat", "completions", "responses", "messages", "ollama chat", "ollama generate", "generate"})
ODD = {"odd": "value"}


def test_every_listed_field_has_a_verdict() -> None:
    unknown = [f"{api}: {path}" for api, path in listed() if verdict(APIS[api][1], path).kind == "unknown"]
    assert not unknown, "add them to a body, or to api/known_fields.py"
    assert len(listed()) > 1000 and listed() == list(dict.fromkeys(listed()))


def test_the_pages_are_those_of_the_table() -> None:
    pages = reference()
    assert {name: (DOCS / name).read_text("utf-8") for name in pages} == pages, "python -m docgen.fields"
    assert all(len(page.encode()) <= 30_000 for page in pages.values())


def test_no_field_has_two_verdicts() -> None:
    """What all routes refuse or ignore may be served by one; a route's own table has only what it does not serve."""
    for api, (_, model) in APIS.items():
        assert not model.known.refused.keys() & model.known.ignored, api
        own = (model.known.refused.keys() - EVERYWHERE.refused.keys()) | (model.known.ignored - EVERYWHERE.ignored)
        assert not own & model.model_fields.keys(), api


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", APIS)
def test_a_refused_field_is_a_400_that_names_it(server: LiveServer, api: str, stream: bool) -> None:
    if stream and api not in STREAMED:
        return
    route, model = APIS[api]
    more = {"stream": stream} if api in STREAMED else {}
    for name, refusal in model.known.refused.items():
        if name in model.model_fields:
            continue
        answer = server.post(route, BODIES[api] | more | {name: ODD})
        assert answer.status_code == 400, (name, answer.text)
        assert f"{name} is not supported: {refusal.reason}" in answer.text
        assert "unsupported_parameter" in answer.text or route.startswith(("/api/", "/v1/messages"))


def test_a_compaction_changes_no_count_of_tokens(server: LiveServer) -> None:
    counted = [server.post("/v1/messages/count_tokens", BODIES["count_tokens"] | keys).json() for keys in (
        {}, {"compaction": {"type": "summarize"}})]  # fmt: skip
    assert counted[0] == counted[1] and "input_tokens" in counted[0]


@pytest.mark.parametrize("api", ["chat", "completions", "responses", "messages", "ollama chat", "generate"])
def test_a_field_that_changes_nothing_is_taken_in_silence(
    server: LiveServer, api: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Fields that are harmless to ignore, and refused ones with a value that is not used."""
    route, model = APIS[api]
    reply_with(server, "word")
    silent: dict[str, Any] = dict.fromkeys(model.known.ignored - model.model_fields.keys(), ODD)
    for empty in (None, False, "", [], {}):
        unused = dict.fromkeys(model.known.refused.keys() - model.model_fields.keys(), empty)
        answer = server.post(route, BODIES[api] | silent | unused)
        assert answer.status_code == 200, answer.text
    neutral = {
        name: refusal.neutral[0]
        for name, refusal in model.known.refused.items()
        if refusal.neutral and name not in model.model_fields
    }
    assert server.post(route, BODIES[api] | neutral).status_code == 200
    assert "has no effect" not in caplog.text


@pytest.mark.parametrize("field, offer", [
    ("container", "container_1"), ("container", {"skills": [{"type": "anthropic", "skill_id": "pdf"}]}),
    ("mcp_servers", [{"type": "url", "url": "https://example.com", "name": "m"}]),
])  # fmt: skip
def test_what_only_offers_something_is_dropped_and_logged_once(
    caplog: pytest.LogCaptureFixture, field: str, offer: Any
) -> None:
    """What demands a call of it is a 400."""
    with LiveServer() as server:
        reply_with(server, "word")
        for _ in range(2):
            assert server.post("/v1/messages", BODIES["messages"] | {field: offer}).status_code == 200
        assert caplog.text.count(f"the field {field!r}") == 1
        toolset = {"type": "mcp_toolset", "mcp_server_name": "m"}
        for choice in ({"type": "any"}, {"type": "tool", "name": "m"}):
            body = BODIES["messages"] | {field: offer, "tools": [toolset], "tool_choice": choice}
            assert server.post("/v1/messages", body).status_code == 400


def message(**fields: Any) -> dict[str, Any]:
    return {"messages": [*CHAT["messages"], {"role": "assistant", "content": "x"} | fields]}


NESTED: list[tuple[str, dict[str, Any], str]] = [
    ("chat", message(prefix=True), "messages.1.prefix"),
    ("chat", message(partial=True), "messages.1.partial"),
    ("chat", message(images=["AAAA"]), "messages.1.images"),
    ("chat", {"reasoning": {"max_tokens": 5}}, "reasoning.max_tokens"),
    ("responses", {"reasoning": {"mode": "pro"}}, "reasoning.mode"),
    ("ollama chat", {"options": {"typical_p": 0.5}}, "options.typical_p"),
    ("ollama generate", {"options": {"dry_multiplier": 0.8}}, "options.dry_multiplier"),
    ("ollama chat", {"options": {"grammar": "root ::= x"}}, "options.grammar"),
    ("generate", {"sampling_params": {"typical_p": 0.5}}, "sampling_params.typical_p"),
    ("generate", {"sampling_params": {"grammar": "x"}}, "sampling_params.grammar"),
    ("generate", {"text": ["a", "b"], "sampling_params": [{}, {"max_tokens": 3}]}, "sampling_params.1.max_tokens"),
    ("messages", {"compaction": {"type": "summarize"}}, "compaction"),
]


@pytest.mark.parametrize(("api", "change", "param"), NESTED)
def test_a_refused_field_of_an_object_is_named_with_its_path(
    server: LiveServer, api: str, change: dict[str, Any], param: str
) -> None:
    answer = server.post(APIS[api][0], BODIES[api] | change)
    assert answer.status_code == 400 and f"{param} is not supported: " in answer.text, answer.text
    assert verdict(APIS[api][1], ".".join(part for part in param.split(".") if not part.isdigit())).kind == "refused"


def test_neutral_values_of_an_object_are_taken(server: LiveServer, caplog: pytest.LogCaptureFixture) -> None:
    """What Open WebUI and LangChain send by default."""
    options = {"mirostat": 0, "tfs_z": 1.0, "typical_p": 1, "num_gpu": 1, "num_thread": 8, "repeat_last_n": 64}
    assert server.post("/api/chat", BODIES["ollama chat"] | {"options": options}).status_code == 200
    assert "has no effect" not in caplog.text


SCHEMA = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}
OPEN = {"type": "object", "properties": {"a": {"const": 1}}}
STRICT = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": OPEN}}
SAME: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"grammar": 'root ::= "yes" | "no"'}, {"ebnf": 'root ::= "yes" | "no"'}),
    ({"grammar": {"type": "regex", "value": "[ab]+"}}, {"regex": "[ab]+"}),
    ({"grammar": {"type": "json", "value": SCHEMA}}, {"json_schema": SCHEMA}),
    ({"grammar": {"type": "json_schema", "value": {"name": "x", "schema": SCHEMA}}}, {"json_schema": SCHEMA}),
    ({"grammar": {"type": "json_object"}}, {"response_format": {"type": "json_object"}}),
    ({"format": "json"}, {"response_format": {"type": "json_object"}}),
    ({"format": SCHEMA}, {"json_schema": SCHEMA}),
    ({"format": OPEN}, {"response_format": STRICT}),
    ({"format": ""}, {}),
]


@pytest.mark.parametrize("api", ["chat", "completions"])
@pytest.mark.parametrize(("form", "ours"), SAME)
def test_a_constraint_in_another_servers_form_is_ours(
    server: LiveServer, api: str, form: dict[str, Any], ours: dict[str, Any]
) -> None:
    grammars = []
    for change in (form, ours):
        answer = server.post(APIS[api][0], BODIES[api] | change)
        assert answer.status_code == 200, answer.text
        grammars.append(server.link.seen[-1].params.grammar)
    assert grammars[0] == grammars[1] and (grammars[0] is None) == (not ours)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"grammar": {"type": "regex"}}, "grammar.value"),
        ({"grammar": {"type": "json_schema"}}, "grammar.value"),
        ({"grammar": {"type": "regex", "value": {"a": 1}}}, "grammar.value"),
        ({"grammar": {"type": "lark", "value": "x"}}, "grammar.type"),
        ({"grammar": "root ::= x", "regex": "a"}, None),
        ({"format": "json", "response_format": {"type": "json_object"}}, None),
        ({"format": "xml"}, "format"),
        ({"enable_thinking": True, "thinking": False}, "enable_thinking"),
        ({"thinking_budget": 5, "thinking_token_budget": 6}, "thinking_budget"),
    ],
)
def test_a_constraint_that_cannot_be_read_is_named(
    server: LiveServer, change: dict[str, Any], param: str | None
) -> None:
    answer = server.post("/v1/chat/completions", CHAT | change)
    assert answer.status_code == 400 and param in (None, answer.json()["error"]["param"]), answer.text


@pytest.mark.parametrize("on", [True, False])
def test_thinking_in_another_servers_form_is_ours(server: LiveServer, on: bool) -> None:
    prompts = []
    for change in ({"enable_thinking": on}, {"thinking": on}, {"chat_template_kwargs": {"enable_thinking": on}}):
        assert server.post("/v1/chat/completions", CHAT | change).status_code == 200
        prompts.append(server.link.seen[-1].prompt_token_ids)
    assert prompts[0] == prompts[1] == prompts[2]


def test_a_budget_of_thinking_in_another_servers_form_is_ours(server: LiveServer) -> None:
    forms: list[dict[str, Any]] = [
        {"thinking_token_budget": 7},
        {"thinking_budget": 7},
        {"thinking": {"type": "enabled", "budget_tokens": 7}},
    ]
    for change in forms:
        answer = server.post("/v1/chat/completions", CHAT | {"enable_thinking": True} | change)
        assert answer.status_code == 200, answer.text
        budget = server.link.seen[-1].params.thinking
        assert budget is not None and budget.tokens == 7
    off: list[dict[str, Any]] = [
        {"enable_thinking": False, "thinking_budget": 7},
        {"thinking": {"type": "disabled", "budget_tokens": 7}},
    ]
    for change in off:
        assert server.post("/v1/chat/completions", CHAT | change).status_code == 200
        assert server.link.seen[-1].params.thinking is None
