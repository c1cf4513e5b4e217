"""The OpenAI surface on the demo model: streamed and whole answers are equal over a matrix of features."""

from typing import Any

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
            [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()],
            [(entry.token, entry.logprob) for entry in choice.logprobs.content] if choice.logprobs else [],
            choice.finish_reason,
        )
        for choice in answer.choices
    ]


def joined(chunks: list[Any]) -> list[Any]:
    found: dict[int, list[Any]] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            state = found.setdefault(choice.index, ["", "", [], [], None])
            state[0] += choice.delta.content or ""
            state[1] += getattr(choice.delta, "reasoning_content", None) or ""
            for call in choice.delta.tool_calls or ():
                if call.id:
                    state[2].append((call.function.name, ""))
                else:
                    name, text = state[2][call.index]
                    state[2][call.index] = (name, text + call.function.arguments)
            state[3] += [(entry.token, entry.logprob) for entry in (choice.logprobs.content if choice.logprobs else ())]
            state[4] = choice.finish_reason or state[4]
    return [(index, *found[index]) for index in sorted(found)]


@pytest.mark.parametrize("name", FEATURES)
def test_streamed_equals_whole(client: Any, name: str) -> None:
    keys: dict[str, Any] = {"model": "demo", "messages": MESSAGES, "seed": 7, "max_tokens": 48} | FEATURES[name]
    whole = client.chat.completions.create(**keys)
    *chunks, last = client.chat.completions.create(**keys, stream=True, stream_options={"include_usage": True})
    assert joined(chunks) == text_of(whole)
    mine, theirs = last.usage.model_dump(), whole.usage.model_dump()
    for usage in (mine, theirs):
        usage.pop("prompt_tokens_details")  # the second finds the first's prefix
    assert mine == theirs


def test_constraints_hold(client: Any) -> None:
    keys: dict[str, Any] = {"model": "demo", "messages": MESSAGES, "max_tokens": 64, "temperature": 1.5, "seed": 1}
    for choice in client.chat.completions.create(**keys, **FEATURES["choice"], n=4).choices:
        assert choice.message.content in ("Paris", "Rome")
    called = client.chat.completions.create(**keys, **FEATURES["required"], n=4)
    for choice in called.choices:
        if choice.finish_reason == "tool_calls":
            assert {call.function.name for call in choice.message.tool_calls} == {"weather"}
    assert any(choice.finish_reason == "tool_calls" for choice in called.choices)
