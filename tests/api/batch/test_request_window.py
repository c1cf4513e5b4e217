import asyncio

import pytest

from jaxserve.api.batch.job import RequestWindow, spare_slots
from tests.waiting import LAST_RESORT


def test_the_limit_holds_and_is_read_again() -> None:
    async def main() -> None:
        limit = 2
        window = RequestWindow(lambda lines: limit)
        await window.enter(1)
        await window.enter(1)
        third = asyncio.create_task(window.enter(1))
        await asyncio.sleep(0.05)
        assert not third.done()
        limit = 3
        await third
        assert window.num_running == 3

    asyncio.run(main())


def test_one_line_is_always_let_in() -> None:
    async def main() -> None:
        window = RequestWindow(lambda lines: -5, max_bytes=10)
        await window.enter(1000)
        second = asyncio.create_task(window.enter(1))
        await asyncio.sleep(0.05)
        assert not second.done()
        window.leave(1000)
        await second

    asyncio.run(main())


def test_bytes_are_bounded() -> None:
    async def main() -> None:
        window = RequestWindow(lambda lines: 100, max_bytes=10)
        await window.enter(6)
        await window.enter(4)
        third = asyncio.create_task(window.enter(1))
        await asyncio.sleep(0.05)
        assert not third.done()
        window.leave(4)
        await third

    asyncio.run(main())


def test_batches_take_turns() -> None:
    async def main() -> None:
        window, order = RequestWindow(lambda lines: 1), []

        async def batch(name: str) -> None:
            for _ in range(3):
                await window.enter(1)
                order.append(name)
                asyncio.get_running_loop().call_soon(window.leave, 1)

        await asyncio.gather(batch("a"), batch("b"))
        assert "".join(order) in ("ababab", "aababb"), order  # the first may begin before the second asks

    asyncio.run(main())


def test_giving_up_takes_no_place() -> None:
    async def main() -> None:
        window = RequestWindow(lambda lines: 1)
        await window.enter(1)
        waiting = asyncio.create_task(window.enter(1))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait({waiting})
        window.leave(1)
        await asyncio.wait_for(window.enter(1), LAST_RESORT)
        assert window.num_running == 1

    asyncio.run(main())


@pytest.mark.parametrize(("rows", "online", "limit"), [(64, 0, 56), (64, 10, 46), (64, 64, -8), (4, 1, 2)])
def test_lines_take_what_online_requests_leave(rows: int, online: int, limit: int) -> None:
    assert spare_slots(rows, online) == limit
