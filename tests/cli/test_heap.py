"""The heap of the API process."""

from __future__ import annotations

import subprocess
import sys

import pytest

# After a large block is freed, glibc takes smaller ones from its heap. hblks is the number of blocks that are mapped.
PROGRAM = """
import ctypes, sys
from jaxserve.cli.http_server import keep_heap_small

class Info(ctypes.Structure):
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.mallinfo2.restype = ctypes.c_void_p, Info
if sys.argv[1] == "small":
    keep_heap_small()
libc.free(ctypes.c_void_p(libc.malloc(16 << 20)))
before = libc.mallinfo2().hblks
libc.malloc(8 << 20)
print(libc.mallinfo2().hblks - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's allocator")
@pytest.mark.parametrize(("heap", "mapped"), [("as it is", 0), ("small", 1)])
def test_large_blocks_are_mapped_after_one_was_freed(heap: str, mapped: int) -> None:
    run = subprocess.run([sys.executable, "-c", PROGRAM, heap], capture_output=True, text=True, check=True)
    assert int(run.stdout) == mapped
