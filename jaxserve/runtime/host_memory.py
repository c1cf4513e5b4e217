"""The C library's allocator, told to keep what XLA frees.

On a CPU the temporary memory of every step is the C heap's. Left alone, glibc maps each block above 32 MiB anew and
returns it to the kernel after the step, which then clears every page again: 18,000 page faults for a chunk of 512
tokens of a 200M model.
"""

from __future__ import annotations

import ctypes

# The numbers of glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4
_LARGEST = 2**31 - 1
_GROWTH = 64 * 2**20  # bytes by which the heap grows at once


def keep_freed_memory() -> bool:
    """From now on memory that is freed stays with the process, for its next step; False where there is no glibc.

    For a process that runs a CPU engine and nothing else, after the weights are loaded: what loading needed for a
    moment goes back to the system first.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    settings = ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, _LARGEST), (_M_TOP_PAD, _GROWTH))
    return all(mallopt(name, value) == 1 for name, value in settings)
