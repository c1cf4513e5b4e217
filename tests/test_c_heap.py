"""The allocator keeps what is freed: seen from a process of its own, whose pages it would otherwise fault in anew."""

import ctypes
import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys
import numpy as np
from jaxserve.system import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        np.ones(2**24, np.float32)  # 64 MiB, freed at once: glibc by itself keeps blocks of up to 32
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
print(faults())
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="needs glibc")
def test_freed_memory_is_used_again() -> None:
    counts = {
        mode: int(subprocess.run([sys.executable, "-c", PROGRAM, mode], capture_output=True, check=True).stdout)
        for mode in ("keep", "leave")
    }
    assert counts["keep"] < 100 < counts["leave"]
