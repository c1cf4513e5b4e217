"""Every error in OpenAI's shape, with the right status and the field's name, on every route."""

import codecs
import json
import re
import time
from typing import Any

import pytest

from jaxserve.api.http.errors import error_response
from jaxserve.api.state import ServerState
from jaxserve.config import Config
from jaxserve.errors import HTTPError, NotReadyError, QueueFullError

from .conftest import LiveServer
from .fakes import MAX_MODEL_LEN

CHAT = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}]}
TEXT = {"model": "demo", "prompt": "Hi"}
UNFORMED = {"type": "custom", "custom": {"name": "f", "format": {"type": "grammar"}}}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


def with_part(part: dict[str, Any]) -> dict[str, Any]:
    return CHAT | {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, part]}]}


def check(response: Any, status: int, param: str | None, code: str | None = None) -> None:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param and error["message"]
    assert error["type"] == ("invalid_request_error" if status < 500 else "server_error")
    if code is not None:
        assert error["code"] == code
    assert response.headers["x-request-id"]


CASES: list[tuple[str, Any, int, str | None, str | None]] = [
    ("chat/completions", {"messages": CHAT["messages"]}, 400, "model", "missing_required_parameter"),
    ("chat/completions", {"model": "demo"}, 400, "messages", "missing_required_parameter"),
    ("chat/completions", CHAT | {"messages": []}, 400, "messages", None),
    ("chat/completions", CHAT | {"messages": "hi"}, 400, "messages", "invalid_type"),
    ("chat/completions", CHAT | {"messages": [{"role": "king", "content": "x"}]}, 400, "messages.0.role", None),
    ("chat/completions", CHAT | {"messages": [{"role": "user", "content": 5}]}, 400, "messages.0.content", None),
    ("chat/completions", CHAT | {"messages": [{"role": "user"}]}, 400, "messages.0.content", None),
    ("chat/completions", CHAT | {"model": "gpt-9"}, 404, "model", "model_not_found"),
    ("chat/completions", CHAT | {"temperature": "hot"}, 400, "temperature", "invalid_type"),
    ("chat/completions", CHAT | {"temperature": 2.1}, 400, "temperature", "invalid_value"),
    ("chat/completions", CHAT | {"n": 0}, 400, "n", None),
    ("chat/completions", CHAT | {"top_logprobs": 3}, 400, "top_logprobs", None),
    ("chat/completions", CHAT | {"stream_options": {"include_usage": True}}, 400, "stream_options", None),
    ("chat/completions", CHAT | {"modalities": ["text", "audio"]}, 400, "modalities", "unsupported_parameter"),
    ("chat/completions", CHAT | {"web_search_options": {"x": 1}}, 400, "web_search_options", "unsupported_parameter"),
    ("chat/completions", CHAT | {"chat_template": "{{ x }}"}, 400, "chat_template", "unsupported_parameter"),
    ("chat/completions", CHAT | {"logit_bias": {"x": 1}}, 400, "logit_bias", None),
    ("chat/completions", CHAT | {"logit_bias": {"99999999": 1}}, 400, "logit_bias", None),
    ("chat/completions", CHAT | {"logit_bias": {"5": 101}}, 400, "logit_bias.5", None),
    ("chat/completions", CHAT | {"allowed_token_ids": []}, 400, "allowed_token_ids", None),
    ("chat/completions", CHAT | {"metadata": {"k" * 65: "v"}}, 400, "metadata." + "k" * 65, None),
    ("chat/completions", CHAT | {"metadata": {"k": "v" * 513}}, 400, "metadata.k", None),
    ("chat/completions", CHAT | {"safety_identifier": "x" * 129}, 400, "safety_identifier", None),
    ("chat/completions", CHAT | {"truncate_prompt_tokens": 0}, 400, "truncate_prompt_tokens", None),
    ("chat/completions", CHAT | {"tools": [UNFORMED]}, 400, "tools.0.custom.format.grammar", None),
    ("chat/completions", CHAT | {"stop": ["x"] * 33}, 400, "stop", None),
    ("chat/completions", CHAT | {"stop_regex": "(a"}, 400, "stop_regex", None),
    ("chat/completions", CHAT | {"min_tokens": 9, "max_tokens": 8}, 400, "min_tokens", None),
    ("chat/completions", CHAT | {"chat_template_kwargs": {"messages": []}}, 400, "chat_template_kwargs", None),
    ("chat/completions", with_part(IMAGE), 400, "messages.0.content.1", "unsupported_parameter"),
    ("chat/completions", with_part({"type": "file", "file": {}}), 400, "messages.0.content.1", None),
    ("chat/completions", with_part({"type": "odd"}), 400, "messages.0.content.1.type", None),
    ("completions", {"model": "demo"}, 400, "prompt", "missing_required_parameter"),
    ("completions", TEXT | {"prompt": ""}, 400, "prompt", None),
    ("completions", TEXT | {"prompt": []}, 400, "prompt", None),
    ("completions", TEXT | {"prompt": [[]]}, 400, "prompt", None),
    ("completions", TEXT | {"prompt": [1, "a"]}, 400, "prompt.0", None),
    ("completions", TEXT | {"prompt": [10**6]}, 400, "prompt", None),
    ("completions", TEXT | {"prompt": [-1]}, 400, "prompt.0", None),
    ("completions", TEXT | {"prompt": [5] * MAX_MODEL_LEN}, 400, "prompt", "context_length_exceeded"),
    ("completions", TEXT | {"prompt": "word " * 5000}, 400, "prompt", "context_length_exceeded"),
    ("completions", TEXT | {"best_of": 1, "n": 2}, 400, "best_of", None),
    ("completions", TEXT | {"best_of": 2, "stream": True}, 400, "best_of", None),
    ("completions", TEXT | {"prompt_embeds": "AAAA"}, 400, "prompt_embeds", "unsupported_parameter"),
    ("completions", [1, 2], 400, None, None),
]


