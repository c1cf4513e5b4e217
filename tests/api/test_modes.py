"""Beam search, thinking budgets and repetition detection: over known tokens, and over the wire."""

import asyncio
import itertools
import json
import math
import random
import time
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from jaxserve.api.generate.generation import PromptTask
from jaxserve.api.generate.modes import Beam, Repetitions, _beam_output, beam_search
from jaxserve.api.generate.task import RepetitionRule
from jaxserve.config import Config
from jaxserve.text.detokenizer import RequestOutput
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.types.sampling import EngineRequest, SamplingParams
from jaxserve.types.step import FinishReason, TokenLogprobs, TokenOutput

from .conftest import LiveServer, reply_with

CHAT: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}]}

# probabilities of the next token after each token; 0 ends, 9 is the prompt
CHAIN = {9: [0.0, 0.6, 0.4], 1: [0.3, 0.35, 0.35], 2: [0.9, 0.05, 0.05]}


async def chain(token_ids: list[int], params: SamplingParams) -> AsyncGenerator[RequestOutput, None]:
    pairs = sorted(((math.log(p or 1e-9), i) for i, p in enumerate(CHAIN[token_ids[-1]])), reverse=True)
    entry = TokenLogprobs(pairs[0][1], pairs[0][0], 1, [i for _, i in pairs], [value for value, _ in pairs])
    yield RequestOutput("r", 0, token_ids=[pairs[0][1]], logprobs=[entry], finish_reason=FinishReason.LENGTH)


def score(tokens: tuple[int, ...]) -> float:
    return sum(math.log(CHAIN[a][b] or 1e-9) for a, b in itertools.pairwise((9, *tokens)))


def every_output(length: int) -> list[tuple[int, ...]]:
    heads = [list(itertools.product([1, 2], repeat=size)) for size in range(length + 1)]
    found: list[tuple[int, ...]] = [(*head, 0) for group in heads[:-1] for head in group]
    return found + [(*head,) for head in heads[-1]]


def test_a_wide_beam_finds_what_exhaustive_search_finds() -> None:
    params = SamplingParams(n=8, max_tokens=3)
    search = beam_search(chain, [9], params, frozenset({0}), width=8, length_penalty=0.0)
    found = asyncio.run(search)
    best = sorted(every_output(3), key=score, reverse=True)
    assert [beam.token_ids for beam in found[:3]] == best[:3] and best[0] == (2, 0)
    assert found[0].total == pytest.approx(score((2, 0))) and found[0].finish_reason is FinishReason.STOP
    assert [entry.token_id for entry in found[0].logprobs] == [2, 0] and found[0].logprobs[0].rank == 2


def test_a_beam_of_one_is_greedy_and_misses_it() -> None:
    search = beam_search(chain, [9], SamplingParams(max_tokens=2), frozenset({0}), width=1, length_penalty=1.0)
    (beam,) = asyncio.run(search)
    assert beam.token_ids[0] == 1


