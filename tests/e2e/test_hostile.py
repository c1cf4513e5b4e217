"""Constraints made to hurt, over HTTP: each ends in time, and a stream beside them keeps its pace."""

import json
import threading
import time
from collections import Counter
from typing import Any

import httpx2
import openai
import pytest

from jaxserve.library.serving import RunningServer
from jaxserve.types.sampling import GrammarSpec
from tests.grammar.hostile import many_hostile
from tests.waiting import LAST_RESORT

LIMIT = 2.0  # seconds a request, on an idle machine: of the long form


def body_of(spec: GrammarSpec, number: int) -> bytes:
    """The same constraint in one of the places that take it. Written by hand: some are no JSON that a client makes."""
    if spec.kind == "choice":
        field = '"structured_outputs": {"choice": ' + spec.source + "}"
    elif spec.kind != "json_schema":
        name = "regex" if spec.kind == "regex" else "grammar"
        field = '"structured_outputs": ' + json.dumps({name: spec.source})
    elif number % 3 == 0:
        field = '"json_schema": ' + json.dumps(spec.source)
    elif number % 3 == 1:
        field = (
            '"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": ' + spec.source + "}}"
        )
    else:
        field = '"tools": [{"type": "function", "function": {"name": "f", "parameters": ' + spec.source
        field += '}}], "tool_choice": "required"'
    head = '{"model": "demo", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "temperature": 1, '
    return (head + field + "}").encode("utf-8", "surrogatepass")


class Stream(threading.Thread):
    """Streams one endless answer after the other and keeps the gaps between two chunks, in seconds."""

    def __init__(self, client: openai.OpenAI) -> None:
        super().__init__()
        self.client, self.gaps, self.over = client, list[float](), threading.Event()

    def run(self) -> None:
        extra = {"ignore_eos": True}
        while not self.over.is_set():
            chunks = self.client.completions.create(
                model="demo", prompt="Once", max_tokens=1500, stream=True, extra_body=extra
            )
            last = None
            for _ in chunks:
                now = time.perf_counter()
                self.gaps += [] if last is None else [now - last]
                last = now
                if self.over.is_set():
                    chunks.close()
                    break


def throw(server: RunningServer, client: openai.OpenAI, specs: list[GrammarSpec]) -> str:
    """Send each; the report. Asserts what must hold of every answer."""
    stream, answers, slowest = Stream(client), Counter[int](), (0.0, "")
    stream.start()
    try:
        with httpx2.Client(base_url=server.url, timeout=LAST_RESORT) as http:
            for number, spec in enumerate(specs):
                began = time.perf_counter()
                headers = {"content-type": "application/json"}
                reply = http.post("/v1/chat/completions", content=body_of(spec, number), headers=headers)
                seconds = time.perf_counter() - began
                slowest = max(slowest, (seconds, f"{spec.kind} {spec.source[:60]}"))
                answers[reply.status_code] += 1
                assert reply.status_code in (200, 400, 413), (spec.source[:80], reply.text)
                if reply.status_code == 400:
                    check_error(reply.json()["error"])
    finally:
        stream.over.set()
        stream.join()
    assert len(specs) < 200 or slowest[0] < LIMIT, slowest
    gaps = sorted(stream.gaps)
    report = f"{len(specs)} hostile constraints: {dict(answers)}, slowest {slowest[0]:.2f} s ({slowest[1]}); "
    report += f"a stream beside them: gap median {gaps[len(gaps) // 2] * 1e3:.0f} ms, "
    return report + f"p99 {gaps[len(gaps) * 99 // 100] * 1e3:.0f} ms, longest {gaps[-1] * 1e3:.0f} ms"


def check_error(error: dict[str, Any]) -> None:
    assert set(error) == {"message", "type", "param", "code"} and len(error["message"]) < 2000
    assert error["param"] or "JSON" in error["message"] or "grammar" in error["message"], error


def canary(client: openai.OpenAI) -> Any:
    return client.completions.create(model="demo", prompt="The capital of France is", max_tokens=8, temperature=0)


@pytest.mark.parametrize("count", [24, pytest.param(200, marks=pytest.mark.slow)])
def test_hostile_constraints(
    server: RunningServer, client: openai.OpenAI, count: int, capsys: pytest.CaptureFixture[str]
) -> None:
    golden = canary(client).choices[0].text
    specs = many_hostile(200)
    report = throw(server, client, specs[:: 200 // count])
    with capsys.disabled():
        print("\n" + report)
    assert canary(client).choices[0].text == golden