@pytest.mark.parametrize(("route", "body", "status", "param", "code"), CASES)
def test_bad_bodies(
    server: LiveServer, route: str, body: Any, status: int, param: str | None, code: str | None
) -> None:
    check(server.post(f"/v1/{route}", body), status, param, code)


LONG = [5] * (MAX_MODEL_LEN + 9)
LONG_CHAT = CHAT | {"messages": [{"role": "user", "content": "word " * 5000}]}
TOO_LONG: list[tuple[str, dict[str, Any], str, str]] = [
    ("/v1/chat/completions", LONG_CHAT, "messages", "messages"),
    ("/v1/chat/completions", CHAT | {"input_ids": LONG}, "input_ids", "prompt"),
    ("/v1/completions", TEXT | {"prompt": LONG}, "prompt", "prompt"),
    ("/v1/completions", TEXT | {"prompt": LONG[:MAX_MODEL_LEN]}, "prompt", "prompt"),
    ("/generate", {"input_ids": LONG}, "input_ids", "prompt"),
    ("/generate", {"text": "word " * 5000}, "text", "prompt"),
    ("/v1/embeddings", {"model": "demo", "input": LONG}, "input", "input"),
]


@pytest.mark.parametrize(("route", "body", "param", "noun"), TOO_LONG)
def test_a_prompt_that_is_too_long_in_the_words_that_clients_read(
    server: LiveServer, route: str, body: dict[str, Any], param: str, noun: str
) -> None:
    response = server.post(route, body)
    check(response, 400, param, "context_length_exceeded")
    message = response.json()["error"]["message"]
    words = re.fullmatch(
        rf"This model's maximum context length is {MAX_MODEL_LEN} tokens, and the prompt is too long: (\d+) tokens > "
        rf"(\d+) maximum\. Please reduce the length of the {noun}\.",
        message,
    )
    assert words is not None, message
    assert int(words[1]) > int(words[2]) == MAX_MODEL_LEN - (route != "/v1/embeddings")


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/v1/completions", {"model": "demo", "max_tokens": 0, "echo": True, "logprobs": 1}),
        ("/v1/completions", {"model": "demo", "max_tokens": 0, "echo": True, "stream": True}),
        ("/v1/completions", {"model": "demo", "max_tokens": 1}),
        ("/generate", {"sampling_params": {"max_new_tokens": 0}, "return_logprob": True, "logprob_start_len": 0}),
        ("/generate", {"sampling_params": {"max_new_tokens": 1}}),
    ],
)
def test_the_longest_prompt_is_the_one_that_the_error_names(
    server: LiveServer, route: str, body: dict[str, Any]
) -> None:
    """A prompt of which nothing is generated may fill the context."""
    name = "prompt" if route == "/v1/completions" else "input_ids"
    refused = server.post(route, body | {name: [5] * (MAX_MODEL_LEN + 1)}).json()["error"]["message"]
    found = re.search(r"tokens > (\d+) maximum", refused)
    assert found is not None
    longest = int(found[1])
    assert longest == MAX_MODEL_LEN - body.get("sampling_params", {}).get("max_new_tokens", body.get("max_tokens"))
    answer = server.post(route, body | {name: [5] * longest})
    assert answer.status_code == 200, answer.text
    assert f"tokens > {longest} maximum" in server.post(route, body | {name: [5] * (longest + 1)}).text
    if body.get("logprobs"):
        choice, usage = answer.json()["choices"][0], answer.json()["usage"]
        assert len(choice["logprobs"]["token_logprobs"]) == MAX_MODEL_LEN == usage["total_tokens"]
    elif body.get("return_logprob"):
        assert len(answer.json()["meta_info"]["input_token_logprobs"]) == MAX_MODEL_LEN


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions", "/generate"])
@pytest.mark.parametrize("raw", [b"", b"not json", b'{"model":', b"\xff\xfe", b"[" * 10_000, b'"text"', b"null"])
def test_a_body_that_is_no_json_object(server: LiveServer, route: str, raw: bytes) -> None:
    response = server.http.post(route, content=raw, headers={"content-type": "application/json"})
    check(response, 400, None)


