"""The allocator of the API process: large bodies must not leave its heap full of holes."""

from __future__ import annotations

import ctypes

_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8  # names of mallopt(3)
_ARENAS = 2
_MAPPED_BYTES = 1 << 20


def keep_heap_small() -> None:
    """Give back the memory of large bodies. Call it before other threads are there. Has no effect without glibc.

    glibc keeps a heap for each thread, and after the first large block is freed it takes blocks of up to 32 MiB from
    these heaps. After this call blocks of a megabyte are mapped, and unmapped when they are freed. After 2,000 requests
    of `tests/e2e/test_stretched.py`, 171 MiB of the heaps were free without this, and 32 MiB with it.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, _ARENAS)
        mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)
