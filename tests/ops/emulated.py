"""The C kernels for AArch64, run by an emulator: one program, which takes one call."""

import shutil
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxserve.ops import kernel_library, native

# Of XLA's interface for foreign functions, xla/ffi/api/c_api.h.
TYPES = {"int8": 2, "int32": 4, "uint8": 6, "float32": 11, "bfloat16": 16, "float8_e4m3fn": 20}


def use(monkeypatch: pytest.MonkeyPatch, directory: Path, march: str) -> None:
    """Let `native` call kernels compiled for `march`. Skips the test on a machine without the tools."""
    compiler, emulator = (shutil.which(name) for name in ("aarch64-linux-gnu-gcc", "qemu-aarch64"))
    if compiler is None:
        pytest.skip("no aarch64-linux-gnu-gcc")
    program = _compiled(directory, compiler, march)
    if emulator is None:
        pytest.skip("no qemu-aarch64 to run what was compiled")
    rounds = subprocess.run([emulator, program], check=False).returncode
    monkeypatch.setattr(native, "can_round", lambda dtype: rounds > (dtype == "bfloat16"))
    monkeypatch.setattr(jax.ffi, "ffi_call", lambda name, result: _call([emulator, program, name], result))


def _compiled(directory: Path, compiler: str, march: str) -> str:
    """Compile the kernels and the program around them, with warnings as errors."""
    program = str(directory / "kernels")
    sources = [Path(__file__).with_suffix(".c"), *(kernel_library.FOLDER / name for name in kernel_library.SOURCES)]
    flags = [flag for flag in kernel_library.FLAGS if flag not in ("-shared", "-march=native")]
    strict = [f"-march={march}", "-Wall", "-Wextra", "-Werror", "-static", "-I", kernel_library._headers()]
    subprocess.run([compiler, *flags, *strict, *map(str, sources), "-o", program, "-lm"], check=True)
    return program


def _call(command: list[str], result: jax.ShapeDtypeStruct) -> Callable[..., Any]:
    def run(*arrays: Any) -> np.ndarray:
        message = [struct.pack("<q", len(arrays) + 1)]
        for array in arrays:
            message += [_header(array), np.asarray(array).tobytes()]
        done = subprocess.run(command, input=b"".join([*message, _header(result)]), capture_output=True, check=True)
        return np.frombuffer(done.stdout, np.float32).reshape(result.shape)

    return lambda *arrays: jax.pure_callback(run, result, *arrays)


def _header(array: Any) -> bytes:
    return struct.pack(f"<{2 + len(array.shape)}q", TYPES[str(array.dtype)], len(array.shape), *array.shape)
