"""What an output costs grows with its length and not with its square: each feature over N and 2N large chunks.

Chunks are large, so that copying what came before would outweigh all else. CPU time of this thread is compared, best of
several: twice the chunks take twice the time, and four times where every chunk copies those before it.
"""

import asyncio
import time
from array import array
from collections.abc import AsyncGenerator, Callable
from typing import Any

import orjson
import pytest

from jaxserve.api.generate.generation import PromptTask, coalesce
from jaxserve.api.generate.wire import RoutedExperts
from jaxserve.api.openai.answer import JoinedMessage, JoinedText
from jaxserve.api.sessions import Session, SessionTurn
from jaxserve.api.sglang.answer import NativeChoice
from jaxserve.api.sglang.task import NativeOptions
from jaxserve.api.work_pool import TokenTexts
from jaxserve.text.detokenizer import RequestOutput
from jaxserve.text.output_parser import REASONING_FAMILIES, ParserChoice, ThinkingLimit
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.text.tools import ToolSet
from jaxserve.types.extras import TokenExtras
from jaxserve.types.sampling import SamplingParams
from jaxserve.types.step import TokenLogprobs

from .fakes import DEMO

TEXT, IDS = "word " * 8, [7] * 8
ENTRIES: list[Any] = [{"token": "a"}] * 8
TEXTS = TokenTexts(Tokenizer.from_directory(DEMO))


def chat(count: int) -> None:
    joined = JoinedMessage(0)
    logprobs = {"content": ENTRIES, "refusal": None}
    for _ in range(count):
        joined.add({"index": 0, "delta": {"content": TEXT}, "logprobs": logprobs, "token_ids": IDS})
    joined.result()


def chat_call(count: int) -> None:
    joined = JoinedMessage(0)
    joined.add({"delta": {"tool_calls": [{"index": 0, "id": "c", "function": {"name": "f"}}]}, "logprobs": None})
    for _ in range(count):
        delta = {"tool_calls": [{"index": 0, "function": {"arguments": TEXT}}]}
        joined.add({"index": 0, "delta": delta, "logprobs": None})
    joined.result()


def completion(count: int) -> None:
    joined = JoinedText()
    arrays = dict.fromkeys(("tokens", "token_logprobs", "top_logprobs", "text_offset"), ENTRIES)
    for _ in range(count):
        joined.add({"index": 0, "text": TEXT, "logprobs": arrays, "token_ids": IDS, "finish_reason": None})
    joined.result()


def output(**fields: Any) -> RequestOutput:
    return RequestOutput("r", 0, text=TEXT, token_ids=IDS, **fields)


def interval(count: int) -> None:
    async def stream() -> AsyncGenerator[tuple[int, RequestOutput], None]:
        for _ in range(count):
            yield 0, output(logprobs=ENTRIES)

    async def main() -> None:
        async for _ in coalesce(stream(), 10**9):
            pass

    asyncio.run(main())


def experts(count: int) -> None:
    found = RoutedExperts()
    for _ in range(count):
        found.note(output(extras=TokenExtras(routed_experts=bytes(400))))


def native_incremental(count: int) -> None:
    job = PromptTask([1], SamplingParams())
    choice = NativeChoice("x", job, NativeOptions(logprobs=True, incremental=True), TEXTS)
    entries = [TokenLogprobs(7, -1.0, 1)]
    for _ in range(count):
        choice.add(RequestOutput("r", 0, text="x", token_ids=[7], logprobs=entries))
        orjson.dumps(choice.result())


def thinking_limit(count: int) -> None:
    limit = ThinkingLimit(REASONING_FAMILIES["qwen3"], 10**9, inside=True, tools=("f",))
    for _ in range(count):
        limit.add(TEXT)


def reasoning(count: int) -> None:
    parser = ParserChoice(reasoning="qwen3").make(prompt="<think>")
    for _ in range(count):
        parser.feed(TEXT)


def call_arguments(family: str, begin: str) -> Callable[[int], None]:
    def run(count: int) -> None:
        tools = ToolSet({"f": {"type": "object", "properties": {"x": {"type": "string"}}}})
        parser = ParserChoice(tool=family).make(tools=tools)
        parser.feed(begin)
        for _ in range(count):
            assert parser.feed(TEXT)

    return run


def replaced_turns(count: int) -> None:
    """A chain of turns, all of which go on from the first."""
    session = Session(0, False, None)
    before = None
    for number in range(count):
        before = session.turns[str(number)] = SessionTurn(session, str(number), array("i"), 0, before)
    assert len(session.after(session.turns["0"])) == count - 1


CASES = {
    "chat, whole, log-probabilities and ids": chat,
    "chat, whole, tool call": chat_call,
    "completions, whole, log-probabilities and ids": completion,
    "stream_interval": interval,
    "routed experts": experts,
    "generate, incremental, log-probabilities": native_incremental,
    "thinking budget": thinking_limit,
    "reasoning": reasoning,
    "hermes call": call_arguments("hermes", '<tool_call>{"name": "f", "arguments": {"x": "'),
    "qwen3_coder call": call_arguments("qwen3_coder", "<tool_call><function=f><parameter=x>"),
    "glm45 call": call_arguments("glm45", "<tool_call>f<arg_key>x</arg_key><arg_value>"),
    "session, replaced turns": replaced_turns,
}


def best(run: Callable[[int], None], count: int) -> float:
    times = []
    for _ in range(5):
        began = time.thread_time()
        run(count)
        times.append(time.thread_time() - began)
    return min(times)


@pytest.mark.parametrize("name", CASES)
def test_twice_the_output_costs_twice_the_time(name: str) -> None:
    run = CASES[name]
    ratios = []
    for _ in range(4):  # one good measurement is enough: what is quadratic has none
        ratios.append(best(run, 6000) / best(run, 3000))
        if ratios[-1] < 2.9:
            return
    raise AssertionError(ratios)
