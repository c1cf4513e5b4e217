"""Log-probabilities of chosen ids, candidates of a draw, hidden states: over the wire, whole and streamed."""

import base64
from typing import Any

import msgspec
import numpy as np
import orjson
import pytest

from jaxserve.config import Config
from jaxserve.text.renderer import Renderer
from jaxserve.text.template_worker import TemplateInput

from .conftest import LiveServer, reply_with
from .fakes import experts_of, logprobs_of, mask_of, vector_of

CHAT: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}]}
TEXT: dict[str, Any] = {"model": "demo", "prompt": [7, 8, 9]}
PATHS = {"/v1/chat/completions": CHAT, "/v1/completions": TEXT}
TOKENS = [11, 12, 13]
MASK = {"return_sampling_mask": True, "top_k": 5}


def events_of(server: LiveServer, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    text = server.post(path, body | {"stream": True}).text
    return [orjson.loads(line.removeprefix("data: ")) for line in text.split("\n\n") if line.startswith("data: {")]


def last_choice(server: LiveServer, path: str, stream: bool, **keys: Any) -> dict[str, Any]:
    """The choice, or of a stream its chunks with what they add up to where a later one says nothing."""
    body = PATHS[path] | keys
    if not stream:
        response = server.post(path, body)
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]
    choice: dict[str, Any] = {}
    logprobs: list[Any] = []
    for event in events_of(server, path, body):
        for each in event["choices"]:
            part = each.pop("logprobs", None)
            logprobs += (part["content"] if "content" in part else part["top_logprobs"]) if part else []
            choice |= {key: value for key, value in (each | each.pop("delta", {})).items() if value is not None}
    return choice | {"logprobs": logprobs}


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_of_chosen_ids_in_chat(server: LiveServer, stream: bool) -> None:
    reply_with(server, TOKENS)
    keys = {"logprobs": True, "top_logprobs": 3, "logprob_token_ids": [40, 11, 40, 50]}
    choice = last_choice(server, "/v1/chat/completions", stream, **keys, return_tokens_as_token_ids=True)
    content = choice["logprobs"] if stream else choice["logprobs"]["content"]
    for entry, token in zip(content, TOKENS, strict=False):
        own = logprobs_of(token, 1000, 0).logprob
        expected = {token: own} | {40: -40.0, 11: -11.0, 50: -50.0} | {token: own}
        assert {e["token"]: e["logprob"] for e in entry["top_logprobs"]} == {
            f"token_id:{key}": value for key, value in expected.items()
        }
        assert entry["logprob"] == own


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_of_chosen_ids_in_completions(server: LiveServer, stream: bool) -> None:
    reply_with(server, TOKENS)
    keys = {"logprobs": 1, "logprob_token_ids": [40, 50], "return_tokens_as_token_ids": True, "echo": True}
    choice = last_choice(server, "/v1/completions", stream, **keys)
    tables = choice["logprobs"] if stream else choice["logprobs"]["top_logprobs"]
    assert tables[0] is None and set(tables[1]) == {"token_id:8"}  # the prompt: its likeliest
    own = logprobs_of(11, 1000, 0).logprob
    assert tables[3] == {"token_id:11": own, "token_id:40": -40.0, "token_id:50": -50.0}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", list(PATHS))
@pytest.mark.parametrize("mode", [None, "selected", "support"])
def test_the_candidates_of_each_draw(server: LiveServer, path: str, stream: bool, mode: str | None) -> None:
    reply_with(server, TOKENS)
    meta = last_choice(server, path, stream, **MASK, sampling_logprobs_mode=mode)["meta_info"]
    found = [mask_of(token) for token in (*TOKENS, server.link.info.eos_token_ids[0])]
    assert meta["output_token_sampling_mask"] == [each.ids for each in found]
    expected = [each.logprobs if mode == "support" else each.logprob for each in found]
    assert meta["output_token_sampling_logprobs"] == expected


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", list(PATHS))
@pytest.mark.parametrize("wanted", [True, "last"])
def test_the_last_hidden_state(server: LiveServer, path: str, stream: bool, wanted: object) -> None:
    reply_with(server, TOKENS)
    choice = last_choice(server, path, stream, return_hidden_states=wanted, n=1)
    prompt = server.link.seen[-1].prompt_token_ids
    np.testing.assert_allclose(choice["hidden_states"], vector_of([*prompt, *TOKENS]), rtol=1e-6)
    assert server.link.seen[-1].params.extras.hidden_states == "last"
    assert "hidden_states" not in last_choice(server, path, stream)


