"""Reasoning in chat, beside content and calls: streamed and whole are equal, whatever the model writes."""

import json
import re
from collections.abc import Iterable
from typing import Any

import pytest

from jaxserve.config import Config

from .conftest import LiveServer, reply_with
from .test_tools import CALL, CALLED, MESSAGES, WEATHER, both


def test_reasoning(server: LiveServer, client: Any) -> None:
    reply_with(server, "<think>\nTwo and two\nis four.\n</think>\n\nIt is 4.")
    whole, _ = both(client, extra_body={"chat_template_kwargs": {"enable_thinking": True}, "separate_reasoning": True})
    message = whole.choices[0].message
    assert message.reasoning_content == "Two and two\nis four." and message.content == "It is 4."
    usage = whole.usage
    expected = len(server.link.tokenizer.encode("<think>\nTwo and two\nis four.\n</think>\n\n"))
    assert abs(usage.completion_tokens_details.reasoning_tokens - expected) <= 1
    whole, _ = both(client, extra_body={"separate_reasoning": False})
    assert whole.choices[0].message.content.startswith("<think>")
    assert whole.choices[0].message.reasoning_content is None
    whole, _ = both(client, extra_body={"include_reasoning": False})
    assert whole.choices[0].message.reasoning_content is None and whole.choices[0].message.content == "It is 4."
    whole, chunks = both(client, extra_body={"stream_reasoning": False})
    pieces = [c.choices[0].delta for c in chunks[:-1] if c.choices[0].delta.reasoning_content]
    assert [piece.reasoning_content for piece in pieces] == ["Two and two\nis four."]


@pytest.mark.parametrize("text, content", [
    (f"<think>hm</think>{CALL}", None),
    ("<think>hm</think>It is naïve: 👩‍👩‍👧 日本 < 4.", "It is naïve: 👩‍👩‍👧 日本 < 4."),
    ("It is 4.", "It is 4."),
    ("日本 👩‍👩‍👧", "日本 👩‍👩‍👧"),
    ("<think>hm</think>日本 👩‍👩‍👧", "日本 👩‍👩‍👧"),
    (f"{CALL}\n日本", "日本"),
    (f"I look.{CALL}", "I look."),
    ("<think>hm</think>First.END of it", "First."),
])  # fmt: skip
def test_log_probabilities_join_to_the_content(server: LiveServer, client: Any, text: str, content: str | None) -> None:
    """Reasoning, tags, calls, the end token and a stop string have none."""
    reply_with(server, text)
    whole, chunks = both(client, tools=[WEATHER], logprobs=True, n=2, stop=["END"])
    choice = whole.choices[1]
    assert choice.message.content == content
    entries = choice.logprobs.content if choice.logprobs else []
    joined = b"".join(bytes(entry.bytes) for entry in entries).decode()
    assert joined == (content or "")
    streamed = [c.choices[0] for c in chunks[:-1] if c.choices[0].index == 1 and c.choices[0].logprobs]
    assert [entry for part in streamed for entry in part.logprobs.content] == entries
    for interval in (3, 100):
        body = {"model": "demo", "messages": MESSAGES, "tools": [WEATHER], "logprobs": True, "stop": ["END"]}
        answer = server.post("/v1/chat/completions", body | {"stream_interval": interval}).json()["choices"][0]
        assert joined_bytes((answer["logprobs"] or {}).get("content", ())) == (content or ""), interval
    body = {"model": "demo", "messages": MESSAGES, "logprobs": True, "options": {"stop": ["END"]}, "think": True}
    for stream in (True, False):
        lines = server.post("/api/chat", body | {"tools": [WEATHER], "stream": stream}).text.splitlines()
        entries = [entry for line in lines for entry in json.loads(line).get("logprobs", ())]
        assert joined_bytes(entries) == (content or ""), stream


def joined_bytes(entries: Iterable[dict[str, Any]]) -> str:
    return b"".join(bytes(entry["bytes"]) for entry in entries).decode()


def test_no_thinking_gives_none(server: LiveServer, client: Any) -> None:
    reply_with(server, "It is 4.")
    whole, _ = both(client, extra_body={"chat_template_kwargs": {"enable_thinking": False}})
    assert whole.choices[0].message.reasoning_content is None


THOUGHT = "<think>hm</think>Yes."