def test_a_mistake_in_the_json_names_the_field(server: LiveServer) -> None:
    """JavaScript that cuts a text between the two halves of an emoji sends one half."""
    raw = b'{"model": "demo", "messages": [{"role": "user", "content": "cut \\ud83d"}]}'
    response = server.http.post("/v1/chat/completions", content=raw, headers={"content-type": "application/json"})
    check(response, 400, "content", "invalid_json")
    assert "half of a character" in response.json()["error"]["message"]


def test_a_byte_order_mark_is_no_mistake(server: LiveServer) -> None:
    raw = codecs.BOM_UTF8 + json.dumps(CHAT).encode()
    for path in ("/v1/chat/completions", "/api/chat"):
        response = server.http.post(path, content=raw, headers={"content-type": "application/json"})
        assert response.status_code == 200, response.text


def test_a_whole_number_may_be_written_as_a_float(server: LiveServer) -> None:
    assert server.post("/v1/chat/completions", CHAT | {"max_tokens": 4.0, "stop_token_ids": [5, 6.0]}).is_success
    params = server.link.seen[-1].params
    assert (params.max_tokens, params.stop_token_ids) == (4, (5, 6))
    ollama = {"model": "demo", "messages": CHAT["messages"], "options": {"num_predict": 3.0, "seed": 2.0}}
    assert server.post("/api/chat", ollama).is_success
    params = server.link.seen[-1].params
    assert (params.max_tokens, params.seed) == (3, 2)
    for wrong in (4.5, "4", True, 1e30):
        check(server.post("/v1/chat/completions", CHAT | {"max_tokens": wrong}), 400, "max_tokens")


def test_a_body_that_does_not_say_it_is_json(server: LiveServer) -> None:
    check(server.http.post("/v1/completions", content=b"{}", headers={"content-type": "text/plain"}), 400, None)


def test_unknown_routes_and_methods(server: LiveServer) -> None:
    check(server.http.get("/v1/nothing"), 404, None, "not_found")
    response = server.http.get("/v1/completions")
    check(response, 405, None, "method_not_allowed")
    assert response.headers["allow"] == "POST"
    check(server.http.get("/v1/models/none/such"), 404, "model", "model_not_found")


@pytest.mark.parametrize(
    ("method", "path", "meant"),
    [
        ("POST", "/chat/completions", "/v1/chat/completions"),
        ("POST", "/v1/v1/chat/completions", "/v1/chat/completions"),
        ("POST", "/v1/chat/completions/chat/completions", "/v1/chat/completions"),
        ("POST", "/v1/chat/completions/v1/chat/completions", "/v1/chat/completions"),
        ("POST", "/api/v1/completions", "/v1/completions"),
        ("POST", "//v1/embeddings", "/v1/embeddings"),
        ("POST", "/v1/chat//completions/", "/v1/chat/completions"),
        ("POST", "/v1/chat/completions%20", "/v1/chat/completions"),
        ("GET", "/models", "/v1/models"),
        ("GET", "/v1/v1/models/org/demo", "/v1/models/org/demo"),
        ("POST", "/v1/generate", "/generate"),
        ("GET", "/v1/health", "/health"),
    ],
)
def test_a_wrong_base_url_is_told_the_path_that_was_meant(
    server: LiveServer, method: str, path: str, meant: str
) -> None:
    response = server.http.request(method, server.url + path, json={} if method == "POST" else None)
    check(response, 404, None, "not_found")
    message = response.json()["error"]["message"]
    assert f"Did you mean {meant}? The base URL of an OpenAI client ends with /v1" in message