def native(server: LiveServer, stream: bool, **keys: Any) -> dict[str, Any]:
    body = {"input_ids": [7, 8, 9]} | keys
    if stream:
        return events_of(server, "/generate", body)[-1]["meta_info"]
    response = server.post("/generate", body)
    assert response.status_code == 200, response.text
    return response.json()["meta_info"]


@pytest.mark.parametrize("stream", [False, True])
def test_generate_with_chosen_ids(server: LiveServer, stream: bool) -> None:
    reply_with(server, TOKENS)
    keys = {"return_logprob": True, "logprob_start_len": 1, "token_ids_logprob": [40, 8], "top_logprobs_num": 1}
    meta = native(server, stream, **keys)
    own = logprobs_of(8, 1000, 0).logprob
    assert meta["input_token_ids_logprobs"][0] == [[-40.0, 40, None], [own, 8, None]]
    assert meta["output_token_ids_logprobs"][:2] == [[[-40.0, 40, None], [-8.0, 8, None]]] * 2
    assert [entry[1] for entry in meta["output_token_logprobs"][:3]] == TOKENS
    assert len(meta["output_top_logprobs"][0]) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_generate_with_hidden_states_and_candidates(server: LiveServer, stream: bool) -> None:
    reply_with(server, TOKENS)
    keys: dict[str, Any] = {"return_hidden_states": True, "return_sampling_mask": True}
    meta = native(server, stream, **keys, sampling_params={"top_k": 4})
    whole, *rest = meta["hidden_states"]
    sequence = [7, 8, 9, *TOKENS]
    np.testing.assert_allclose(whole, [vector_of(sequence[: n + 1]) for n in range(3)], rtol=1e-6)
    np.testing.assert_allclose(rest, [vector_of(sequence[: n + 1]) for n in range(3, 6)], rtol=1e-6)
    assert meta["output_token_sampling_mask"][:2] == [[11, 12], [12]]
    assert "output_token_logprobs" not in meta
    last = native(server, stream, return_hidden_states="last")["hidden_states"]
    np.testing.assert_allclose(last, [vector_of(sequence)], rtol=1e-6)


def test_each_prompt_of_generate_has_its_own(server: LiveServer) -> None:
    body: dict[str, Any] = {"input_ids": [[7], [8]], "return_logprob": True, "token_ids_logprob": [[40], [50, 51]]}
    body |= {"return_hidden_states": [False, "last"], "sampling_params": {"max_new_tokens": 2}}
    first, second = (each["meta_info"] for each in server.post("/generate", body).json())
    assert [len(m["output_token_ids_logprobs"][0]) for m in (first, second)] == [1, 2]
    assert "hidden_states" not in first and len(second["hidden_states"]) == 1
    both = server.post("/generate", body | {"token_ids_logprob": [40]}).json()
    assert [each["meta_info"]["output_token_ids_logprobs"][0][0][1] for each in both] == [40, 40]


@pytest.mark.parametrize("stream", [False, True])
def test_what_vllm_says_of_a_chats_prompt_stands_beside_the_choices(server: LiveServer, stream: bool) -> None:
    keys = {"return_token_ids": True, "prompt_logprobs": 1, "return_prompt_text": True, "n": 2}
    body = CHAT | keys
    if stream:
        first, *rest = events_of(server, "/v1/chat/completions", body)
        assert not any("prompt_token_ids" in event for event in rest)
    else:
        first = server.post("/v1/chat/completions", body).json()
    prompt = server.link.seen[-1].prompt_token_ids
    assert first["prompt_token_ids"] == first["choices"][0]["prompt_token_ids"] == prompt
    assert len(first["prompt_logprobs"]) == len(prompt) and first["prompt_logprobs"][0] is None
    assert first["prompt_text"].startswith("<|im_start|>")
    assert not {"prompt_logprobs", "prompt_text"} & set(first["choices"][0])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("start", [None, 2, 3])
