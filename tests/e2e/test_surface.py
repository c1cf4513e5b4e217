"""The OpenAI surface on the demo model: streamed and whole answers are equal over a matrix of features."""

from typing import Any

import numpy as np
import pytest

MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "n": {"type": "integer", "maximum": 99, "minimum": 0}},
    "required": ["city", "n"],
    "additionalProperties": False,
}
WEATHER_SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 10}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": WEATHER_SCHEMA}}
TIME = {"type": "function", "function": {"name": "time", "parameters": WEATHER_SCHEMA, "strict": True}}
ONLY_TIME = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [TIME]}}
DIGITS = {"type": "grammar", "grammar": {"syntax": "lark", "definition": "start: /[0-9]{2,6}/"}}
NUMBERS = {"type": "custom", "custom": {"name": "numbers", "format": DIGITS}}
TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "<city>", "schema": WEATHER_SCHEMA, "end": "</city>"}],
    "triggers": ["<city>"],
}
NAMED = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}

FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "greedy": {"temperature": 0},
    "n": {"n": 3},
    "logprobs": {"logprobs": True, "top_logprobs": 3},
    "stop": {"stop": [" of", "is"]},
    "penalties": {"frequency_penalty": 0.5, "presence_penalty": 0.5, "extra_body": {"repetition_penalty": 1.2}},
    "sampling": {"top_p": 0.8, "extra_body": {"top_k": 5, "min_p": 0.02, "min_tokens": 5}},
    "bias": {"logit_bias": {"300": 5, "301": -100}},
    "schema": {"response_format": NAMED},
    "object": {"response_format": {"type": "json_object"}, "n": 2},
    "regex": {"extra_body": {"regex": "[a-z]{3,9}( [a-z]{3,9}){1,3}"}},
    "choice": {"extra_body": {"structured_outputs": {"choice": ["Paris", "Rome"]}}, "logprobs": True},
    "required": {"tools": [WEATHER], "tool_choice": "required"},
    "auto": {"tools": [WEATHER]},
    "schema or tool": {"tools": [WEATHER], "response_format": NAMED},
    "legacy functions": {"functions": [WEATHER["function"]], "function_call": {"name": "weather"}},
    "named": {"tools": [WEATHER, TIME], "tool_choice": {"type": "function", "function": {"name": "time"}}},
    "allowed": {"tools": [WEATHER, TIME], "tool_choice": ONLY_TIME},
    "one call": {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False, "logprobs": True},
    "custom tool": {"tools": [NUMBERS], "tool_choice": {"type": "custom", "custom": {"name": "numbers"}}},
    "lark": {"extra_body": {"structured_outputs": {"grammar": 'start: "a" /[b-d]{3,9}/ "e"'}}},
    "structural tag": {"extra_body": {"structured_outputs": {"structural_tag": TAG}}},
    "stop token": {"extra_body": {"stop_token_ids": list(range(300, 900)), "include_stop_str_in_output": True}},
    "stop regex": {"extra_body": {"stop_regex": "[a-z]{5}"}},
    "bad words": {"extra_body": {"bad_words": ["Paris", "capital of"], "ignore_eos": True}},
    "allowed ids": {"extra_body": {"allowed_token_ids": list(range(256, 700)), "return_token_ids": True}},
    "special tokens": {"extra_body": {"skip_special_tokens": False}},
    "interval": {"extra_body": {"stream_interval": 5}, "logprobs": True},
    "budget": {"extra_body": {"chat_template_kwargs": {"enable_thinking": True}, "thinking_token_budget": 4}},
    "thinking in content": {
        "extra_body": {"chat_template_kwargs": {"enable_thinking": True}, "separate_reasoning": False}
    },
    "thinking with tools": {
        "extra_body": {"chat_template_kwargs": {"enable_thinking": True}},
        "tools": [WEATHER],
        "tool_choice": "required",
        "logprobs": True,
    },
    "thinking": {"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}, "logprobs": True},
    "thinking then schema": {
        "extra_body": {"chat_template_kwargs": {"enable_thinking": True}},
        "response_format": NAMED,
    },
}


def text_of(answer: Any) -> list[Any]:
    """What of an answer must not depend on streaming."""
    return [
        (
            choice.index,
            choice.message.content or "",
            choice.message.reasoning_content or "",
            [call_of(call) for call in [*(choice.message.tool_calls or ()), choice.message.function_call] if call],
            [(entry.token, entry.logprob) for entry in choice.logprobs.content] if choice.logprobs else [],
            choice.finish_reason,
        )
        for choice in answer.choices
    ]


def call_of(call: Any) -> tuple[str, str]:
    if getattr(call, "type", "") == "custom":
        return call.custom.name, call.custom.input
    function = getattr(call, "function", call)
    return function.name, function.arguments


