"""The compiler's process: verdicts, hostile grammars, recovery, cache and queue."""

import asyncio
import json
import os
import signal
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import psutil
import pytest

from jaxserve.engine.request import GrammarSpec
from jaxserve.errors import InvalidSchemaError, QueueFullError
from jaxserve.grammar.compile import CompileLimits, GrammarCompiler, VerdictCache
from jaxserve.grammar.translate import grammar_spec, schema_spec
from jaxserve.grammar.worker import Verdict
from jaxserve.text.tokenizer import Tokenizer

from .hostile import hostile

T = TypeVar("T")
GOOD = schema_spec({"type": "object", "properties": {"a": {"type": "string"}}})


def with_compiler(tokenizer: Tokenizer, work: Callable[[GrammarCompiler], Awaitable[T]], **limits: Any) -> T:
    async def run() -> T:
        compiler = GrammarCompiler(
            tokenizer.to_json(),
            vocab_size=320,
            eos_token_ids=tokenizer.eos_token_ids,
            limits=CompileLimits(**limits),
        )
        await compiler.start()
        try:
            return await work(compiler)
        finally:
            await compiler.stop()

    return asyncio.run(run())


async def verdict(compiler: GrammarCompiler, spec: GrammarSpec) -> str | None:
    try:
        await compiler.check(spec, param="tools")
    except InvalidSchemaError as error:
        assert (error.param, error.status, error.code) == ("tools", 400, "invalid_json_schema")
        return error.message
    return None


def schema(**parts: Any) -> GrammarSpec:
    return schema_spec(parts)


UNSUPPORTED = [
    (schema(**{"not": {"type": "string"}}), "not"),
    (schema(uniqueItems=True), "uniqueItems"),
    (schema(**{"if": {}, "then": {}}), "if"),
    (schema(type="strnig"), "Invalid type"),
    (schema(**{"$ref": "http://127.0.0.1:1/x"}), "http://127.0.0.1:1/x"),
    (schema(**{"$ref": "#/nope"}), "does not exist"),
    (schema(enum=[]), "Unsatisfiable"),
    (schema(**{"$ref": "#"}), "no text matches"),
    (GrammarSpec(kind="regex", source="a(?=b)"), "look-around"),
    (GrammarSpec(kind="regex", source=r"(a)\1"), "backreferences"),
    (grammar_spec("start: missing"), "missing"),
]


def test_what_cannot_be_enforced_is_refused_with_its_reason(tokenizer: Tokenizer) -> None:
    async def work(compiler: GrammarCompiler) -> None:
        assert await verdict(compiler, GOOD) is None
        for spec, reason in UNSUPPORTED:
            found = await verdict(compiler, spec)
            assert found is not None and reason in found, (spec, found)

    with_compiler(tokenizer, work)


def check_hostile(tokenizer: Tokenizer, specs: list[GrammarSpec]) -> None:
    """Each ends in time, the event loop is never held up, and the compiler serves on."""

    async def work(compiler: GrammarCompiler) -> list[float]:
        assert await verdict(compiler, GOOD) is None
        first = compiler.pid
        gaps: list[float] = []
        ticker = asyncio.create_task(_tick(gaps))
        for spec in specs:
            start = time.perf_counter()
            await verdict(compiler, spec)
            assert time.perf_counter() - start < 2.5, spec.source[:80]
            assert await verdict(compiler, GOOD) is None
        ticker.cancel()
        assert compiler.pid == first
        return gaps

    assert max(with_compiler(tokenizer, work, cache_bytes=0)) < 0.5


async def _tick(gaps: list[float]) -> None:
    while True:
        start = time.perf_counter()
        await asyncio.sleep(0.01)
        gaps.append(time.perf_counter() - start)


def test_hostile_grammars_end_in_time(tokenizer: Tokenizer) -> None:
    check_hostile(tokenizer, hostile()[::4])


@pytest.mark.slow
def test_all_hostile_grammars_end_in_time(tokenizer: Tokenizer) -> None:
    check_hostile(tokenizer, hostile())


