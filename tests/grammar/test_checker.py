"""The checker's process: verdicts, hostile grammars, recovery, cache and queue."""

import asyncio
import json
import os
import resource
import signal
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import psutil
import pytest

from jaxserve.errors import InvalidSchemaError, QueueFullError, ServerError
from jaxserve.grammar.checker import CheckLimits, GrammarChecker, VerdictCache
from jaxserve.grammar.matcher import MatcherFactory
from jaxserve.grammar.translate import _TRANSLATIONS, schema_spec
from jaxserve.grammar.worker import Verdict
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.types.sampling import GrammarSpec, grammar_spec
from tests.waiting import LAST_RESORT, until

from .hostile import hostile

T = TypeVar("T")
GOOD = schema_spec({"type": "object", "properties": {"a": {"type": "string"}}})


def with_checker(tokenizer: Tokenizer, work: Callable[[GrammarChecker], Awaitable[T]], **limits: Any) -> T:
    limits = {"wall_seconds": LAST_RESORT, **limits}

    async def run() -> T:
        checker = GrammarChecker(
            tokenizer.to_json(),
            vocab_size=320,
            eos_token_ids=tokenizer.eos_token_ids,
            limits=CheckLimits(**limits),
        )
        await checker.start()
        try:
            return await work(checker)
        finally:
            await checker.stop()

    return asyncio.run(run())


async def verdict(checker: GrammarChecker, spec: GrammarSpec) -> str | None:
    try:
        await checker.check(spec, param="tools")
    except InvalidSchemaError as error:
        assert (error.param, error.status, error.code) == ("tools", 400, "invalid_json_schema")
        return error.message
    return None


def schema(**parts: Any) -> GrammarSpec:
    return schema_spec(parts)


UNSUPPORTED = [
    (schema(**{"not": {"type": "string"}}), "not"),
    (schema(uniqueItems=True), "uniqueItems"),
    (schema(**{"if": {"type": "null"}, "then": {"const": 1}}), "if"),
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
    async def work(checker: GrammarChecker) -> None:
        assert await verdict(checker, GOOD) is None
        for spec, reason in UNSUPPORTED:
            found = await verdict(checker, spec)
            assert found is not None and reason in found, (spec, found)

    with_checker(tokenizer, work)


def check_hostile(tokenizer: Tokenizer, specs: list[GrammarSpec]) -> None:
    """Each ends in time (CPU time), the event loop is never held up, and the checker serves on."""

    async def work(checker: GrammarChecker) -> list[float]:
        assert await verdict(checker, GOOD) is None
        first = checker.pid
        gaps: list[float] = []
        ticker = asyncio.create_task(_tick(gaps))
        for spec in specs:
            await asyncio.wait_for(verdict(checker, spec), LAST_RESORT)
            assert await verdict(checker, GOOD) is None
        ticker.cancel()
        assert checker.pid == first
        return gaps

    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert max(with_checker(tokenizer, work, cache_bytes=0)) < 0.5
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert spent < 2.5 * len(specs)


async def _tick(gaps: list[float]) -> None:
    while True:
        start = time.thread_time()
        await asyncio.sleep(0.01)
        gaps.append(time.thread_time() - start)


def test_hostile_grammars_end_in_time(tokenizer: Tokenizer) -> None:
    check_hostile(tokenizer, hostile()[::4])


@pytest.mark.slow
def test_all_hostile_grammars_end_in_time(tokenizer: Tokenizer) -> None:
    check_hostile(tokenizer, hostile())


def test_a_killed_worker_is_replaced(tokenizer: Tokenizer) -> None:
    async def work(checker: GrammarChecker) -> None:
        assert await verdict(checker, GOOD) is None
        before = checker.pid
        assert before is not None
        pending = asyncio.create_task(verdict(checker, GrammarSpec(kind="regex", source="late")))
        await asyncio.sleep(0)
        os.kill(before, signal.SIGKILL)
        assert await pending is None  # by the killed worker's last answer, or by the next worker
        assert await verdict(checker, GrammarSpec(kind="regex", source="later")) is None
        assert checker.pid != before

    with_checker(tokenizer, work)


def test_a_stopped_compiler_starts_no_worker(tokenizer: Tokenizer) -> None:
    """Nor does the worker hear the Ctrl-C that stops a server in a terminal: it has a session of its own."""

    async def work(checker: GrammarChecker) -> None:
        assert checker.pid is not None and os.getsid(checker.pid) == checker.pid
        checks = [asyncio.create_task(verdict(checker, schema(const=i))) for i in range(8)]
        await asyncio.sleep(0)
        await checker.stop()
        for result in await asyncio.gather(*checks, return_exceptions=True):
            assert result is None or isinstance(result, ServerError)
        assert checker.pid is None

    with_checker(tokenizer, work)


def test_limits_of_time_and_memory_are_the_kernels(tokenizer: Tokenizer) -> None:
    big = schema_spec({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(3000)}})

    async def large(checker: GrammarChecker) -> str | None:
        return await verdict(checker, big)

    async def work(checker: GrammarChecker) -> str | None:
        found = await large(checker)
        assert await verdict(checker, GrammarSpec(kind="regex", source="ab")) is None
        return found

    assert "more than" in (with_checker(tokenizer, work, cpu_seconds=0.05) or "")
    # On a busy machine a small grammar takes as long.
    assert "more than" in (with_checker(tokenizer, large, wall_seconds=0.1) or "")
    assert "memory" in (with_checker(tokenizer, work, memory_bytes=4 << 20) or "")