READ = ["/health", "/live", "/metrics", "/", "/version", "/v1/models", "/v1/models/demo", "/server_info", "/docs"]


@pytest.mark.parametrize("path", [*READ, "/openapi.json", "/api/version", "/api/tags", "/api/ps"])
def test_head_is_answered_as_get(server: LiveServer, path: str) -> None:
    whole, head = server.http.get(path), server.http.head(path)
    assert (head.status_code, head.content) == (whole.status_code, b"") == (200, b"")
    assert head.headers["content-type"] == whole.headers["content-type"]
    assert head.headers["content-length"] == str(len(whole.content)) or path in ("/metrics", "/server_info", "/health")


def test_head_of_a_route_without_get(server: LiveServer) -> None:
    answer = server.http.head("/v1/chat/completions")
    assert answer.status_code == 405 and answer.headers["allow"] == "POST"


@pytest.mark.parametrize(
    ("path", "methods"),
    [
        *((path, "GET, HEAD") for path in ("/v1/models", "/health", "/api/tags", "/metrics", "/")),
        ("/v1/chat/completions", "POST"),
    ],
)
def test_allow_names_every_method_of_the_path(server: LiveServer, path: str, methods: str) -> None:
    for method in ("PATCH", "OPTIONS"):
        answer = server.http.request(method, path)
        assert (answer.status_code, answer.headers["allow"]) == (405, methods)


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/v1/models/", None),
        ("GET", "/v1/models/org/demo/", None),
        ("POST", "/v1/chat/completions/", CHAT),
        ("POST", "/v1/completions/", TEXT),
        ("POST", "/v1/embeddings/", {"model": "demo", "input": "Hi"}),
        ("POST", "/v1/messages/", CHAT | {"max_tokens": 4}),
        ("POST", "/v1/responses/", {"input": "Hi", "store": False}),
        ("POST", "/api/chat/", CHAT),
        ("POST", "/generate/", {"text": "Hi"}),
        ("GET", "/api/tags/?x=1", None),
    ],
)
def test_a_slash_at_the_end_is_ignored(server: LiveServer, method: str, path: str, body: Any) -> None:
    answer = server.http.request(method, path, json=body)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("status", [400, 401, 403, 404, 405, 413, 415, 429, 503])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses", "/api/chat", "/generate"])
def test_only_what_may_succeed_later_is_sent_again(path: str, status: int) -> None:
    """The SDKs of OpenAI and Anthropic read the header before their own rules."""
    kind: type[HTTPError] = type("Failure", (HTTPError,), {"status": status})
    error = QueueFullError("full") if status == 429 else NotReadyError("loads") if status == 503 else kind("no")
    headers = error_response(error, {"path": path}).headers
    assert ("x-should-retry" in headers, "retry-after" in headers) == (status < 429, status >= 429)


@pytest.mark.parametrize("path", ["/nowhere", "/v1", "/v1/completion", "/chat/completions" + "/x" * 20, "/" + "/" * 40])
def test_a_path_like_no_route_gets_no_suggestion(server: LiveServer, path: str) -> None:
    response = server.http.post(server.url + path, json={})
    check(response, 404, None, "not_found")
    assert "Did you mean" not in response.json()["error"]["message"]


def test_a_client_of_anthropic_is_told_no_path_of_another_api(server: LiveServer) -> None:
    meant = server.http.post("/v1/messages/v1/messages", json={}).json()["error"]["message"]
    assert "Did you mean /v1/messages?" in meant
    response = server.http.post("/v1/messages/batches", json={})
    assert response.status_code == 404 and response.json()["error"]["type"] == "not_found_error"
    assert "Did you mean" not in response.json()["error"]["message"]


