import asyncio
import random
from pathlib import Path

import pytest

from jaxserve.errors import ConflictError, InvalidValueError, NotFoundError
from jaxserve.store import BatchError, BatchRecord, BatchStatus, LineResult, Store, TokenCounts
from jaxserve.store.records import EDGES
from tests.store.helpers import DAY, FakeClock, content, create, new_batch, upload

S = BatchStatus
INPUT = b"".join(b'{"custom_id":"c%d","method":"POST","url":"u","body":{}}\n' % i for i in range(1, 6))


def result(line: int, succeeded: bool = True, usage: TokenCounts = TokenCounts()) -> LineResult:
    return LineResult(line, succeeded, b'{"line":%d}' % line, usage)


async def running(store: Store) -> BatchRecord:
    batch = await new_batch(store, INPUT)
    assert await store.start_batch(batch.id, 5, "demo")
    return await store.get_batch(batch.id)


async def publish(store: Store, batch: BatchRecord, target: BatchStatus) -> BatchRecord | None:
    missing = None if target == S.COMPLETED else (lambda custom_id: b'{"missing":"%s"}' % custom_id.encode())
    return await store.publish_batch(batch, target, max_line_bytes=1000, missing_line=missing)


def test_a_new_batch(store: Store, clock: FakeClock) -> None:
    batch = asyncio.run(new_batch(store))
    assert (batch.status, batch.created_at, batch.expires_at) == (S.VALIDATING, clock.now, clock.now + DAY)
    assert batch.metadata == {"a": "b"}


def test_the_way_to_completed(store: Store, clock: FakeClock) -> None:
    async def main() -> None:
        batch = await running(store)
        clock.now += 1
        await store.add_results(batch.id, [result(3), result(1, usage=TokenCounts(5, 2, 3, 1))])
        await store.add_results(batch.id, [result(2, succeeded=False), result(3), result(5), result(4)])
        batch = await store.get_batch(batch.id)
        assert (batch.total, batch.completed, batch.failed, batch.usage) == (5, 4, 1, TokenCounts(5, 2, 3, 1))
        assert await store.finished_lines(batch.id) == {1, 2, 3, 4, 5}
        assert await store.move_batch(batch.id, S.IN_PROGRESS, S.FINALIZING)
        clock.now += 1
        done = await publish(store, await store.get_batch(batch.id), S.COMPLETED)
        assert done and done.status == S.COMPLETED and done.output_file_id and done.error_file_id
        start = batch.created_at
        assert (done.in_progress_at, done.finalizing_at, done.completed_at) == (start, start + 1, start + 2)
        output = await store.get_file(done.output_file_id)
        assert (output.purpose, output.expires_at) == ("batch_output", start + 2 + 30 * DAY)
        assert await content(store, output.id) == b'{"line":1}\n{"line":3}\n{"line":4}\n{"line":5}\n'
        assert await content(store, done.error_file_id) == b'{"line":2}\n'

    asyncio.run(main())


@pytest.mark.parametrize("target", [S.EXPIRED, S.CANCELLED])
def test_lines_that_never_ran_are_told(store: Store, target: BatchStatus) -> None:
    async def main() -> None:
        batch = await running(store)
        await store.add_results(batch.id, [result(2), result(4, succeeded=False)])
        if target == S.CANCELLED:
            await store.cancel_batch(batch.id)
        done = await publish(store, await store.get_batch(batch.id), target)
        assert done and done.output_file_id and done.error_file_id
        assert (done.status, done.completed, done.failed) == (target, 1, 4)
        assert await content(store, done.output_file_id) == b'{"line":2}\n'
        missing = b'{"missing":"c1"}\n{"missing":"c3"}\n{"line":4}\n{"missing":"c5"}\n'
        assert await content(store, done.error_file_id) == missing

    asyncio.run(main())


@pytest.mark.parametrize("target", [S.EXPIRED, S.CANCELLED])
def test_a_batch_whose_input_is_lost_ends_with_the_results_that_it_has(store: Store, target: BatchStatus) -> None:
    async def main() -> None:
        batch = await running(store)
        await store.add_results(batch.id, [result(2)])
        if target == S.CANCELLED:
            await store.cancel_batch(batch.id)
        store.input_path(batch).unlink()
        done = await publish(store, await store.get_batch(batch.id), target)
        assert done and (done.status, done.completed, done.failed) == (target, 1, 4)
        assert done.output_file_id and await content(store, done.output_file_id) == b'{"line":2}\n'
        assert done.error_file_id is None and store.condition.status == "ok"

    asyncio.run(main())


