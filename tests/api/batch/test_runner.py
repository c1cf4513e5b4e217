"""Batches from creation to their end, in every way to it, over a real store and a handler with known answers."""

import asyncio
import errno
import json
from pathlib import Path
from typing import Any

import pytest

from jaxserve.api.batch.request import Answered
from jaxserve.errors import EngineDeadError, QueueFullError
from jaxserve.store import BatchRecord, BatchStatus, TokenCounts
from tests.api.batch.helpers import (
    DAY,
    Bench,
    ended,
    holds,
    input_file,
    input_line,
    read_lines,
    submit,
    until,
)
from tests.store.disks import FailingDisk

S = BatchStatus


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


async def custom_ids(runner: Any, file_id: str | None) -> list[str]:
    return [line["custom_id"] for line in await read_lines(runner, file_id)]


def ids(*numbers: int) -> list[str]:
    return [f"c{number}" for number in numbers]


def test_a_batch_runs_to_its_end(bench: Bench) -> None:
    async def main() -> None:
        async with bench.running() as runner:
            batch = await ended(runner, await submit(runner, input_file(100)))
            assert (batch.status, batch.total, batch.completed, batch.failed) == (S.COMPLETED, 100, 100, 0)
            assert (batch.model, batch.usage, batch.error_file_id) == ("demo", TokenCounts(500, 200, 300, 0), None)
            lines = await read_lines(runner, batch.output_file_id)
            assert [line["custom_id"] for line in lines] == ids(*range(1, 101))
            bodies = [line["response"]["body"]["choices"][0]["message"]["content"] for line in lines]
            assert bodies == [f"Question {number}"[::-1] for number in range(1, 101)]
            assert len({line["id"] for line in lines}) == 100
        assert bench.handler.peak == bench.places
        assert set(bench.handler.calls.values()) == {1}

    asyncio.run(main())


def test_a_line_that_fails_fails_alone(bench: Bench) -> None:
    def behave(body: dict[str, Any]) -> Answered | None:
        number = int(body["messages"][0]["content"].split()[1])
        if number == 3:
            raise ZeroDivisionError
        return Answered(400, b'{"error":{"code":"bad"}}') if number == 5 else None

    async def main() -> None:
        bench.handler.behave = behave
        async with bench.running() as runner:
            batch = await ended(runner, await submit(runner, input_file(9)))
            assert (batch.status, batch.completed, batch.failed) == (S.COMPLETED, 7, 2)
            assert batch.usage.output_tokens == 7 * 3
            assert await custom_ids(runner, batch.output_file_id) == ids(1, 2, 4, 6, 7, 8, 9)
            errors = await read_lines(runner, batch.error_file_id)
            assert [(line["custom_id"], line["response"]["status_code"]) for line in errors] == [
                ("c3", 500),
                ("c5", 400),
            ]

    asyncio.run(main())


def test_an_unfit_file_fails_the_batch_and_runs_nothing(bench: Bench) -> None:
    async def main() -> None:
        async with bench.running() as runner:
            data = input_file(3) + json.dumps(input_line(2, stream=True)).encode()
            batch = await ended(runner, await submit(runner, data))
            found = [(error.code, error.line) for error in batch.errors]
            assert (batch.status, found) == (S.FAILED, [("duplicate_custom_id", 4), ("unsupported_parameter", 4)])
            assert (batch.total, batch.output_file_id) == (0, None)
        assert not bench.handler.calls

    asyncio.run(main())


def test_a_full_queue_never_fails_a_line(bench: Bench) -> None:
    def behave(body: dict[str, Any]) -> None:
        if bench.handler.running > 2:
            error = QueueFullError("full")
            error.retry_after = 0.002
            raise error

    async def main() -> None:
        bench.handler.behave, bench.handler.delay = behave, 0.001
        async with bench.running() as runner:
            batch = await ended(runner, await submit(runner, input_file(50)))
            assert (batch.completed, batch.failed) == (50, 0)
        assert bench.handler.calls.total() > 50

    asyncio.run(main())