def joined(chunks: list[Any]) -> list[Any]:
    found: dict[int, list[Any]] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            state = found.setdefault(choice.index, ["", "", [], [], None])
            state[0] += choice.delta.content or ""
            state[1] += getattr(choice.delta, "reasoning_content", None) or ""
            for call in choice.delta.tool_calls or ():
                part = call.function or call.model_extra["custom"]
                part = part if isinstance(part, dict) else part.model_dump()
                add_call(state[2], call.index if call.id is None else None, part)
            if choice.delta.function_call:
                part = choice.delta.function_call
                add_call(state[2], 0 if part.name is None else None, part.model_dump())
            state[3] += [(entry.token, entry.logprob) for entry in (choice.logprobs.content if choice.logprobs else ())]
            state[4] = choice.finish_reason or state[4]
    return [(index, *found[index]) for index in sorted(found)]


def add_call(calls: list[tuple[str, str]], index: int | None, part: dict[str, str]) -> None:
    """index: of a call that goes on; None begins one."""
    text = part.get("arguments") or part.get("input") or ""
    if index is None:
        calls.append((part["name"], text))
    else:
        calls[index] = (calls[index][0], calls[index][1] + text)


@pytest.mark.parametrize("name", FEATURES)
def test_streamed_equals_whole(client: Any, name: str) -> None:
    keys: dict[str, Any] = {"model": "demo", "messages": MESSAGES, "seed": 7, "max_tokens": 48} | FEATURES[name]
    client.chat.completions.create(**keys)  # both find the same prefix
    whole = client.chat.completions.create(**keys)
    *chunks, last = client.chat.completions.create(**keys, stream=True, stream_options={"include_usage": True})
    (streamed, its), (expected, theirs) = map(without_numbers, (joined(chunks), text_of(whole)))
    assert streamed == expected
    # Without runtime.deterministic the bits of a step depend on what else is in it.
    np.testing.assert_allclose(its, theirs, rtol=0, atol=1e-4)
    assert last.usage == whole.usage


def without_numbers(choices: list[Any]) -> tuple[list[Any], list[float]]:
    """The choices with the tokens of their log-probabilities alone, and the log-probabilities."""
    texts = [(*choice[:4], [token for token, _ in choice[4]], choice[5]) for choice in choices]
    return texts, [logprob for choice in choices for _, logprob in choice[4]]


def test_constraints_hold(client: Any) -> None:
    keys: dict[str, Any] = {"model": "demo", "messages": MESSAGES, "max_tokens": 64, "temperature": 1.5, "seed": 1}
    for choice in client.chat.completions.create(**keys, **FEATURES["choice"], n=4).choices:
        assert choice.message.content in ("Paris", "Rome")
    called = client.chat.completions.create(**keys, **FEATURES["required"], n=4)
    for choice in called.choices:
        if choice.finish_reason == "tool_calls":
            assert {call.function.name for call in choice.message.tool_calls} == {"weather"}
    assert any(choice.finish_reason == "tool_calls" for choice in called.choices)


TEXT_FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "n and prompts": {"prompt": ["Once", "The capital"], "n": 2},
    "token ids": {"prompt": [[300, 301, 302], [400]]},
    "logprobs": {"logprobs": 4},
    "echo": {"echo": True, "logprobs": 2},
    "score": {"echo": True, "logprobs": 2, "max_tokens": 0},
    "stop": {"stop": [" of", "is", "\n"]},
    "schema": {"response_format": NAMED, "extra_body": {"return_token_ids": True}},
    "regex": {"extra_body": {"regex": "[a-z]{3,9}( [a-z]{3,9}){1,3}", "ignore_eos": True}},
    "penalties": {"frequency_penalty": 1.5, "presence_penalty": 0.5, "seed": 3},
    "truncated": {"prompt": list(range(300, 400)), "extra_body": {"truncate_prompt_tokens": 5}},
    "min tokens": {"extra_body": {"min_tokens": 30, "top_k": 3}},
}


@pytest.mark.parametrize("name", TEXT_FEATURES)
def test_a_streamed_completion_equals_the_whole(client: Any, name: str) -> None:
    base: dict[str, Any] = {"model": "demo", "prompt": "The capital of France", "seed": 7, "max_tokens": 40}
    changes = dict(TEXT_FEATURES[name])
    if "response_format" in changes:  # the client has no such argument here
        changes["extra_body"] = changes["extra_body"] | {"response_format": changes.pop("response_format")}
    keys = base | changes
    client.completions.create(**keys)
    whole = client.completions.create(**keys)
    *chunks, last = client.completions.create(**keys, stream=True, stream_options={"include_usage": True})
    for choice in whole.choices:
        mine = [c.choices[0] for c in chunks if c.choices[0].index == choice.index]
        assert "".join(c.text for c in mine) == choice.text
        assert [c.finish_reason for c in mine if c.finish_reason] == [choice.finish_reason]
        assert mine[-1].stop_reason == choice.stop_reason and mine[-1].matched_stop == choice.matched_stop
        for field in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            parts = [x for c in mine if c.logprobs for x in getattr(c.logprobs, field)]
            assert parts == (getattr(choice.logprobs, field) if choice.logprobs else []), field
    assert last.usage == whole.usage