def test_the_experts_of_every_token(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, stream: bool, start: int | None
) -> None:
    info = msgspec.structs.replace(server.link.info, routed=(2, 3))
    monkeypatch.setattr(server.engine._replicas, "_info", info)
    reply_with(server, TOKENS)
    keys = {"return_routed_experts": True, "routed_experts_start_len": start}
    expected = base64.b64encode(experts_of([7, 8, 9, *TOKENS][start or 0 :])).decode()
    assert last_choice(server, "/v1/completions", stream, **keys)["sglext"]["routed_experts"] == expected
    assert native(server, stream, **keys)["routed_experts"] == expected
    chat = last_choice(server, "/v1/chat/completions", stream, **keys, stream_interval=2)["sglext"]["routed_experts"]
    assert base64.b64decode(chat).endswith(experts_of(TOKENS))
    error = server.post("/v1/completions", TEXT | {"return_routed_experts": True, "routed_experts_start_len": 4})
    assert error.json()["error"]["param"] == "routed_experts_start_len"


def test_tokens_written_by_a_thinking_budget_have_no_candidates(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = server.link.tokenizer.encode("\n</think>\n\n", add_special_tokens=False)
    server.link.script = lambda prompt, params: "It is 4." if prompt[-len(end) :] == end else "<think>\n" + "go " * 50
    keys = MASK | {"thinking_token_budget": 10, "return_token_ids": True}
    choice = last_choice(server, "/v1/chat/completions", False, **keys)
    mask = choice["meta_info"]["output_token_sampling_mask"]
    assert len(mask) == len(choice["token_ids"]) and mask[10 : 10 + len(end)] == [None] * len(end)
    assert all(token in ids for token, ids in zip(choice["token_ids"], mask, strict=True) if ids is not None)
    monkeypatch.setattr(server.engine._replicas, "_info", msgspec.structs.replace(server.link.info, routed=(2, 3)))
    error = server.post("/v1/chat/completions", CHAT | keys | {"return_routed_experts": True}).json()["error"]
    assert error["param"] == "return_routed_experts"


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/chat/completions", CHAT | {"logprob_token_ids": [5]}, "logprob_token_ids"),
    ("/v1/completions", TEXT | {"logprob_token_ids": [5]}, "logprob_token_ids"),
    ("/v1/completions", TEXT | {"logprob_token_ids": [5], "logprobs": 0, "max_tokens": 0}, "logprob_token_ids"),
    *(
        ("/v1/chat/completions", CHAT | {"logprobs": True, "logprob_token_ids": value}, "logprob_token_ids")
        for value in ([10**6], [-1], [5] * 129, ["5"], 5, [True], [2**63], [None])
    ),
    ("/v1/completions", TEXT | {"logprobs": 1, "logprob_token_ids": [5], "use_beam_search": True}, "logprob_token_ids"),
    ("/v1/completions", TEXT | {"return_sampling_mask": True}, "return_sampling_mask"),
    ("/v1/completions", TEXT | {"return_sampling_mask": True, "top_k": 257}, "return_sampling_mask"),
    ("/v1/completions", TEXT | {"return_sampling_mask": "yes"}, "return_sampling_mask"),
    ("/v1/completions", TEXT | MASK | {"use_beam_search": True}, "return_sampling_mask"),
    ("/v1/completions", TEXT | {"sampling_logprobs_mode": "support"}, "sampling_logprobs_mode"),
    ("/v1/completions", TEXT | MASK | {"sampling_logprobs_mode": "all"}, "sampling_logprobs_mode"),
    ("/v1/chat/completions", CHAT | {"return_hidden_states": "first"}, "return_hidden_states"),
    ("/v1/chat/completions", CHAT | {"return_hidden_states": 1}, "return_hidden_states"),
    ("/v1/completions", TEXT | {"return_hidden_states": True, "use_beam_search": True}, "return_hidden_states"),
    ("/v1/chat/completions", CHAT | {"return_routed_experts": True}, "return_routed_experts"),
    ("/v1/chat/completions", CHAT | {"return_routed_experts": "yes"}, "return_routed_experts"),
    ("/v1/chat/completions", CHAT | {"routed_experts_start_len": 1}, "routed_experts_start_len"),
    ("/generate", {"text": "x", "return_routed_experts": True}, "return_routed_experts"),
    ("/v1/chat/completions", CHAT | {"task": "poem"}, "task"),
    ("/generate", {"text": "x", "token_ids_logprob": [5]}, "token_ids_logprob"),
    ("/generate", {"text": "x", "return_logprob": True, "token_ids_logprob": [[5], [6]]}, "token_ids_logprob"),
    ("/generate", {"text": "x", "return_logprob": True, "token_ids_logprob": [10**6]}, "token_ids_logprob"),
    ("/generate", {"text": "x", "return_logprob": True, "token_ids_logprob": [[5] * 129]}, "token_ids_logprob"),
    ("/generate", {"text": "x", "return_sampling_mask": [True, True]}, "return_sampling_mask"),
    ("/generate", {"text": "x", "sampling_logprobs_mode": "selected"}, "sampling_logprobs_mode"),
    ("/generate", {"text": "x", "return_hidden_states": ["last", "last"]}, "return_hidden_states"),
]