def test_no_file_without_a_line(store: Store, tmp_path: Path) -> None:
    async def main() -> None:
        batch = await running(store)
        await store.add_results(batch.id, [result(line) for line in range(1, 6)])
        await store.move_batch(batch.id, S.IN_PROGRESS, S.FINALIZING)
        done = await publish(store, await store.get_batch(batch.id), S.COMPLETED)
        assert done and done.output_file_id and done.error_file_id is None

    asyncio.run(main())
    assert len(list((tmp_path / "store" / "files").iterdir())) == 2


def test_output_expires_as_asked(store: Store, clock: FakeClock) -> None:
    async def main() -> None:
        batch = await new_batch(store, INPUT, expires=3600)
        await store.start_batch(batch.id, 5, None)
        clock.now += 100
        done = await publish(store, await store.get_batch(batch.id), S.EXPIRED)
        assert done and done.error_file_id
        assert (await store.get_file(done.error_file_id)).expires_at == clock.now + 3600

    asyncio.run(main())


def test_a_failed_batch_keeps_its_errors(store: Store) -> None:
    async def main() -> None:
        batch = await new_batch(store)
        errors = (BatchError("a", "b", "c", 7), BatchError("d", "e"))
        assert await store.fail_batch(batch.id, S.VALIDATING, errors)
        batch = await store.get_batch(batch.id)
        assert (batch.status, batch.errors) == (S.FAILED, errors)
        assert await store.live_batches() == []

    asyncio.run(main())


def test_an_edge_is_taken_once_and_only_from_its_state(store: Store, clock: FakeClock) -> None:
    async def main() -> None:
        batch = await running(store)
        clock.now += 5
        assert not await store.start_batch(batch.id, 9, "other")
        assert not await store.move_batch(batch.id, S.FINALIZING, S.COMPLETED)
        assert not await store.fail_batch(batch.id, S.VALIDATING, [BatchError("a", "b")])
        assert await publish(store, batch, S.EXPIRED)
        assert await publish(store, batch, S.EXPIRED) is None
        with pytest.raises(ValueError, match="no edge"):
            await store.move_batch(batch.id, S.EXPIRED, S.COMPLETED)
        after = await store.get_batch(batch.id)
        assert (after.total, after.model, after.in_progress_at) == (5, "demo", batch.in_progress_at)

    asyncio.run(main())


def test_results_after_the_end_change_nothing(store: Store) -> None:
    async def main() -> None:
        batch = await running(store)
        done = await publish(store, batch, S.EXPIRED)
        await store.add_results(batch.id, [result(1)])
        assert await store.get_batch(batch.id) == done
        assert await store.finished_lines(batch.id) == set()

    asyncio.run(main())


def test_cancel(store: Store, clock: FakeClock) -> None:
    async def main() -> None:
        batch = await running(store)
        first = await store.cancel_batch(batch.id)
        clock.now += 1
        assert first.status == S.CANCELLING
        assert await store.cancel_batch(batch.id) == first
        done = await publish(store, first, S.CANCELLED)
        assert await store.cancel_batch(batch.id) == done
        other = await running(store)
        await publish(store, other, S.EXPIRED)
        with pytest.raises(ConflictError):
            await store.cancel_batch(other.id)
        with pytest.raises(NotFoundError):
            await store.cancel_batch("batch_none")

    asyncio.run(main())


def test_a_cancel_that_meets_finalizing_wins_or_loses_whole(store: Store, tmp_path: Path) -> None:
    async def main() -> None:
        batch = await running(store)
        await store.add_results(batch.id, [result(line) for line in range(1, 6)])
        await store.move_batch(batch.id, S.IN_PROGRESS, S.FINALIZING)
        finalizing = await store.get_batch(batch.id)
        cancelling = await store.cancel_batch(batch.id)
        assert await publish(store, finalizing, S.COMPLETED) is None
        assert (await store.list_files(limit=9, purpose="batch_output")).items == []
        done = await publish(store, cancelling, S.CANCELLED)
        assert done and done.completed == 5 and done.output_file_id
        assert {path.name for path in (tmp_path / "store" / "files").iterdir()} == {
            batch.input_file_id,
            done.output_file_id,
        }

    asyncio.run(main())