def test_beam_search_over_the_wire(server: LiveServer, client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    server.link.script = lambda prompt, params: [prompt[-1] + 1]
    extra = {"use_beam_search": True}
    keys: dict[str, Any] = {"model": "demo", "prompt": [5], "n": 3, "max_tokens": 4, "logprobs": 2, "extra_body": extra}
    answer = client.completions.create(**keys)
    assert len(answer.choices) == 3 and answer.usage.completion_tokens == 12
    means = [sum(choice.logprobs.token_logprobs) for choice in answer.choices]
    assert means == sorted(means, reverse=True)
    assert all(len(top) == 2 for choice in answer.choices for top in choice.logprobs.top_logprobs)
    together = ({"stop": "x"}, {"stream": True}, {"repetition_detection": {"max_pattern_size": 4}})
    for wrong, param in (({"n": 11}, "n"), *((keys, "use_beam_search") for keys in together)):
        response = server.post("/v1/completions", {"model": "demo", "prompt": "x"} | extra | wrong)
        assert response.status_code == 400 and response.json()["error"]["param"] == param
    for unheard in (
        *({"logit_bias": {"5": 1}}, {"bad_words": ["x"]}, {"allowed_token_ids": [5]}, {"min_tokens": 2}),
        *({"presence_penalty": 1}, {"frequency_penalty": 1}, {"repetition_penalty": 1.5}),
    ):
        response = server.post("/v1/completions", {"model": "demo", "prompt": "x"} | extra | unheard)
        assert response.status_code == 400 and next(iter(unheard)) in response.json()["error"]["message"], unheard
    steps, made = iter("abcd" * 9), server.link._outputs

    def labelled(sent: EngineRequest) -> list[TokenOutput]:
        outputs = made(sent)
        outputs[-1].weight_versions = (next(steps),)
        return outputs

    monkeypatch.setattr(server.link, "_outputs", labelled)
    fields = {"return_weight_versions": True, "return_meta_info": True}
    body = {"model": "demo", "prompt": list(range(40)), "n": 1, "max_tokens": 3} | extra | fields
    answer = server.post("/v1/completions", body).json()
    assert answer["choices"][0]["weight_versions"] == ["a", "b", "c"]
    assert [request.partly_answered for request in server.link.seen[-3:]] == [False, True, True]
    cached = server.post("/v1/completions", body | {"use_beam_search": False}).json()["choices"][0]["meta_info"]
    assert answer["choices"][0]["meta_info"]["cached_tokens"] == cached["cached_tokens"] > 0
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == cached["cached_tokens"]
    response = server.post("/v1/completions", {"model": "demo", "prompt": "x", "length_penalty": 1.0})
    assert response.json()["error"]["param"] == "length_penalty"


def test_beams_show_the_log_probabilities_of_the_prompt(server: LiveServer) -> None:
    server.link.script = lambda prompt, params: [prompt[-1] + 1]
    body = {"model": "demo", "prompt": [300, 301, 302], "n": 2, "max_tokens": 2, "logprobs": 1, "echo": True}
    plain = server.post("/v1/completions", body).json()["choices"]
    beams = server.post("/v1/completions", body | {"use_beam_search": True, "prompt_logprobs": 0}).json()["choices"]
    for one, beam in zip(plain, beams, strict=True):
        known, found = one["logprobs"]["token_logprobs"], beam["logprobs"]["token_logprobs"]
        assert len(found) == len(beam["logprobs"]["tokens"]) == 5
        assert found[:3] == known[:3] and found[0] is None
        assert [each and len(each) for each in beam["prompt_logprobs"]] == [None, 1, 1]


def test_best_of_keeps_the_first_beams(server: LiveServer) -> None:
    """By the score that they were searched with, and not by the mean."""
    server.link.script = lambda prompt, params: [prompt[-1] + 1]
    body = {"model": "demo", "prompt": [300], "max_tokens": 3, "use_beam_search": True, "length_penalty": 0}
    body |= {"return_token_ids": True, "logprobs": 1}
    (other,) = server.post("/v1/completions", body | {"n": 2, "max_tokens": 1}).json()["choices"][1]["token_ids"]
    body |= {"stop_token_ids": [other]}
    four = server.post("/v1/completions", body | {"n": 4}).json()["choices"]
    assert [len(choice["token_ids"]) for choice in four][:2] == [1, 3], four
    two = server.post("/v1/completions", body | {"n": 2, "best_of": 4}).json()["choices"]
    assert [choice["token_ids"] for choice in two] == [choice["token_ids"] for choice in four[:2]]


def test_all_steps_of_a_beam_search_have_one_deadline() -> None:
    def script(prompt: list[int], params: SamplingParams) -> list[int]:
        time.sleep(0.01)
        return [prompt[-1] + 1]

    with LiveServer(Config.parse({"server": {"request_timeout": 60}})) as server:
        server.link.script = script
        body = {"model": "demo", "prompt": [300], "max_tokens": 4, "use_beam_search": True}
        assert server.post("/v1/completions", body).status_code == 200
        deadlines = [request.deadline or 0 for request in server.link.seen]
    assert deadlines[0] == pytest.approx(60, abs=1) and deadlines[-1] <= deadlines[0] - 0.02


def test_the_text_of_a_beam_depends_on_the_prompt_and_on_who_reads_it(shared_data: Any) -> None:
    tokenizer = Tokenizer.from_directory(shared_data / "models/stories260K-hf")
    once = tokenizer.encode("Once", add_special_tokens=False)
    beam, params = Beam((*once, 1)), SamplingParams(visible_token_ids=(1,))
    assert _beam_output(0, beam, PromptTask(tokenizer.encode("a"), params), tokenizer).text == " Once<s>"


def test_the_rule_of_repetitions_gets_one_token_at_a_time(server: LiveServer) -> None:
    reply_with(server, [7, 11, 12])
    server.post("/v1/completions", {"model": "demo", "prompt": "x", "repetition_detection": {"max_pattern_size": 4}})
    params = server.link.seen[-1].params
    assert not params.speculate and not params.grouped


def test_the_rule_of_repetitions() -> None:
    def holds(token_ids: list[int], smallest: int = 1) -> bool:
        return Repetitions(RepetitionRule(smallest=smallest, largest=3, min_count=3)).add(token_ids)

    assert holds([5, 5, 5]) and holds([9, 1, 2, 1, 2, 1, 2]) and holds([1, 2, 3] * 3)
    assert not holds([5, 5]) and not holds([1, 2, 1, 2, 1]) and not holds([1, 2, 3, 4] * 3)
    assert not holds([9, 5, 5, 5], smallest=2)


def test_the_rule_by_its_definition() -> None:
    """In groups of tokens of two kinds, beside a comparison of the last tokens with themselves."""
    rng = random.Random(1)
    held = 0
    for _ in range(200):
        smallest = rng.randint(1, 3)
        largest, min_count = smallest + rng.randint(0, 4), rng.randint(2, 4)
        rule = RepetitionRule(smallest=smallest, largest=largest, min_count=min_count)
        state, tokens = Repetitions(rule), list[int]()
        for _ in range(40):
            group = rng.choices([1, 2], k=rng.randint(0, 3))
            tokens += group
            needs = [(size, size * rule.min_count) for size in range(rule.smallest, rule.largest + 1)]
            expected = any(
                len(tokens) >= need and tokens[-need:-size] == tokens[len(tokens) - need + size :]
                for size, need in needs
            )
            assert state.add(group) == Repetitions(rule).add(tokens) == expected
            held += expected
    assert 500 < held < 7500


def test_repetitions_end_an_output(server: LiveServer, client: Any) -> None:
    reply_with(server, [7, 11, 12, 11, 12, 11, 12, 11, 12])
    extra = {"repetition_detection": {"max_pattern_size": 4, "min_count": 3}, "return_token_ids": True}
    for stream in (False, True):
        keys: dict[str, Any] = {"model": "demo", "prompt": "x", "max_tokens": 200, "n": 2, "extra_body": extra}
        answer = client.completions.create(**keys, stream=stream)
        choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
        ids = [i for choice in choices if choice.index == 1 for i in choice.token_ids]
        assert ids == [7, 11, 12, 11, 12, 11, 12]
        last = [choice for choice in choices if choice.index == 1][-1]
        assert (last.finish_reason, last.matched_stop) == ("stop", "repetition")
    server.wait(lambda: not server.link.running, "the rest was not aborted")


@pytest.mark.parametrize("stream", [False, True])
def test_a_thinking_budget(server: LiveServer, stream: bool) -> None:
    tokenizer = server.link.tokenizer
    end = tokenizer.encode("\n</think>\n\n", add_special_tokens=False)
    thoughts = "<think>\n" + "round and round " * 20

    def script(prompt: list[int], params: SamplingParams) -> str:
        return "It is 4." if prompt[-len(end) :] == end else thoughts

    server.link.script = script
    body = CHAT | {"thinking_token_budget": 10, "n": 2, "seed": 3, "max_tokens": 60, "stream": stream}
    response = server.post(
        "/v1/chat/completions", body | {"stream_options": {"include_usage": True} if stream else None}
    )
    assert response.status_code == 200
    first, second = (r for r in server.link.seen if r.params.seed == 3)
    spent = tokenizer.encode(thoughts, add_special_tokens=False)[:10]
    assert second.prompt_token_ids == first.prompt_token_ids and not first.resumed_token_ids
    assert second.resumed_token_ids == spent + end and second.params == first.params
    assert second.client_id == first.client_id and second.request_id != first.request_id
    assert sorted(r.params.seed or 0 for r in server.link.seen) == [3, 3, 4, 4]
    if stream:
        assert response.text.count('"It') == 2 and '"finish_reason":"stop"' in response.text
    else:
        for choice in response.json()["choices"]:
            assert choice["message"]["content"] == "It is 4." and choice["finish_reason"] == "stop"
            assert thoughts[8:].startswith(choice["message"]["reasoning_content"])
        usage = response.json()["usage"]
        assert usage["completion_tokens"] == 2 * (10 + len(end) + len(tokenizer.encode("It is 4.")) + 1)


def test_a_budget_that_is_not_used_up(server: LiveServer) -> None:
    reply_with(server, "<think>\nquick\n</think>\n\nIt is 4.")
    answer = server.post("/v1/chat/completions", CHAT | {"thinking_token_budget": 100}).json()
    assert answer["choices"][0]["message"]["content"] == "It is 4." and len(server.link.seen) == 1
    reply_with(server, "No thoughts at all, but more words than the budget has.")
    answer = server.post("/v1/chat/completions", CHAT | {"thinking_token_budget": 3}).json()
    assert answer["choices"][0]["message"]["content"].startswith("No thoughts") and len(server.link.seen) == 2


def test_a_budget_that_cannot_be_kept_is_refused(server: LiveServer) -> None:
    response = server.post("/v1/chat/completions", CHAT | {"thinking_token_budget": 3, "use_beam_search": True})
    assert response.status_code == 400 and response.json()["error"]["param"] == "use_beam_search"


def test_a_grammar_begins_after_the_end_that_is_written_for_the_model(server: LiveServer) -> None:
    """The last ids of that end are those after which the grammar begins: nothing stands between."""
    reply_with(server, "<think>\n" + "round and round " * 20)
    body = CHAT | {"thinking_token_budget": 5, "max_tokens": 40, "chat_template_kwargs": {"enable_thinking": True}}
    body |= {"response_format": {"type": "json_object"}}
    server.post("/v1/chat/completions", body)
    first = server.link.seen[0]
    grammar, budget = first.params.grammar, first.params.thinking
    assert grammar is not None and budget is not None and budget.inside == (grammar.begin_unless == ())
    assert grammar.begin_after and budget.end_token_ids[-len(grammar.begin_after) :] == grammar.begin_after


@pytest.mark.parametrize("stream", [False, True])
def test_a_budget_of_nothing_leaves_the_log_probabilities_of_the_prompt(server: LiveServer, stream: bool) -> None:
    """The first output is then the end of the thinking, which no engine made."""
    reply_with(server, "It is 4.")
    messages = [*CHAT["messages"], {"role": "assistant", "content": "<think>\nWell"}]
    body = CHAT | {"messages": messages, "continue_final_message": True, "max_tokens": 40}
    body |= {"thinking_token_budget": 0, "prompt_logprobs": 1, "stream": stream, "n": 2}
    response = server.post("/v1/chat/completions", body)
    assert server.link.seen[0].resumed_token_ids, "the prompt ends inside the thinking"
    prompt = server.link.seen[0].prompt_token_ids
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line and "[DONE]" not in line]
    found = [each for line in lines if (each := json.loads(line).get("prompt_logprobs")) is not None]
    assert len(found) == 1 and len(found[0]) == len(prompt)