def test_engine_deaths_fail_no_line(bench: Bench) -> None:
    """The engine dies 20 times under a batch; while it is down nothing is tried.

    Twenty calls lie between two deaths: no line is there at three of them, for then it may be their cause and fails.
    """
    deaths = calls = 0

    def behave(body: dict[str, Any]) -> None:
        nonlocal deaths, calls
        calls += 1
        if deaths < 20 and calls % 20 == 0:
            deaths += 1
            bench.ready = False
            asyncio.get_running_loop().call_later(0.01, setattr, bench, "ready", True)
        if not bench.ready:
            raise EngineDeadError("gone")

    async def main() -> None:
        bench.handler.behave, bench.handler.delay = behave, 0.001
        async with bench.running() as runner:
            batch = await ended(runner, await submit(runner, input_file(450)))
            assert (batch.status, batch.completed, batch.failed) == (S.COMPLETED, 450, 0)
        assert deaths == 20

    asyncio.run(main())


def test_counts_are_true_at_every_moment(bench: Bench) -> None:
    async def main() -> None:
        bench.handler.allowed = 20
        seen: list[tuple[int, int]] = []
        called = [0]  # at each look: the batch that the next one sees is younger
        async with bench.running() as runner:
            batch_id = await submit(runner, input_file(200))

            def look(batch: BatchRecord) -> bool:
                done = batch.completed + batch.failed
                assert called[-1] <= done + bench.places
                called.append(bench.handler.calls.total())
                assert done <= called[-1]
                assert batch.usage == TokenCounts(5 * done, 2 * done, 3 * done)
                assert batch.total == (0 if batch.status == S.VALIDATING else 200)
                seen.append((batch.completed, batch.failed))
                if done >= bench.handler.allowed:
                    bench.handler.allow(20)
                return batch.status.terminal

            await until(runner, batch_id, look)
        assert seen == sorted(seen) and len(set(seen)) > 5

    asyncio.run(main())


@pytest.mark.parametrize("times", [1, 2])
def test_cancel_midway_delivers_what_was_finished(bench: Bench, times: int) -> None:
    async def main() -> None:
        bench.handler.allowed = 20
        async with bench.running() as runner:
            batch_id = await submit(runner, input_file(2000))
            await until(runner, batch_id, lambda batch: batch.completed == 20)
            await holds(lambda: bench.handler.running == bench.places)
            for _ in range(times):
                assert (await runner.cancel(batch_id)).status == S.CANCELLING
            batch = await ended(runner, batch_id)
            assert bench.handler.running == 0 and bench.handler.cancelled == bench.places
            output = await custom_ids(runner, batch.output_file_id)
            errors = await read_lines(runner, batch.error_file_id)
            assert (batch.status, batch.completed) == (S.CANCELLED, len(output))
            assert batch.failed == len(errors) == 2000 - len(output)
            assert {line["error"]["code"] for line in errors} == {"batch_cancelled"}
            assert sorted(output + [line["custom_id"] for line in errors]) == sorted(ids(*range(1, 2001)))
            assert (await runner.cancel(batch_id)) == batch
            assert runner.window.num_running == 0

    asyncio.run(main())


def test_cancel_before_validation_ends(bench: Bench) -> None:
    async def main() -> None:
        async with bench.running() as runner:
            batch_id = await submit(runner, b"{not json\n" + input_file(10))
            assert (await runner.cancel(batch_id)).status == S.CANCELLING
            batch = await ended(runner, batch_id)
            assert (batch.status, batch.total, batch.failed) == (S.CANCELLED, 0, 0)
            assert batch.output_file_id is None and batch.error_file_id is None
        assert not bench.handler.calls

    asyncio.run(main())


