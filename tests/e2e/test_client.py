"""The official client on the demo model: the calls of OpenAI's and SGLang's pages, its helpers, sync and async."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from jaxserve.library.serving import RunningServer

LIST = "List 3 countries and their capitals."
ROME = [
    {"role": "system", "content": "You are a knowledgeable historian who provides concise responses."},
    {"role": "user", "content": "Tell me about ancient Rome"},
    {"role": "assistant", "content": "Ancient Rome was a civilization centered in Italy."},
    {"role": "user", "content": "What were their major achievements?"},
]
HELPFUL = [{"role": "system", "content": "You are a helpful AI assistant"}, {"role": "user", "content": LIST}]
WARM = {"temperature": 0.3, "top_p": 0.95, "presence_penalty": 0.2, "frequency_penalty": 0.2, "n": 1, "seed": 42}
STORY = {"prompt": "Write a short story about a space explorer.", "temperature": 0.7, "max_tokens": 150, "top_p": 0.9}
STORY |= {"stop": ["\n\n", "THE END"], "presence_penalty": 0.3, "frequency_penalty": 0.3, "n": 1, "seed": 123}
THINK = {"chat_template_kwargs": {"enable_thinking": True}, "separate_reasoning": True}

# every call of the pages, with its arguments; they use the served model's name
CALLS: dict[str, dict[str, Any]] = {
    "chat": {"messages": [{"role": "user", "content": LIST}], "temperature": 0, "max_tokens": 64},
    "chat with system": {"messages": HELPFUL, "temperature": 0, "max_tokens": 64},
    "chat, detailed": {"messages": ROME, "max_tokens": 128, **WARM},
    "chat, detailed, stop": {"messages": ROME, "max_tokens": 100, "stop": ["\n\n"], **WARM},
    "chat, detailed, streamed": {"messages": ROME, "max_tokens": 100, "stop": ["\n\n"], **WARM, "stream": True},
    "chat, streamed": {"messages": [{"role": "user", "content": "Say this is a test"}], "stream": True},
    "thinking": {"messages": [{"role": "user", "content": "9.11 and 9.8, which is greater?"}], "extra_body": THINK},
    "completion": {"prompt": LIST, "temperature": 0, "max_tokens": 64, "n": 1, "stop": None},
    "completion, detailed": STORY,
    "completion, detailed, streamed": STORY | {"stream": True},
}


class Capital(BaseModel):
    country: str
    capital: str


def call(client: Any, name: str) -> Any:
    api = client.completions if "completion" in name else client.chat.completions
    return api.create(model="demo", **CALLS[name])


def check(name: str, answer: Any) -> None:
    if "streamed" in name:
        deltas = [chunk.choices[0].delta.content if "chat" in name else chunk.choices[0].text for chunk in answer]
        reasons = [chunk.choices[0].finish_reason for chunk in answer]
        assert "".join(delta or "" for delta in deltas) and reasons[-1] in ("stop", "length") and not any(reasons[:-1])
        return
    (choice,) = answer.choices
    assert choice.finish_reason in ("stop", "length") and hasattr(choice, "matched_stop")
    usage = answer.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens > usage.completion_tokens > 0
    text = choice.text if "completion" in name else choice.message.content
    if name == "thinking":
        assert choice.message.reasoning_content and not hasattr(choice.message, "reasoning")
        assert "<think>" not in (text or "")
    else:
        assert text and (name == "thinking" or "messages" not in CALLS[name] or choice.message.role == "assistant")


@pytest.mark.parametrize("name", CALLS)
def test_a_call_of_the_pages(client: Any, name: str) -> None:
    answer = call(client, name)
    check(name, list(answer) if "streamed" in name else answer)


def test_the_same_calls_at_once_from_the_async_client(server: RunningServer) -> None:
    async def ask(client: openai.AsyncOpenAI, name: str) -> Any:
        answer = await call(client, name)
        return [chunk async for chunk in answer] if "streamed" in name else answer

    async def run() -> list[Any]:
        client: Any
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="None", max_retries=0) as client:
            return await asyncio.gather(*(ask(client, name) for name in CALLS))

    for name, answer in zip(CALLS, asyncio.run(run()), strict=True):
        check(name, answer)


def test_without_thinking_there_is_no_reasoning(client: Any) -> None:
    for extra in ({"chat_template_kwargs": {"enable_thinking": False}}, {}):
        message = call_with(client, "thinking", extra_body=extra).choices[0].message
        assert message.reasoning_content is None and message.content
    whole = call_with(client, "thinking", extra_body=THINK | {"separate_reasoning": False}).choices[0].message
    assert whole.reasoning_content is None and "</think>" in (whole.content or "")


def call_with(client: Any, name: str, **changes: Any) -> Any:
    return client.chat.completions.create(model="demo", **(CALLS[name] | {"temperature": 0} | changes))


QUESTION: dict[str, Any] = {
    "model": "demo",
    "messages": [{"role": "user", "content": "What is the capital of France? Answer in JSON."}],
    "temperature": 0,
    "max_tokens": 100,
}


def test_parse(client: Any) -> None:
    parsed = client.chat.completions.parse(**QUESTION, response_format=Capital).choices[0].message.parsed
    assert isinstance(parsed, Capital)
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(**(QUESTION | {"max_tokens": 2}), response_format=Capital)


def test_the_stream_helper(client: Any) -> None:
    with client.chat.completions.stream(**QUESTION, response_format=Capital) as stream:
        events = [event.type for event in stream]
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= set(events)
    assert isinstance(final.choices[0].message.parsed, Capital)
    assert final.choices[0].message.parsed == client.chat.completions.parse(
        **QUESTION, response_format=Capital
    ).choices[0].message.parsed  # fmt: skip


def test_the_helpers_of_the_async_client(server: RunningServer) -> None:
    async def run() -> tuple[Any, Any]:
        client: Any
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="None", max_retries=0) as client:
            parsed = await client.chat.completions.parse(**QUESTION, response_format=Capital)
            async with client.chat.completions.stream(**QUESTION, response_format=Capital) as stream:
                return parsed, await stream.get_final_completion()

    parsed, streamed = asyncio.run(run())
    assert isinstance(parsed.choices[0].message.parsed, Capital)
    assert streamed.choices[0].message.parsed == parsed.choices[0].message.parsed


class Weather(BaseModel):
    """The weather in a city."""

    city: str


def test_a_tool_of_a_pydantic_model(client: Any) -> None:
    tool = openai.pydantic_function_tool(Weather)
    keys = {"model": "demo", "messages": [{"role": "user", "content": "Weather in Paris?"}], "max_tokens": 100}
    answer = client.chat.completions.parse(**keys, temperature=0, tools=[tool], tool_choice="required")
    (called,) = answer.choices[0].message.tool_calls or [None]
    assert called is not None and isinstance(called.function.parsed_arguments, Weather)
    result = [
        *keys["messages"],
        answer.choices[0].message.model_dump(exclude_none=True, exclude={"parsed", "annotations"}),
        {"role": "tool", "tool_call_id": called.id, "content": '{"sky": "clear"}'},
    ]
    after = client.chat.completions.create(**(keys | {"messages": result}), tools=[tool], temperature=0)
    assert after.choices[0].message.content or after.choices[0].message.tool_calls


CUSTOM = {
    "lark": {"syntax": "lark", "definition": 'start: "SELECT " /[a-z]{1,8}/ " FROM " /[a-z]{1,8}/'},
    "regex": {"syntax": "regex", "definition": "[0-9]{3}-[0-9]{4}"},
}
MATCHES: dict[str, Callable[[str], bool]] = {
    "lark": lambda text: text.startswith("SELECT ") and " FROM " in text,
    "regex": lambda text: len(text) == 8 and text[3] == "-",
}


@pytest.mark.parametrize("syntax", CUSTOM)
@pytest.mark.parametrize("choice", ["named", "required", "beside another", "auto"])
def test_custom_tools(client: Any, syntax: str, choice: str) -> None:
    tools: list[Any] = [
        {"type": "custom", "custom": {"name": "run", "format": {"type": "grammar", "grammar": CUSTOM[syntax]}}}
    ]
    wanted: Any = "required" if choice == "required" else {"type": "custom", "custom": {"name": "run"}}
    if choice == "beside another":
        tools.append(openai.pydantic_function_tool(Weather))
        wanted = "required"
    wanted = "auto" if choice == "auto" else wanted
    answer = client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": "Go"}],
        tools=tools,
        tool_choice=wanted,
        max_tokens=80,
        parallel_tool_calls=False,
        seed=3,
    )
    (called,) = answer.choices[0].message.tool_calls or [None]
    if choice == "auto" and called is None:
        assert answer.choices[0].message.content
        return
    assert called is not None and answer.choices[0].finish_reason in ("tool_calls", "length")
    if called.type == "custom" and answer.choices[0].finish_reason == "tool_calls":
        assert MATCHES[syntax](called.custom.input), called
    elif called.type == "function" and answer.choices[0].finish_reason == "tool_calls":
        json.loads(called.function.arguments)


def test_errors_become_the_clients_exceptions(client: Any) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="none", messages=[{"role": "user", "content": "x"}])
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model="demo", messages=[{"role": "user", "content": "x"}], temperature=3)
    assert wrong.value.param == "temperature" and wrong.value.type == "invalid_request_error"
    long = {"role": "user", "content": "word " * 9000}
    with pytest.raises(openai.BadRequestError) as over:
        client.chat.completions.create(model="demo", messages=[long])  # type: ignore[list-item]
    assert over.value.code == "context_length_exceeded"
