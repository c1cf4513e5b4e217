"""Every sampling field reaches the engine; what is unset takes the model's generation_config."""

from typing import Any

import msgspec
import orjson
import pytest

from jaxserve.config import Config

from .conftest import LiveServer, reply_with

CHAT: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}]}
TEXT: dict[str, Any] = {"model": "demo", "prompt": "Hi"}

# body field, value, SamplingParams field, value there
FIELDS: list[tuple[str, Any, str, Any]] = [
    ("temperature", 0.5, "temperature", 0.5),
    ("top_p", 0.9, "top_p", 0.9),
    ("top_k", 7, "top_k", 7),
    ("top_k", -1, "top_k", 0),
    ("min_p", 0.1, "min_p", 0.1),
    ("frequency_penalty", -0.5, "frequency_penalty", -0.5),
    ("presence_penalty", 0.5, "presence_penalty", 0.5),
    ("repetition_penalty", 1.1, "repetition_penalty", 1.1),
    ("seed", 5, "seed", 5),
    ("seed", -2, "seed", 2**63 - 2),
    ("logit_bias", {"5": -100, "6": 0.5}, "logit_bias", {5: -100.0, 6: 0.5}),
    ("allowed_token_ids", [5, 6], "allowed_token_ids", (5, 6)),
    ("min_tokens", 3, "min_tokens", 3),
    ("ignore_eos", True, "ignore_eos", True),
    ("stop", "END", "stop", ("END",)),
    ("stop", ["a", "b"], "stop", ("a", "b")),
    ("stop_token_ids", [5], "stop_token_ids", (5,)),
    ("stop_regex", "a+b", "stop_regex", ("a+b",)),
    ("include_stop_str_in_output", True, "include_stop_str_in_output", True),
    ("no_stop_trim", True, "include_stop_str_in_output", True),
    ("skip_special_tokens", False, "skip_special_tokens", False),
    ("spaces_between_special_tokens", False, "spaces_between_special_tokens", False),
    ("prompt_logprobs", 3, "prompt_logprobs", 3),
]


@pytest.mark.parametrize(("field", "value", "name", "expected"), FIELDS)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_field_reaches_the_engine(
    server: LiveServer, path: str, field: str, value: Any, name: str, expected: Any
) -> None:
    body = (CHAT if "chat" in path else TEXT) | {field: value, "max_tokens": 4}
    assert server.post(path, body).status_code == 200
    assert getattr(server.link.seen[-1].params, name) == expected


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT | {"seed": -1}),
        ("/v1/responses", {"model": "demo", "input": "hi", "seed": -1}),
        ("/api/chat", CHAT | {"options": {"seed": -1}, "stream": False}),
        ("/generate", {"text": "hi", "sampling_params": {"sampling_seed": -1}}),
    ],
)
def test_a_seed_of_minus_one_is_drawn_as_on_other_servers(server: LiveServer, path: str, body: dict[str, Any]) -> None:
    for _ in range(2):
        assert server.post(path, body).status_code == 200
    first, second = (request.params.seed for request in server.link.seen[-2:])
    assert first != second


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_bad_words_are_banned_with_and_without_a_space(server: LiveServer, path: str) -> None:
    encode = server.link.tokenizer.encode
    server.post(path, (CHAT if "chat" in path else TEXT) | {"bad_words": ["Paris"], "max_tokens": 2})
    words = server.link.seen[-1].params.bad_words_token_ids
    assert set(words) == {tuple(encode("Paris")), tuple(encode(" Paris"))}


def test_the_native_names(server: LiveServer) -> None:
    sampling = {"max_new_tokens": 9, "min_new_tokens": 2, "sampling_seed": 4, "n": 2, "top_k": 3}
    server.post("/generate", {"text": "x", "sampling_params": sampling})
    params = server.link.seen[-1].params
    assert (params.max_tokens, params.min_tokens, params.top_k) == (9, 2, 3)
    assert [request.params.seed for request in server.link.seen[-2:]] == [4, 5]
    server.post("/generate", {"text": "x"})
    assert server.link.seen[-1].params.max_tokens == 128


