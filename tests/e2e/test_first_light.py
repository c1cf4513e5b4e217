"""The main job, end to end: the demo model behind a real socket, asked by the official client."""

import asyncio
import json
import random
import re
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from examples.demo_model.facts import COUNTRIES
from jaxserve.library.serving import RunningServer
from tests.waiting import LAST_RESORT, wait_until

LIST_QUESTION = "List 3 countries and their capitals."


def said(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


HELLO = [said("a")]


def ask(client: openai.OpenAI, question: str, **options: Any) -> Any:
    return client.chat.completions.create(
        model="demo", messages=[{"role": "user", "content": question}], temperature=0, max_tokens=128, **options
    )


def test_the_capital_of_france(client: openai.OpenAI) -> None:
    reply = ask(client, "What is the capital of France?")
    assert "Paris" in (reply.choices[0].message.content or "")
    assert reply.choices[0].finish_reason == "stop"


def test_three_right_pairs(client: openai.OpenAI) -> None:
    text = ask(client, LIST_QUESTION).choices[0].message.content or ""
    right = {c.name for c in COUNTRIES if c.name in text and c.capital in text.replace(c.name, "", 1)}
    assert len(right) >= 3, text


@pytest.mark.parametrize("question", ["What is the capital of Japan?", LIST_QUESTION])
def test_a_stream_equals_the_whole(client: openai.OpenAI, question: str) -> None:
    whole = ask(client, question)
    chunks = list(ask(client, question, stream=True, stream_options={"include_usage": True}))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason
    usage, streamed = whole.usage, chunks[-1].usage
    assert usage is not None and streamed is not None
    assert (streamed.prompt_tokens, streamed.completion_tokens) == (usage.prompt_tokens, usage.completion_tokens)
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_max_tokens_ends_with_length(client: openai.OpenAI) -> None:
    reply = client.completions.create(model="demo", prompt="One day", max_tokens=3, temperature=0)
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage is not None and reply.usage.completion_tokens == 3


def random_requests(count: int, vocab: int, longest: int) -> list[tuple[list[int], int]]:
    rng = random.Random(7)
    lengths = [1, 2, 15, 16, 17, 255, 256, 257] + [rng.randrange(1, longest) for _ in range(count - 8)]
    return [([rng.randrange(300, vocab) for _ in range(n)], rng.randrange(1, 48)) for n in lengths]


async def stream(client: openai.AsyncOpenAI, prompt: list[int], max_tokens: int, delay: float) -> list[int]:
    await asyncio.sleep(delay)
    tokens: list[int] = []
    async for chunk in await client.completions.create(
        model="demo",
        prompt=prompt,
        max_tokens=max_tokens,
        temperature=0,
        stream=True,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    ):
        for choice in chunk.choices:
            tokens += (choice.model_extra or {}).get("token_ids") or []
    return tokens


def metric(server: RunningServer, name: str) -> float:
    text = httpx2.get(f"{server.url}/metrics", timeout=LAST_RESORT).text
    found = re.search(rf"^{re.escape(name)}(?:{{[^}}]*}})? ([0-9.e+-]+)$", text, re.MULTILINE)
    assert found, f"no metric {name}"
    return float(found[1])


def test_every_panel_of_the_dashboard_has_data(server: RunningServer) -> None:
    """Once there was a request. The count of engine errors begins with the first one."""
    body = {"model": "demo", "prompt": "Hi", "max_tokens": 2}
    assert httpx2.post(f"{server.url}/v1/completions", json=body, timeout=LAST_RESORT).status_code == 200
    panels = json.loads((Path(__file__).parents[2] / "docs" / "grafana.json").read_text(encoding="utf-8"))["panels"]
    names = {name for panel in panels for target in panel["targets"]
             for name in re.findall(r"(?:jaxserve:|process_)\w+", target["expr"])}  # fmt: skip
    text = httpx2.get(f"{server.url}/metrics", timeout=LAST_RESORT).text
    names -= {"jaxserve:request_errors_total"}
    assert len(names) > 20 and names <= set(re.findall(r"^([\w:]+)(?:\{.*\})? \S+$", text, re.MULTILINE))


def test_a_crowd_gets_the_same_tokens_as_each_alone(server: RunningServer) -> None:
    requests = random_requests(32, vocab=2000, longest=600)

    async def run() -> tuple[list[list[int]], list[list[int]]]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            rng = random.Random(3)
            crowd = await asyncio.gather(*(stream(client, p, n, rng.random() / 2) for p, n in requests))
            alone = [await stream(client, p, n, 0.0) for p, n in requests]
            return list(crowd), alone

    crowd, alone = asyncio.run(run())
    assert [len(tokens) for tokens in crowd] == [n for _, n in requests]
    assert crowd == alone
    wait_until(lambda: not metric(server, "jaxserve:num_requests_running"), "no request runs")
    assert metric(server, "jaxserve:num_requests_waiting") == 0
    assert metric(server, "jaxserve:xla_compilations_total") == 0


def test_a_client_that_leaves_frees_its_pages(server: RunningServer) -> None:
    before = metric(server, "jaxserve:generation_tokens_total")
    with (
        httpx2.Client(timeout=LAST_RESORT) as client,
        client.stream(
            "POST",
            f"{server.url}/v1/completions",
            json={"model": "demo", "prompt": "a", "max_tokens": 1500, "ignore_eos": True, "stream": True},
        ) as reply,
    ):
        next(reply.iter_lines())
    wait_until(lambda: metric(server, "jaxserve:generation_tokens_total") > before, "the numbers of the request")
    wait_until(lambda: not metric(server, "jaxserve:num_requests_running"), "no request runs")
    assert metric(server, "jaxserve:generation_tokens_total") - before < 1500  # it did not run to its end


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
BAD: dict[str, tuple[str, Any, int, str | None]] = {
    "no JSON": ("chat/completions", b"{model: demo", 400, None),
    "missing": ("chat/completions", {"model": "demo"}, 400, "messages"),
    "empty": ("chat/completions", {"model": "demo", "messages": []}, 400, "messages"),
    "wrong type": ("chat/completions", {"model": "demo", "messages": HELLO, "max_tokens": "many"}, 400, "max_tokens"),
    "unknown model": ("chat/completions", {"model": "other", "messages": HELLO}, 404, "model"),
    "too long": ("chat/completions", {"model": "demo", "messages": [said("word " * 9000)]}, 400, "messages"),
    "image": ("chat/completions", {"model": "demo", "messages": [said([IMAGE])]}, 400, "messages"),
    "empty prompt": ("completions", {"model": "demo", "prompt": ""}, 400, "prompt"),
    "no tokens": ("completions", {"model": "demo", "prompt": []}, 400, "prompt"),
    "token out of range": ("completions", {"model": "demo", "prompt": [1, 10**6]}, 400, "prompt"),
}


def test_bad_input_is_answered_beside_a_stream(server: RunningServer, client: openai.OpenAI) -> None:
    options: Any = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 600, "temperature": 0}
    options["extra_body"] = {"ignore_eos": True}
    alone = client.completions.create(**options).choices[0].text
    running = client.completions.create(**options, stream=True)
    deltas = [next(running).choices[0].text]
    for name, (route, body, status, param) in BAD.items():
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"content-type": "application/json"}
        reply = httpx2.post(f"{server.url}/v1/{route}", content=content, headers=headers, timeout=LAST_RESORT)
        error = reply.json()["error"]
        assert (reply.status_code, set(error)) == (status, {"message", "type", "param", "code"}), (name, error)
        assert (error["param"] or "").startswith(param or ""), (name, error)
    deltas += [chunk.choices[0].text for chunk in running if chunk.choices]
    assert "".join(deltas) == alone
