"""Damages the files of stored programs so that they load and cannot be run."""

import importlib
import re
from typing import Any

import msgspec

from jaxserve.runtime.compilation.compiler import Program
from jaxserve.runtime.saved_programs.executable import _devices
from jaxserve.runtime.saved_programs.program_store import decode, encode

_KERNEL_SYMBOL = re.compile(rb":.\x08\x01\x12", re.DOTALL)  # in the list of a program's functions: one of type 1


def without_code(file: bytes, program: Program) -> bytes:
    """Return the file as XLA's CPU client writes a program that it had loaded: without machine code."""
    stored = decode(file)
    devices = _devices(program)
    client: Any = devices[0].client
    held = importlib.import_module("jaxlib.xla_client").DeviceList(tuple(devices))
    loaded = client.deserialize_executable(stored.executable, executable_devices=held)
    return encode(msgspec.structs.replace(stored, executable=client.serialize_executable(loaded)))


def without_functions(file: bytes) -> bytes:
    """Return the file with its kernels listed as another type of function, so that XLA does not run them."""
    stored = decode(file)
    damaged = _KERNEL_SYMBOL.sub(lambda found: found[0].replace(b"\x08\x01", b"\x08\x02"), stored.executable)
    assert damaged != stored.executable
    return encode(msgspec.structs.replace(stored, executable=damaged))