def test_priority_cache_salt_and_id(server: LiveServer) -> None:
    server.post("/v1/completions", TEXT | {"priority": -3, "cache_salt": "s", "extra_key": "t", "rid": "mine"})
    request = server.link.seen[-1]
    assert (request.priority, request.client_id) == (-3, "mine")


def test_requests_share_prefixes_where_salt_and_key_are_the_same(server: LiveServer) -> None:
    def namespace(**fields: str) -> str:
        server.post("/v1/completions", TEXT | fields)
        return server.link.seen[-1].namespace

    both = namespace(cache_salt="tenant1", extra_key="x")
    others = [{}, {"cache_salt": "tenant", "extra_key": "1x"}, {"cache_salt": "tenant1x"}, {"cache_salt": "7:tenant1x"}]
    assert both not in [namespace(**fields) for fields in others]
    assert both == namespace(cache_salt="tenant1", extra_key="x")
    assert namespace(cache_salt="x") == namespace(extra_key="x") != namespace() == ""
    server.post("/v1/embeddings", {"model": "demo", "input": "Hi", "cache_salt": "x"})
    assert server.link.seen[-1].namespace == namespace(cache_salt="x")


def test_max_tokens_is_clamped_and_defaults(server: LiveServer) -> None:
    limit = server.link.info.max_model_len
    server.post("/v1/chat/completions", CHAT)
    seen = server.link.seen[-1]
    assert seen.params.max_tokens == limit - len(seen.prompt_token_ids)
    server.post("/v1/completions", TEXT | {"prompt": [5] * (limit - 3), "max_tokens": 100})
    assert server.link.seen[-1].params.max_tokens == 3
    server.post("/v1/chat/completions", CHAT | {"max_tokens": 9, "max_completion_tokens": 7})
    assert server.link.seen[-1].params.max_tokens == 7