def test_only_legal_edges_under_1000_random_interleavings(store: Store) -> None:
    """Workers and clients race for one batch, over and over; every state seen follows legally from the one before."""
    rng = random.Random(0)

    async def step(batch_id: str, choice: int) -> None:
        batch = await store.get_batch(batch_id)
        await asyncio.sleep(0)
        if choice == 0:
            await store.start_batch(batch_id, 5, "demo")
        elif choice == 1:
            await store.add_results(batch_id, [result(rng.randint(1, 5))])
        elif choice == 2:
            await store.move_batch(batch_id, S.IN_PROGRESS, S.FINALIZING)
        elif choice == 3 and batch.status in (S.FINALIZING, S.CANCELLING):
            await publish(store, batch, S.COMPLETED if batch.status == S.FINALIZING else S.CANCELLED)
        elif choice == 4 and rng.random() < 0.3 and not batch.status.terminal:
            try:
                await store.cancel_batch(batch_id)
            except ConflictError:
                assert (await store.get_batch(batch_id)).status.terminal

    async def race(file_id: str) -> BatchStatus:
        _, batch = await create(store, file_id)
        assert batch is not None
        last = batch.status
        for _ in range(4):
            await asyncio.gather(*(step(batch.id, rng.randint(0, 4)) for _ in range(3)))
            now = await store.get_batch(batch.id)
            assert now.status == last or reachable(last, now.status)
            assert now.completed + now.failed <= now.total
            last = now.status
        return last

    async def main() -> set[BatchStatus]:
        file = await upload(store, INPUT)
        return {await race(file.id) for _ in range(90)}  # 90 x 4 x 3 steps

    ends = asyncio.run(main())
    assert {S.COMPLETED, S.CANCELLED, S.IN_PROGRESS} <= ends


def reachable(source: BatchStatus, target: BatchStatus) -> bool:
    return any(step == target or reachable(step, target) for step in EDGES[source])


def test_idempotency_keys(store: Store, clock: FakeClock) -> None:
    async def main() -> None:
        file = await upload(store)
        answers = await asyncio.gather(*(create(store, file.id, key=("key", b"same")) for _ in range(50)))
        assert len({answer for answer, _ in answers}) == 1
        assert sum(record is not None for _, record in answers) == 1
        assert len((await store.list_batches(limit=100)).items) == 1
        with pytest.raises(InvalidValueError) as error:
            await create(store, file.id, key=("key", b"other"))
        assert error.value.param == "Idempotency-Key"
        clock.now += 3 * DAY
        await store.sweep()
        _, fresh = await create(store, file.id, key=("key", b"other"))
        assert fresh is not None

    asyncio.run(main())


def test_a_refused_request_does_not_use_its_key_up(store: Store) -> None:
    async def main() -> None:
        with pytest.raises(InvalidValueError):
            await create(store, "file-none", key=("key", b"1"))
        assert (await create(store, (await upload(store)).id, key=("key", b"2")))[1] is not None

    asyncio.run(main())


def test_pages_neither_skip_nor_repeat_while_batches_are_made(store: Store) -> None:
    async def main() -> None:
        file = await upload(store)
        made = [(await create(store, file.id))[0].decode() for _ in range(25)]
        seen: list[str] = []
        after, more = None, True
        while more:
            page = await store.list_batches(limit=4, after=after)
            await create(store, file.id)
            seen += [batch.id for batch in page.items]
            after, more = seen[-1], page.has_more
        assert seen == made[::-1]

    asyncio.run(main())


def test_published_results_are_swept(store: Store) -> None:
    async def main() -> None:
        kept, ended = await running(store), await running(store)
        for batch in (kept, ended):
            await store.add_results(batch.id, [result(1)])
        await publish(store, ended, S.EXPIRED)
        await store.sweep()
        assert await store.finished_lines(kept.id) == {1}
        assert await store.finished_lines(ended.id) == set()

    asyncio.run(main())
