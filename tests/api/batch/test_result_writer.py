import asyncio
from collections.abc import Sequence

import pytest

from jaxserve.api.batch.job import ResultWriter, StoragePause
from jaxserve.errors import StorageError
from jaxserve.store import LineResult
from tests.waiting import LAST_RESORT


class Disk:
    def __init__(self) -> None:
        self.groups: list[list[int]] = []
        self.full = False
        self.gate = asyncio.Event()
        self.gate.set()

    async def save(self, results: Sequence[LineResult]) -> None:
        await self.gate.wait()
        if self.full:
            raise StorageError("full")
        self.groups.append([result.line for result in results])


def result(line: int) -> LineResult:
    return LineResult(line, True, b"")


def test_lines_that_finish_during_a_commit_share_the_next() -> None:
    async def main() -> None:
        disk = Disk()
        disk.gate.clear()
        writer = ResultWriter(disk.save, StoragePause("batch_1", 0.01))
        first = asyncio.create_task(writer.commit(result(1)))
        await asyncio.sleep(0.01)
        others = [asyncio.create_task(writer.commit(result(line))) for line in (2, 3, 4)]
        await asyncio.sleep(0.01)
        disk.gate.set()
        await asyncio.gather(first, *others)
        assert disk.groups == [[1], [2, 3, 4]]
        await writer.commit(result(5))
        assert disk.groups[2:] == [[5]]

    asyncio.run(main())


def test_a_full_disk_is_waited_for() -> None:
    async def main() -> None:
        disk = Disk()
        disk.full = True
        writer = ResultWriter(disk.save, StoragePause("batch_1", 0.01))
        task = asyncio.create_task(writer.commit(result(1)))
        await asyncio.sleep(0.05)
        assert not task.done()
        disk.full = False
        await task
        assert disk.groups == [[1]]

    asyncio.run(main())


def test_what_was_handed_in_is_saved_though_nobody_waits() -> None:
    async def main() -> None:
        disk = Disk()
        disk.full = True
        writer = ResultWriter(disk.save, StoragePause("batch_1", 0.01))
        tasks = [asyncio.create_task(writer.commit(result(line))) for line in (1, 2)]
        await asyncio.sleep(0.02)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        disk.full = False
        await writer.close(None)
        assert disk.groups == [[1, 2]]
        with pytest.raises(RuntimeError):
            await writer.commit(result(3))

    asyncio.run(main())


def test_closing_may_be_given_a_limit() -> None:
    async def main() -> None:
        disk = Disk()
        disk.full = True
        writer = ResultWriter(disk.save, StoragePause("batch_1", 0.01))
        task = asyncio.create_task(writer.commit(result(1)))
        await asyncio.sleep(0)
        await asyncio.wait_for(writer.close(0.03), LAST_RESORT)
        assert not task.done()  # the disk is full: the line is not called saved
        task.cancel()
        await asyncio.wait({task})

    asyncio.run(main())


def test_other_errors_reach_every_line_and_the_close() -> None:
    async def main() -> None:
        async def save(results: Sequence[LineResult]) -> None:
            raise KeyError("bug")

        writer = ResultWriter(save, StoragePause("batch_1", 0.01))
        outcomes = await asyncio.gather(*(writer.commit(result(i)) for i in (1, 2)), return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [KeyError, KeyError]
        with pytest.raises(KeyError):
            await writer.close(None)

    asyncio.run(main())