def test_a_bug_is_a_500_without_details(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    state = server.app.state.server

    def broken(name: str) -> str:
        raise RuntimeError("secret path /home/x")

    monkeypatch.setattr(state, "check_model", broken)
    response = server.post("/v1/completions", TEXT)
    check(response, 500, None, "internal_error")
    assert "secret" not in response.text


def test_unknown_fields_pass_and_are_logged_once(server: LiveServer, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        assert server.post("/v1/completions", TEXT | {"brand_new_field": 1, "bad\nname": 2}).status_code == 200
    assert [r.getMessage() for r in caplog.records if "brand_new_field" in r.getMessage()] == [
        "/v1/completions: the field 'brand_new_field' is not served here and has no effect"
    ]
    assert "bad" not in caplog.text


def test_unknown_fields_of_nested_objects_are_logged_once(server: LiveServer, caplog: pytest.LogCaptureFixture) -> None:
    part = {"type": "text", "text": "x", "odd_part": 1}
    called = {"id": "a", "index": 0, "function": {"name": "f", "arguments": "{}", "odd_call": 1}}
    messages = [
        {"role": "user", "content": [part], "odd_message": 1},
        {"role": "assistant", "content": "y", "annotations": [], "audio": None, "tool_calls": [called]},
        {"role": "user", "content": [part, part], "odd_message": 1},
    ]
    keys: dict[str, Any] = {
        "stream_options": {"include_usage": True, "odd_option": 1},
        "response_format": {"type": "text", "odd_format": 1},
        "tools": [{"type": "function", "function": {"name": "f", "odd_function": 1}}],
    }
    for _ in range(2):
        assert server.post("/v1/chat/completions", CHAT | {"messages": messages, "stream": True} | keys).is_success
    tag = {"type": "structural_tag", "triggers": ["<odd"], "structures": [{"begin": "<odd>", "end": "</odd>"}]}
    assert server.post("/v1/chat/completions", CHAT | {"response_format": tag}).status_code == 200
    assert server.post("/generate", {"text": "x", "sampling_params": {"odd_sampling": 1}}).status_code == 200
    noted = [record.getMessage() for record in caplog.records if "is not served here" in record.getMessage()]
    assert sorted(re.findall(r"'(.*)'", "\n".join(noted))) == [
        *("messages.content.odd_part", "messages.odd_message", "messages.tool_calls.function.odd_call"),
        *("response_format.odd_format", "sampling_params.odd_sampling", "stream_options.odd_option"),
        "tools.function.odd_function",
    ]


def test_null_is_absent(server: LiveServer) -> None:
    nulls = dict.fromkeys(
        ("temperature", "top_p", "n", "stop", "logit_bias", "seed", "logprobs", "stream", "stream_options", "user")
    )
    assert server.post("/v1/completions", TEXT | nulls).status_code == 200
    assert server.post("/v1/chat/completions", CHAT | nulls | {"tools": None, "audio": None}).status_code == 200


HOSTILE: list[tuple[str, dict[str, Any], str]] = [
    ("completions", {"prompt": [{}] * 16_000}, "prompt.0"),
    ("completions", {"prompt": [[1, "a"]] * 39_000}, "prompt.0.1"),
    ("completions", TEXT | {"logit_bias": dict.fromkeys(map(str, range(39_000)), "x")}, "logit_bias.0"),
    ("chat/completions", CHAT | {"stop": [1] * 150_000}, "stop.0"),
    ("chat/completions", {"messages": CHAT["messages"] * 13_000}, "messages"),
]


@pytest.mark.parametrize(
    ("route", "fields", "param"), HOSTILE, ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_body_of_many_mistakes_holds_up_nobody(
    server: LiveServer, route: str, fields: dict[str, Any], param: str
) -> None:
    """The first of them is named. Wording each took 7 s of the whole server's time."""
    data = json.dumps({"model": "demo"} | fields).encode()
    started = time.process_time()
    response = server.http.post(f"/v1/{route}", content=data, headers={"content-type": "application/json"})
    assert time.process_time() - started < 5  # CPU seconds, beside whatever else runs; about 0.1 alone
    check(response, 400, param)


def test_a_page_of_an_allowed_origin_can_read_every_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer without the header is a failed connection to the page. The last error is that of a bug."""
    config = Config().replace(server={"cors_origins": ["http://page"], "api_key": "k"})
    with LiveServer(config) as server:
        headers = {"Origin": "http://page", "Authorization": "Bearer k"}
        answers = [server.http.get("/v1/models", headers={"Origin": "http://page"})]
        answers += [server.http.get(path, headers=headers) for path in ("/v1/models", "/nowhere", "/v1/completions")]
        answers += [server.http.post("/v1/completions", headers=headers, json={})]
        monkeypatch.setattr(ServerState, "check_generates", None)
        answers += [server.http.post("/v1/completions", headers=headers, json=TEXT)]
        assert [answer.status_code for answer in answers] == [401, 200, 404, 405, 400, 500]
        for answer in answers:
            assert answer.headers.get("access-control-allow-origin") == "http://page", answer.status_code
            assert answer.headers["x-request-id"]
        other = server.http.get("/v1/models", headers=headers | {"Origin": "http://other"})
        assert "access-control-allow-origin" not in other.headers