def test_a_check_that_nobody_waits_for_is_ended(tokenizer: Tokenizer) -> None:
    big = schema_spec({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(3000)}})

    async def work(checker: GrammarChecker) -> None:
        assert await verdict(checker, GOOD) is None
        worker = psutil.Process(checker.pid)
        pending = [
            asyncio.create_task(verdict(checker, schema_spec({"title": str(i)} | json.loads(big.source))))
            for i in range(4)
        ]
        for check in await until(worker.children, "a check runs"):
            check.suspend()  # it would never end by itself
        for task in pending:
            task.cancel()
        await until(lambda: not worker.children(), "no check runs")
        assert await verdict(checker, GrammarSpec(kind="regex", source="after")) is None

    with_checker(tokenizer, work, wall_seconds=1e4, cpu_seconds=1e4, cache_bytes=0)


def test_checks_run_at_the_same_time_and_wait_in_line(tokenizer: Tokenizer) -> None:
    async def work(checker: GrammarChecker) -> None:
        specs = [GrammarSpec(kind="regex", source=f"a{n}") for n in range(20)]
        assert await asyncio.gather(*(verdict(checker, spec) for spec in specs)) == [None] * 20
        fresh = [GrammarSpec(kind="regex", source=f"b{n}") for n in range(30)]
        results = await asyncio.gather(*(checker.check(spec) for spec in fresh), return_exceptions=True)
        refused = [result for result in results if not isinstance(result, GrammarSpec)]
        assert len(refused) == 5 and all(isinstance(result, QueueFullError) for result in refused)

    with_checker(tokenizer, work, waiting=25)


def test_the_engine_gets_what_was_checked(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it is larger than a pipe takes in one piece, beside other checks."""
    specs = [schema_spec({"enum": ["x" * 40_000 + str(i), "é" * i]}) for i in range(6)]

    async def work(checker: GrammarChecker) -> list[GrammarSpec]:
        first = await asyncio.gather(*(checker.check(spec) for spec in specs))
        assert await asyncio.gather(*(checker.check(spec) for spec in specs)) == first, "from memory, the same"
        return first

    checked = with_checker(tokenizer, work)
    assert [spec.source for spec in checked] == [spec.source for spec in specs]
    assert all(str(i) in spec.checked for i, spec in enumerate(checked)) and len(checked[5].checked) > 40_000
    monkeypatch.setitem(_TRANSLATIONS, "json_schema", None)  # no Python over a schema, in the engine
    factory = MatcherFactory(tokenizer.to_json(), vocab_size=320, eos_token_ids=tokenizer.eos_token_ids)
    assert factory(checked[0]).error is None


def test_the_limit_of_a_check_is_its_own_cpu_time() -> None:
    """A machine that is busy gives a check little of its time: that is no fault of the grammar."""
    assert CheckLimits().wall_seconds >= 5 * CheckLimits().cpu_seconds


def test_verdicts_are_kept_by_bytes() -> None:
    cache = VerdictCache(10_000)
    for n in range(10_000):
        cache.put(n.to_bytes(4, "big"), Verdict(n, "x" * (n % 300)))
        assert cache.num_bytes <= 10_000
    cache.put(b"large", Verdict(0, grammar="x" * 9000))
    assert cache.num_bytes <= 10_000 and len(cache) < 10, "what was checked counts"
    for n in range(9970, 10_000):
        cache.put(n.to_bytes(4, "big"), Verdict(n, "x" * (n % 300)))
    assert len(cache) > 10
    newest = (9999).to_bytes(4, "big")
    assert cache.get(newest) is not None and cache.get(bytes(4)) is None
    cache.put(newest, Verdict(1))
    assert cache.num_bytes <= 10_000


def test_a_second_check_is_answered_from_memory(tokenizer: Tokenizer) -> None:
    async def work(checker: GrammarChecker) -> None:
        bad = GrammarSpec(kind="regex", source="(")
        first = await verdict(checker, bad)
        assert checker.pid is not None
        worker = checker.pid
        os.kill(worker, signal.SIGSTOP)
        again = await asyncio.wait_for(verdict(checker, bad), LAST_RESORT)
        assert checker.pid == worker
        os.kill(worker, signal.SIGCONT)
        assert first == again and first is not None

    with_checker(tokenizer, work)