def test_a_killed_worker_is_replaced(tokenizer: Tokenizer) -> None:
    async def work(compiler: GrammarCompiler) -> None:
        assert await verdict(compiler, GOOD) is None
        before = compiler.pid
        assert before is not None
        pending = asyncio.create_task(verdict(compiler, GrammarSpec(kind="regex", source="late")))
        await asyncio.sleep(0)
        os.kill(before, signal.SIGKILL)
        assert await pending is None
        assert compiler.pid != before
        assert await verdict(compiler, GrammarSpec(kind="regex", source="later")) is None

    with_compiler(tokenizer, work)


def test_limits_of_time_and_memory_are_the_kernels(tokenizer: Tokenizer) -> None:
    big = schema_spec({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(3000)}})

    async def work(compiler: GrammarCompiler) -> str | None:
        found = await verdict(compiler, big)
        assert await verdict(compiler, GrammarSpec(kind="regex", source="ab")) is None
        return found

    assert "more than" in (with_compiler(tokenizer, work, cpu_seconds=0.05) or "")
    assert "more than" in (with_compiler(tokenizer, work, wall_seconds=0.1) or "")
    assert "memory" in (with_compiler(tokenizer, work, memory_bytes=4 << 20) or "")


def test_a_check_that_nobody_waits_for_is_ended(tokenizer: Tokenizer) -> None:
    big = schema_spec({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(3000)}})

    async def work(compiler: GrammarCompiler) -> None:
        assert await verdict(compiler, GOOD) is None
        worker = psutil.Process(compiler.pid)
        pending = [
            asyncio.create_task(verdict(compiler, schema_spec({"title": str(i)} | json.loads(big.source))))
            for i in range(4)
        ]
        while not worker.children():
            await asyncio.sleep(0.001)
        for task in pending:
            task.cancel()
        started = time.monotonic()
        while worker.children():
            await asyncio.sleep(0.001)
        assert time.monotonic() - started < 0.5
        assert await verdict(compiler, GrammarSpec(kind="regex", source="after")) is None

    with_compiler(tokenizer, work, wall_seconds=20.0, cpu_seconds=20.0, cache_bytes=0)


def test_checks_run_at_the_same_time_and_wait_in_line(tokenizer: Tokenizer) -> None:
    async def work(compiler: GrammarCompiler) -> None:
        specs = [GrammarSpec(kind="regex", source=f"a{n}") for n in range(20)]
        assert await asyncio.gather(*(verdict(compiler, spec) for spec in specs)) == [None] * 20
        fresh = [GrammarSpec(kind="regex", source=f"b{n}") for n in range(30)]
        results = await asyncio.gather(*(compiler.check(spec) for spec in fresh), return_exceptions=True)
        refused = [result for result in results if result is not None]
        assert len(refused) == 5 and all(isinstance(result, QueueFullError) for result in refused)

    with_compiler(tokenizer, work, waiting=25)


def test_verdicts_are_kept_by_bytes() -> None:
    cache = VerdictCache(10_000)
    for n in range(10_000):
        cache.put(n.to_bytes(4, "big"), Verdict(n, "x" * (n % 300)))
        assert cache.num_bytes <= 10_000
    assert len(cache) > 10
    newest = (9999).to_bytes(4, "big")
    assert cache.get(newest) is not None and cache.get(bytes(4)) is None
    cache.put(newest, Verdict(1))
    assert cache.num_bytes <= 10_000


def test_a_second_check_is_answered_from_memory(tokenizer: Tokenizer) -> None:
    async def work(compiler: GrammarCompiler) -> None:
        bad = GrammarSpec(kind="regex", source="(")
        first = await verdict(compiler, bad)
        assert compiler.pid is not None
        os.kill(compiler.pid, signal.SIGSTOP)
        again = await asyncio.wait_for(verdict(compiler, bad), 1)
        os.kill(compiler.pid, signal.SIGCONT)
        assert first == again and first is not None

    with_compiler(tokenizer, work)