@pytest.mark.parametrize("text", [THOUGHT, "Yes.", f"<think>hm</think>{CALL}"])
@pytest.mark.parametrize("extra", [{}, {"logprobs": True}, {"stream_reasoning": False}, {"include_reasoning": False}])
def test_one_name_for_the_reasoning_and_it_is_always_there(
    server: LiveServer, text: str, extra: dict[str, Any]
) -> None:
    reply_with(server, text)
    body = {"model": "demo", "messages": MESSAGES, "tools": [WEATHER], **extra}
    message = server.post("/v1/chat/completions", body).json()["choices"][0]["message"]
    response = server.post("/v1/chat/completions", body | {"stream": True})
    deltas = [json.loads(line[6:])["choices"][0]["delta"] for line in response.text.split("\n\n")[:-2]]
    assert len(deltas) > 2
    for each in (message, *deltas):
        assert "reasoning_content" in each and "reasoning" not in each
    expected = "hm" if "hm" in text and extra != {"include_reasoning": False} else None
    assert message["reasoning_content"] == expected
    assert ("".join(delta["reasoning_content"] or "" for delta in deltas) or None) == expected


def test_vllms_name_for_the_reasoning_by_an_option() -> None:
    with LiveServer(Config().replace(server={"reasoning_field": "both"})) as server:
        reply_with(server, THOUGHT)
        body = {"model": "demo", "messages": MESSAGES}
        message = server.post("/v1/chat/completions", body).json()["choices"][0]["message"]
        assert message["reasoning"] == message["reasoning_content"] == "hm"
        response = server.post("/v1/chat/completions", body | {"stream": True})
        deltas = [json.loads(line[6:])["choices"][0]["delta"] for line in response.text.split("\n\n")[:-2]]
        assert all(delta["reasoning"] == delta["reasoning_content"] for delta in deltas)


def test_both_names_of_the_reasoning_are_read(server: LiveServer) -> None:
    prompts = []
    for name in ("reasoning", "reasoning_content"):
        answer = {"role": "assistant", "content": None, "tool_calls": [CALLED], name: "hm hm"}
        result = {"role": "tool", "tool_call_id": "c", "content": "sun"}
        body = {"model": "demo", "messages": [*MESSAGES, answer, result], "tools": [WEATHER]}
        assert server.post("/v1/chat/completions", body).status_code == 200
        prompts.append(server.link.tokenizer.decode(server.link.seen[-1].prompt_token_ids))
    assert prompts[0] == prompts[1] and "hm hm" in prompts[0]


def test_an_open_thought_cut_by_length(server: LiveServer, client: Any) -> None:
    reply_with(server, "<think>one two three four five six seven")
    whole, _ = both(client, max_tokens=4)
    assert whole.choices[0].finish_reason == "length"
    assert whole.choices[0].message.content is None and whole.choices[0].message.reasoning_content


def test_a_stop_string_does_not_end_the_thinking_on_any_route(server: LiveServer) -> None:
    reply_with(server, "<think>First END, then</think><think>more: END.</think>It is 4. END of it.")
    for path, stop, body in (
        ("/v1/chat/completions", {"stop": ["END"]}, {"messages": MESSAGES}),
        ("/v1/chat/completions", {"stop_regex": ["EN?D"]}, {"messages": MESSAGES}),
        ("/v1/responses", {"stop": ["END"]}, {"input": "hi"}),
        ("/v1/messages", {"stop_sequences": ["END"]}, {"messages": MESSAGES}),
        ("/api/chat", {"options": {"stop": ["END"]}}, {"messages": MESSAGES, "think": True}),
    ):
        for stream in (False, True):
            length = {"max_tokens": 200} if path == "/v1/messages" else {}
            answer = server.post(path, {"model": "demo", "stream": stream} | length | stop | body)
            assert answer.status_code == 200, answer.text
            pieces = re.findall(r'"(?:delta|reasoning_content|thinking|content|text)":\s*"([^"]*)"', answer.text)
            text = "".join(pieces)
            assert "First END, then" in text and "more: END." in text and "It is 4." in text, (
                path,
                stream,
                answer.text,
            )
            assert " of it" not in text, (path, stream, answer.text)


def test_a_constrained_answer_is_not_read_as_reasoning(server: LiveServer, client: Any) -> None:
    """Text that spells a tag is the answer's own."""
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    for text in ("<think>", "<think>no", "</think>", "a</think>b"):
        reply_with(server, text)
        whole, _ = both(client, extra_body=off | {"structured_outputs": {"choice": [text, "x"]}})
        assert (whole.choices[0].message.content, whole.choices[0].message.reasoning_content) == (text, None)
    reply_with(server, f"<think>hm {CALL}</think> and <think>so</think>Done.</think>")
    whole, _ = both(client, tools=[WEATHER])
    message = whole.choices[0].message
    assert (message.content, message.reasoning_content, len(message.tool_calls)) == ("and Done.", "hm\nso", 1)