@pytest.mark.parametrize(("path", "body", "param"), BAD)
def test_bad_values_are_named(server: LiveServer, path: str, body: dict[str, Any], param: str) -> None:
    response = server.post(path, body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"].split(".")[0] == param


def test_more_hidden_states_than_an_answer_may_have(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxserve.api.generate.task.MAX_HIDDEN_NUMBERS", 8 * 10)
    body: dict[str, Any] = {"input_ids": [7, 8, 9], "return_hidden_states": True}
    assert server.post("/generate", body | {"sampling_params": {"max_new_tokens": 7}}).status_code == 200
    error = server.post("/generate", body | {"sampling_params": {"max_new_tokens": 8}}).json()["error"]
    assert error["param"] == "return_hidden_states" and '"last"' in error["message"]


def test_a_watermark_with_the_servers_key() -> None:
    config = Config().replace(server={"watermark_key": 99})
    with LiveServer(config) as server:
        body: dict[str, Any]
        for path, body in (*PATHS.items(), ("/generate", {"text": "x"})):
            expected: dict[str, int | None] = {"{}": 99, '{"watermark":true}': 99, '{"watermark":false}': None}
            if path != "/generate":
                expected |= {'{"watermarking":false}': None, '{"watermarking":true}': 99}
            for keys, key in expected.items():
                assert server.post(path, body | orjson.loads(keys)).status_code == 200
                assert server.link.seen[-1].params.watermark_key == key, (path, keys)
        server.post("/v1/completions", TEXT | {"temperature": 0})
        assert server.link.seen[-1].params.watermark_key is None
        shown = server.http.get("/server_info").json()
        assert shown["config"]["server"]["watermark_key"] == "set"


@pytest.mark.parametrize("param", ["watermark", "watermarking"])
def test_a_watermark_needs_the_servers_key(server: LiveServer, param: str) -> None:
    error = server.post("/v1/completions", TEXT | {param: True}).json()["error"]
    assert error["param"] == param and "watermark_key" in error["message"]
    assert server.post("/v1/completions", TEXT | {param: False}).status_code == 200


def test_greedy_needs_no_cut_for_its_one_candidate(server: LiveServer) -> None:
    assert server.post("/v1/completions", TEXT | {"return_sampling_mask": True, "temperature": 0}).status_code == 200


def test_a_task_reaches_the_template(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[TemplateInput] = []
    render = Renderer.render

    def spy(self: Renderer, conversation: TemplateInput, size: int = 0) -> str:
        seen.append(conversation)
        return render(self, conversation, size)

    monkeypatch.setattr(Renderer, "render", spy)
    assert server.post("/v1/chat/completions", CHAT | {"task": "title"}).status_code == 200
    assert seen[-1].kwargs == {"task": "title"}