def test_unset_fields_take_the_models_defaults(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    defaults: dict[str, float | int] = {"temperature": 0.6, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05}
    info = msgspec.structs.replace(server.link.info, generation_defaults=defaults)
    monkeypatch.setattr(server.engine._replicas, "_info", info)
    for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", TEXT), ("/generate", {"text": "x"})):
        server.post(path, body)
        params = server.link.seen[-1].params
        assert {name: getattr(params, name) for name in defaults} == defaults, path
    server.post("/v1/chat/completions", CHAT | {"temperature": 0, "top_k": -1})
    params = server.link.seen[-1].params
    assert (params.temperature, params.top_k, params.top_p) == (0, 0, 0.8)


def test_input_ids_replace_the_messages(server: LiveServer) -> None:
    server.post("/v1/chat/completions", CHAT | {"input_ids": [7, 8, 9]})
    assert server.link.seen[-1].prompt_token_ids == [7, 8, 9]


def test_continue_and_echo(server: LiveServer) -> None:
    reply_with(server, " is Paris.")
    messages = [*CHAT["messages"], {"role": "assistant", "content": "The capital"}]
    body = CHAT | {"messages": messages, "continue_final_message": True}
    answer = server.post("/v1/chat/completions", body).json()
    prompt = server.link.tokenizer.decode(server.link.seen[-1].prompt_token_ids, skip_special_tokens=False)
    assert prompt.endswith("The capital") and answer["choices"][0]["message"]["content"] == " is Paris."
    answer = server.post("/v1/chat/completions", body | {"echo": True}).json()
    assert answer["choices"][0]["message"]["content"] == "The capital is Paris."
    server.post("/v1/chat/completions", CHAT | {"add_generation_prompt": False})
    prompt = server.link.tokenizer.decode(server.link.seen[-1].prompt_token_ids, skip_special_tokens=False)
    assert prompt.endswith("<|im_end|>\n")


def test_template_arguments(server: LiveServer) -> None:
    def prompt(**keys: Any) -> str:
        server.post("/v1/chat/completions", CHAT | keys)
        return server.link.tokenizer.decode(server.link.seen[-1].prompt_token_ids, skip_special_tokens=False)

    plain = prompt()
    assert prompt(chat_template_kwargs={"enable_thinking": True}) != plain
    assert prompt(reasoning_effort="high") != plain
    assert prompt(reasoning={"enabled": True}) != plain
    thinking = prompt(chat_template_kwargs={"enable_thinking": True})
    assert prompt(thinking=True) == prompt(thinking={"type": "enabled"}) == thinking
    assert prompt(thinking={"type": "disabled"}) == prompt(chat_template_kwargs={"enable_thinking": False})
    assert prompt(thinking={"type": "adaptive"}) == plain
    assert prompt(reasoning_effort="none") == prompt(chat_template_kwargs={"enable_thinking": False})


def test_an_effort_has_both_names_of_templates() -> None:
    template = "{{ reasoning_effort }}, {{ reasoning_strength }}"
    with LiveServer(Config().replace(model={"chat_template": template})) as server:
        for path, keys in (
            ("/v1/chat/completions", {"reasoning_effort": "low"}),
            ("/v1/responses", {"reasoning": {"effort": "low"}, "input": "x", "messages": None}),
            ("/api/chat", {"think": "low", "stream": False}),
        ):
            body = {key: value for key, value in (CHAT | keys).items() if value is not None}
            assert server.post(path, body).status_code == 200, path
            assert server.link.tokenizer.decode(server.link.seen[-1].prompt_token_ids) == "low, low", path


@pytest.mark.parametrize("role", ["SYSTEM", "developer", "latest_reminder", "root"])
def test_kinds_of_system_messages(server: LiveServer, role: str) -> None:
    def prompt(name: str) -> list[int]:
        messages = [{"role": name, "content": "Be brief."}, *CHAT["messages"]]
        assert server.post("/v1/chat/completions", CHAT | {"messages": messages}).status_code == 200
        return server.link.seen[-1].prompt_token_ids

    assert prompt(role) == prompt("system")


def test_continuous_usage(server: LiveServer, client: Any) -> None:
    """Every chunk counts more tokens than the one before, but for the first of a chat, which has none, and the last."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    for call, keys, first in ((client.chat.completions, CHAT, [0]), (client.completions, TEXT, [])):
        for more in ({}, {"extra_body": {"return_token_ids": True, "return_prompt_text": True}}):
            chunks = list(call.create(**keys, **more, max_tokens=5, stream=True, stream_options=options))
            assert [chunk.usage.completion_tokens for chunk in chunks] == [*first, 1, 2, 3, 4, 5, 5]
            assert all(
                chunk.usage.total_tokens == chunk.usage.prompt_tokens + n
                for n, chunk in enumerate(chunks[len(first) : -1], 1)
            )
            whole = call.create(**keys, **more, max_tokens=5)
            pieces = [chunk.choices[0] for chunk in chunks[:-1]]
            texts = [p.delta.content if first else p.text for p in pieces]
            assert "".join(texts) == (whole.choices[0].message.content if first else whole.choices[0].text)
            assert [p.finish_reason for p in pieces] == [None] * (len(pieces) - 1) + ["length"]
            assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
            if more:
                assert [i for p in pieces for i in getattr(p, "token_ids", ())] == whole.choices[0].token_ids
                assert chunks[0].choices[0].prompt_token_ids


def test_no_usage_in_chunks_where_none_is_asked_for(client: Any) -> None:
    options = {"include_usage": False, "continuous_usage_stats": True}
    for call, keys in ((client.chat.completions, CHAT), (client.completions, TEXT)):
        chunks = list(call.create(**keys, max_tokens=3, stream=True, stream_options=options))
        assert chunks and all(chunk.usage is None for chunk in chunks)


def test_token_ids_may_stand_in_the_place_of_messages(server: LiveServer) -> None:
    for messages in ([], CHAT["messages"]):
        for more in ({}, {"echo": True}, {"response_format": {"type": "json_object"}}):
            body = {"model": "demo", "messages": messages, "input_ids": [5, 6, 7], **more}
            assert server.post("/v1/chat/completions", body).status_code == 200
            assert server.link.seen[-1].prompt_token_ids == [5, 6, 7]
    refused = server.post("/v1/chat/completions", {"model": "demo", "messages": []})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "messages"


def test_fields_that_were_not_asked_for_are_null(server: LiveServer) -> None:
    """vLLM's, in an answer in one piece; its streams leave them out."""
    chat = server.post("/v1/chat/completions", CHAT).json()
    assert chat["prompt_token_ids"] is None and chat["prompt_logprobs"] is None
    assert chat["choices"][0]["token_ids"] is None
    choice = server.post("/v1/completions", TEXT).json()["choices"][0]
    assert [choice[name] for name in ("prompt_token_ids", "prompt_logprobs", "token_ids")] == [None] * 3
    for route, body in (("chat/completions", CHAT), ("completions", TEXT)):
        streamed = server.post(f"/v1/{route}", body | {"stream": True}).text
        assert "token_ids" not in streamed and "prompt_logprobs" not in streamed


def test_cached_tokens_in_usage(server: LiveServer, client: Any) -> None:
    usage = client.completions.create(model="demo", prompt=[5] * 40, max_tokens=2).usage
    assert usage.prompt_tokens_details.cached_tokens == 32


def test_stop_by_token_and_by_pattern(server: LiveServer, client: Any) -> None:
    encode = server.link.tokenizer.encode
    reply_with(server, "count 1 2 33 4")
    token = encode(" 2")[-1]
    choice = client.completions.create(model="demo", prompt="x", extra_body={"stop_token_ids": [token]}).choices[0]
    assert choice.stop_reason == choice.matched_stop == token and choice.finish_reason == "stop"
    choice = client.completions.create(model="demo", prompt="x", extra_body={"stop_regex": "3+ "}).choices[0]
    assert choice.text == "count 1 2 33 " and choice.matched_stop == "3+ "
    extra = {"include_stop_str_in_output": True}
    choice = client.completions.create(model="demo", prompt="x", stop="33", extra_body=extra).choices[0]
    assert choice.text == "count 1 2 33"


def test_tokens_named_by_id(server: LiveServer, client: Any) -> None:
    reply_with(server, [11, 12])
    extra = {"return_tokens_as_token_ids": True}
    logprobs = client.completions.create(model="demo", prompt="x", logprobs=1, extra_body=extra).choices[0].logprobs
    assert logprobs.tokens[:2] == ["token_id:11", "token_id:12"]
    logprobs = client.chat.completions.create(**CHAT, logprobs=True, extra_body=extra).choices[0].logprobs
    assert logprobs.content[0].token == "token_id:11"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_what_sglang_and_vllm_add_to_a_choice(server: LiveServer, path: str, stream: bool) -> None:
    reply_with(server, [11, 12])
    wanted = ("return_meta_info", "return_weight_versions", "return_cached_tokens_details")
    wanted += ("return_input_ids_in_sglext", "return_output_ids_in_sglext", "return_prompt_token_ids")
    body = (CHAT if "chat" in path else TEXT) | dict.fromkeys(wanted, True) | {"stream": stream}
    response = server.post(path, body)
    events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line] if stream else []
    choices = [orjson.loads(data)["choices"][0] for data in events[:-1]] if stream else response.json()["choices"]
    seen = server.link.seen[-1].prompt_token_ids
    eos = server.link.info.eos_token_ids[0]
    assert choices[0]["prompt_token_ids"] == seen
    last = choices[-1]
    assert last["meta_info"]["completion_tokens"] == 3 and last["weight_versions"] == ["default"]
    assert last["sglext"] == {
        "cached_tokens_details": {"device": (len(seen) - 1) // 16 * 16, "host": 0},
        "input_ids": seen,
        "output_ids": [11, 12, eos],
    }
    if path == "/v1/completions":
        (scored,) = server.post(path, body | {"stream": False, "max_tokens": 0}).json()["choices"]
        assert scored["meta_info"]["completion_tokens"] == 0 and scored["sglext"]["output_ids"] == []
