"""The free list: pages go out once and come back once."""

import pytest

from jaxserve.kv.page_pool import PagePool


def test_pages_go_out_once() -> None:
    pool = PagePool(6)
    taken = pool.allocate(4) + pool.allocate(2)
    assert sorted(taken) == list(range(6)) and pool.num_free == 0
    assert pool.allocate(0) == []
    pool.check_integrity(taken)


def test_a_page_that_came_back_goes_out_again() -> None:
    pool = PagePool(2)
    pages = pool.allocate(2)
    pool.free(pages[:1])
    assert pool.allocate(1) == pages[:1]


def test_more_than_free_is_refused_and_takes_nothing() -> None:
    pool = PagePool(3)
    with pytest.raises(ValueError, match="4 pages wanted, 3 are free"):
        pool.allocate(4)
    assert pool.num_free == 3


def test_a_page_cannot_come_back_twice() -> None:
    pool = PagePool(3)
    (page,) = pool.allocate(1)
    pool.free([page])
    with pytest.raises(ValueError, match="free already"):
        pool.free([page])


@pytest.mark.parametrize("owned", [[], [0, 0], [0, 2]], ids=["lost", "two owners", "free and owned"])
def test_integrity_sees_a_page_astray(owned: list[int]) -> None:
    pool = PagePool(3)
    pool.allocate(1)
    with pytest.raises(AssertionError):
        pool.check_integrity(owned)