def test_a_handler_that_does_not_end_holds_no_cancel_up(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxserve.api.batch.job.RUNNING_REQUESTS_SECONDS", 0.05)
    release = asyncio.Event()

    async def stubborn() -> None:
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue

    async def main() -> None:
        bench.handler.behave = lambda body: stubborn()
        async with bench.running() as runner:
            batch_id = await submit(runner, input_file(3))
            await until(runner, batch_id, lambda batch: bench.handler.running == 3)
            await runner.cancel(batch_id)
            batch = await ended(runner, batch_id)
            release.set()
            await holds(lambda: bench.handler.running == 0)
            assert (batch.status, batch.failed) == (S.CANCELLED, 3)
            assert await runner.store.get_batch(batch_id) == batch

    asyncio.run(main())


def test_expiry_while_running(bench: Bench) -> None:
    async def main() -> None:
        bench.handler.allowed = 20
        async with bench.running() as runner:
            batch_id = await submit(runner, input_file(1000))
            await until(runner, batch_id, lambda batch: batch.completed == 20)
            bench.now += DAY
            batch = await ended(runner, batch_id)
            await check_expired(runner, batch)
            assert batch.completed == 20

    asyncio.run(main())


@pytest.mark.parametrize("started", [True, False])
def test_expiry_while_the_server_was_down(bench: Bench, started: bool) -> None:
    async def main() -> None:
        bench.handler.allowed = 20 if started else 0
        async with bench.running() as runner:
            batch_id = await submit(runner, input_file(1000))
            if started:
                await until(runner, batch_id, lambda batch: batch.completed == 20)
        calls = bench.handler.calls.total()
        bench.now += 2 * DAY
        async with bench.running() as runner:
            await check_expired(runner, await ended(runner, batch_id))
        assert bench.handler.calls.total() - calls <= bench.places

    asyncio.run(main())


async def check_expired(runner: Any, batch: BatchRecord) -> None:
    output = await custom_ids(runner, batch.output_file_id)
    errors = await read_lines(runner, batch.error_file_id)
    assert batch.status == S.EXPIRED and batch.expired_at
    assert (batch.completed, batch.failed) == (len(output), len(errors))
    assert batch.completed + batch.failed == batch.total == 1000
    assert {line["error"]["code"] for line in errors} == {"batch_expired"}
    assert sorted(output + [line["custom_id"] for line in errors]) == sorted(ids(*range(1, 1001)))


def test_restarts_lose_and_repeat_nothing(bench: Bench) -> None:
    async def main() -> None:
        bench.handler.allowed = 0
        async with bench.running() as runner:
            batch_id = await submit(runner, input_file(400))
        lives = 1
        for done in (90, 180, 270, 360, 400):
            bench.handler.allow(90)
            async with bench.running() as runner:
                await until(runner, batch_id, lambda batch, done=done: batch.completed == done)
            lives += 1
        async with bench.running() as runner:
            batch = await ended(runner, batch_id)
        async with bench.running() as runner:
            assert await custom_ids(runner, batch.output_file_id) == ids(*range(1, 401))
        assert (batch.status, batch.completed, batch.failed) == (S.COMPLETED, 400, 0)
        assert bench.handler.calls.total() - 400 <= lives * bench.places

    asyncio.run(main())


def test_several_batches_share_the_window_and_take_turns(bench: Bench) -> None:
    async def main() -> None:
        bench.handler.allowed = 20
        async with bench.running() as runner:
            large = await submit(runner, input_file(1000))
            await until(runner, large, lambda batch: batch.completed == 20)
            small = await submit(runner, input_file(20))
            bench.handler.allow(500)  # the small one ends among them
            assert (await ended(runner, small)).completed == 20
            assert not (await runner.store.get_batch(large)).status.terminal
            assert bench.handler.peak == bench.places
            await runner.cancel(large)

    asyncio.run(main())


def test_batches_beyond_the_limit_wait_and_can_be_cancelled(bench: Bench) -> None:
    async def main() -> None:
        bench.max_running, bench.handler.allowed = 1, 20
        async with bench.running() as runner:
            first = await submit(runner, input_file(300))
            await until(runner, first, lambda batch: batch.completed == 20)
            second, third = await submit(runner, input_file(10)), await submit(runner, input_file(10))
            await until(runner, third, lambda batch: batch.status == S.IN_PROGRESS)
            await runner.cancel(second)
            bench.handler.allow()
            assert (await ended(runner, second)).completed == 0
            assert (await ended(runner, third)).completed == 10

    asyncio.run(main())


def test_the_input_may_be_deleted_while_the_batch_runs(bench: Bench) -> None:
    async def main() -> None:
        bench.handler.allowed = 20
        async with bench.running() as runner:
            batch_id = await submit(runner, input_file(100))
            batch = await until(runner, batch_id, lambda batch: batch.completed == 20)
            await runner.store.delete_file(batch.input_file_id)
        bench.handler.allow()
        async with bench.running() as runner:
            assert (await ended(runner, batch_id)).completed == 100

    asyncio.run(main())


@pytest.mark.parametrize("started", [True, False])
def test_an_input_lost_from_the_disk_fails_the_batch(bench: Bench, started: bool) -> None:
    async def main() -> None:
        bench.handler.allowed = 20 if started else 0
        async with bench.running() as runner:
            batch_id = await submit(runner, input_file(50))
            if started:
                await until(runner, batch_id, lambda batch: batch.completed == 20)
            input_file_id = (await runner.store.get_batch(batch_id)).input_file_id
        (bench.path / "store" / "files" / input_file_id).unlink()
        async with bench.running() as runner:
            batch = await ended(runner, batch_id)
            assert (batch.status, batch.errors[0].code) == (S.FAILED, "input_file_missing")

    asyncio.run(main())


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_a_disk_that_refuses_pauses_the_batch(bench: Bench, code: int) -> None:
    """Nothing fails, nothing is computed beyond the window, and it goes on when the disk does."""
    disk = FailingDisk(code)

    async def main() -> None:
        bench.disk, bench.handler.allowed = disk, 20
        async with bench.running() as runner:
            batch_id = await submit(runner, input_file(200))
            await until(runner, batch_id, lambda batch: batch.completed == 20)
            disk.failing = {"commit"}
            bench.handler.allow()
            await holds(lambda: runner.num_paused() == 1 and bench.handler.running == 0)
            paused, calls = await runner.store.get_batch(batch_id), bench.handler.calls.total()
            assert calls - paused.completed == bench.places
            attempts = disk.refused
            await holds(lambda: disk.refused >= attempts + 3)
            assert (await runner.store.get_batch(batch_id), bench.handler.calls.total()) == (paused, calls)
            disk.failing = set()
            batch = await ended(runner, batch_id)
            assert (batch.status, batch.completed, batch.failed) == (S.COMPLETED, 200, 0)
        assert set(bench.handler.calls.values()) == {1}

    asyncio.run(main())


@pytest.mark.parametrize("operation", ["create", "write", "fsync", "rename", "sync_directory", "commit"])
def test_a_disk_that_refuses_the_output_is_waited_for(bench: Bench, operation: str) -> None:
    disk = FailingDisk()

    def behave(body: dict[str, Any]) -> None:
        if operation != "commit":
            disk.failing = {operation}

    async def main() -> None:
        bench.disk, bench.handler.behave = disk, behave
        async with bench.running() as runner:
            batch_id = await submit(runner, input_file(20))
            await until(runner, batch_id, lambda batch: disk.refused > 3 or batch.status == S.COMPLETED)
            disk.failing = set()
            batch = await ended(runner, batch_id)
            assert (batch.status, batch.failed) == (S.COMPLETED, 0)
            assert await custom_ids(runner, batch.output_file_id) == ids(*range(1, 21))

    asyncio.run(main())


def test_only_so_many_lines_are_in_flight_as_the_engine_has_room_for(bench: Bench) -> None:
    async def main() -> None:
        bench.handler.delay = 0.002
        async with bench.running() as runner:
            batch_id = await submit(runner, input_file(2000))
            await until(runner, batch_id, lambda batch: batch.completed > 10)
            bench.places = 1
            await holds(lambda: bench.handler.running <= 1)
            bench.handler.peak, calls = 0, bench.handler.calls.total()
            await holds(lambda: bench.handler.calls.total() >= calls + 20)
            assert bench.handler.peak == 1
            bench.places, bench.handler.allowed = 20, bench.handler.calls.total()
            await holds(lambda: bench.handler.running == 20)
            assert bench.handler.peak == 20
            await runner.cancel(batch_id)
            await ended(runner, batch_id)

    asyncio.run(main())
