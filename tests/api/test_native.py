"""What a hostile or exact client finds at the edges of /generate."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
import orjson
import pytest

from jaxserve.api.generate.generation import PromptTask, coalesce
from jaxserve.api.sglang import task as native
from jaxserve.api.sglang.answer import NativeChoice
from jaxserve.api.sglang.task import NativeOptions
from jaxserve.api.work_pool import TokenTexts
from jaxserve.text.detokenizer import RequestOutput
from jaxserve.types.sampling import EngineRequest, SamplingParams
from jaxserve.types.step import FIRST_VERSION, FinishReason, TokenLogprobs, TokenOutput

from .conftest import LiveServer, reply_with

BODY: dict[str, Any] = {"input_ids": [7, 8, 9]}


@pytest.mark.parametrize("keys", [{}, {"stream": True}, {"stream": True, "incremental": True}])
def test_no_output_is_made_where_none_is_asked_for(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any]
) -> None:
    reply_with(server, [11, 12])
    made = server.link._outputs

    def labelled(sent: EngineRequest) -> list[TokenOutput]:
        return [msgspec.structs.replace(output, weight_versions=("2",)) for output in made(sent)]

    monkeypatch.setattr(server.link, "_outputs", labelled)
    body = BODY | keys | {"sampling_params": {"max_new_tokens": 0}, "return_logprob": True, "logprob_start_len": 0}
    text = server.post("/generate", body).text
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line and "[DONE]" not in line]
    answer = orjson.loads(lines[-1])
    meta = answer["meta_info"]
    assert (answer["text"], answer["output_ids"], meta["completion_tokens"]) == ("", [], 0)
    assert meta["finish_reason"] == {"type": "length", "length": 0} and meta["weight_version"] == "2"
    assert len(meta["input_token_logprobs"]) == 3 and meta["output_token_logprobs"] == []


@pytest.mark.parametrize(
    ("keys", "ids"),
    [
        ({"rid": "q"}, ["q_0", "q_1"]),
        ({"rid": ["a", "b"]}, ["a", "b"]),
    ],
)
def test_each_prompt_of_a_batch_has_an_id(server: LiveServer, keys: dict[str, Any], ids: list[str]) -> None:
    answers = server.post("/generate", {"text": ["x", "y"]} | keys).json()
    assert [answer["meta_info"]["id"] for answer in answers] == ids


@pytest.mark.parametrize(
    ("keys", "param"),
    [
        ({"rid": ["a"], "text": ["x", "y"]}, "rid"),
        ({"return_logprob": True, "logprob_start_len": 4, "input_ids": [7, 8, 9]}, "logprob_start_len"),
        ({"return_logprob": True, "logprob_start_len": -2, "input_ids": [7, 8, 9]}, "logprob_start_len"),
        ({"return_logprob": True, "logprob_start_len": [0, 2**31], "text": ["x", "y"]}, "logprob_start_len"),
    ],
)
def test_bad_values_are_named(server: LiveServer, keys: dict[str, Any], param: str) -> None:
    response = server.post("/generate", keys)
    assert response.status_code == 400 and response.json()["error"]["param"].split(".")[0] == param, response.text


def events_of(server: LiveServer, body: dict[str, Any]) -> list[dict[str, Any]]:
    text = server.post("/generate", body | {"stream": True}).text
    return [orjson.loads(part[6:]) for part in text.split("\n\n") if part and "[DONE]" not in part]


EVERYTHING: dict[str, Any] = BODY | {
    "sampling_params": {"max_new_tokens": 40, "temperature": 1.0, "top_k": 3},
    "return_logprob": True,
    "logprob_start_len": 1,
    "top_logprobs_num": 2,
    "token_ids_logprob": [3, 5],
    "return_text_in_logprobs": True,
    "return_sampling_mask": True,
}
LISTS = [f"{side}_{kind}_logprobs" for side in ("input", "output") for kind in ("token", "top", "token_ids")]
LISTS += ["output_token_sampling_mask", "output_token_sampling_logprobs"]


@pytest.mark.parametrize("interval", [1, 3])
def test_a_stream_adds_up_to_the_answer(server: LiveServer, interval: int) -> None:
    reply_with(server, 'A "quoted" \\ line\n, é and 日本 too.')
    body = EVERYTHING | {"stream_interval": interval}
    whole = server.post("/generate", body).json()
    repeating = events_of(server, body)
    new_only = events_of(server, body | {"incremental": True})
    assert len(repeating) == len(new_only) > 5
    for event in repeating:
        count = event["meta_info"]["completion_tokens"]
        assert whole["text"].startswith(event["text"]) and event["output_ids"] == whole["output_ids"][:count]
        for name in LISTS:
            expected = whole["meta_info"][name]
            assert event["meta_info"][name] == (expected if name.startswith("input") else expected[:count]), name
    assert repeating[-1]["text"] == whole["text"] == "".join(event["text"] for event in new_only)
    assert whole["output_ids"] == [i for event in new_only for i in event["output_ids"]]
    for name in LISTS:
        found = [event["meta_info"][name] for event in new_only]
        if name.startswith("input"):
            assert found[0] == found[-1] == whole["meta_info"][name] != [] and not any(found[1:-1]), name
        else:
            assert [entry for part in found for entry in part] == whole["meta_info"][name], name


def joined(outputs: list[RequestOutput]) -> list[RequestOutput]:
    """What a stream of these outputs gives if 100 tokens come together."""

    async def stream() -> AsyncGenerator[tuple[int, RequestOutput], None]:
        for output in outputs:
            yield 0, output

    async def collected() -> list[RequestOutput]:
        return [output async for _, output in coalesce(stream(), 100)]

    return asyncio.run(collected())


def test_tokens_held_back_keep_their_details_when_the_last_output_has_none() -> None:
    """The output of an abort has no tokens and so no log-probabilities."""
    entries = [TokenLogprobs(i, -1.0, 1) for i in range(3)]
    outputs = [RequestOutput("r", 0, text=f"{i}", token_ids=[i], logprobs=[entries[i]]) for i in range(3)]
    outputs.append(RequestOutput("r", 0, finish_reason=FinishReason.ABORT))
    first, last = joined(outputs)
    assert (first.token_ids, first.logprobs) == ([0], entries[:1])
    assert (last.text, last.token_ids, last.logprobs) == ("12", [1, 2], entries[1:])
    assert last.finish_reason is FinishReason.ABORT


def test_joined_outputs_name_the_weights_of_all_their_tokens() -> None:
    labels = [(FIRST_VERSION,), (FIRST_VERSION,), ("2",), ("3",)]
    outputs = [RequestOutput("r", 0, token_ids=[i], weight_versions=each) for i, each in enumerate(labels)]
    outputs.append(RequestOutput("r", 0, finish_reason=FinishReason.ABORT))  # it has no tokens
    first, last = joined(outputs)
    assert first.weight_versions == (FIRST_VERSION,) and last.weight_versions == (FIRST_VERSION, "2", "3")


def stream_of(texts: TokenTexts, count: int, incremental: bool) -> tuple[int, int]:
    """(entries that were made, bytes of all events) of a stream of `count` tokens."""
    options = NativeOptions(logprobs=True, top=4, with_text=True, incremental=incremental)
    task = PromptTask([1, 2, 3], SamplingParams(max_tokens=count))
    choice = NativeChoice("x", task, options, texts)
    made = size = 0
    real = texts.text

    def counted(token_id: int) -> str:
        nonlocal made
        made += 1
        return real(token_id)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(texts, "text", counted)
        for i in range(count):
            entry = TokenLogprobs(i % 90, -1.0, 1, list(range(4)), [-1.0] * 4)
            choice.add(RequestOutput("x", 0, text="abcd", token_ids=[i % 90], logprobs=[entry]))
            size += len(orjson.dumps(choice.result()))
    return made, size


@pytest.mark.parametrize("incremental", [False, True])
def test_every_entry_of_a_stream_is_made_once(server: LiveServer, incremental: bool) -> None:
    texts = TokenTexts(server.link.tokenizer)
    made, size = stream_of(texts, 100, incremental)
    twice, size_of_twice = stream_of(texts, 200, incremental)
    assert made == 100 * 5 and twice == 2 * made
    if incremental:
        assert size_of_twice < 2.1 * size


def test_what_prompts_share_is_read_once(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A schema of 86 kB for 2,048 prompts held the event loop for 5 s."""
    reads = 0
    real = native.constraint

    def counted(*given: Any) -> Any:
        nonlocal reads
        reads += 1
        return real(*given)

    monkeypatch.setattr(native, "constraint", counted)
    reply_with(server, "5")
    sampling = {"max_new_tokens": 1, "regex": "[0-9]"}
    assert len(server.post("/generate", {"text": ["a"] * 40, "sampling_params": sampling}).json()) == 40
    assert reads == 1
    assert len(server.post("/generate", {"text": ["a"] * 3, "sampling_params": [sampling] * 3}).json()) == 3
    assert reads == 4
