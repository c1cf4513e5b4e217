"""Compiled programs as bytes, and back, without tracing and without pickle.

The bytes are XLA's own serialization of the executable, which is machine code. The rest that jax needs to call it is
plain data: the tree of the results and their shapes. Arguments and shardings come from the `Program` at hand. The
classes of jax for a loaded executable are not public, so only this file names them; `load` raises ProgramFormatError if
another version of jax has changed them.
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import ml_dtypes
import msgspec
import numpy as np
from jax.core import ShapedArray
from jax.experimental.layout import Layout
from jax.sharding import SingleDeviceSharding

from jaxserve.errors import JaxserveError
from jaxserve.ops.paged_attention.scaled_pages import ScaledPages
from jaxserve.ops.state import StateArrays
from jaxserve.runtime.compilation.compiler import Program
from jaxserve.runtime.sampling.sampler import Sampled
from jaxserve.runtime.sampling.slots import SlotState
from jaxserve.runtime.sampling.verify import Verified

_KERNEL = b"\n\x06kernel"  # in a CPU's program: a thunk that calls a function of its machine code
_OBJECT_FILE = b"\x7fELF"  # the beginning of machine code on Linux
_INTERNALS = ("jax._src.stages", "jax._src.interpreters.pxla", "jaxlib.xla_client")


class ProgramFormatError(JaxserveError):
    """The bytes of a program cannot be used by this jax."""


class UnrunnableProgramError(JaxserveError):
    """A program was loaded and cannot be run. It is discarded, so another start compiles it."""


class StoredLayout(msgspec.Struct, frozen=True):
    """The order of an array's dimensions in memory; see jax.experimental.layout.Layout."""

    major_to_minor: tuple[int, ...]
    tiling: tuple[tuple[int, ...], ...] | None
    sub_byte_element_size_in_bits: int


class StoredResult(msgspec.Struct, frozen=True):
    """An array that a program returns."""

    shape: tuple[int, ...]
    dtype: str
    weak_type: bool
    layout: StoredLayout


class StoredProgram(msgspec.Struct, frozen=True):
    """A compiled program without its arguments and shardings.

    kept: indices of the flat arguments that the executable takes. layouts: their layouts
    tree: of the results: a list ["tuple", ...], ["list", ...], ["dict", keys, ...], ["none"], ["leaf"] or [class, ...]
    """

    executable: bytes
    kept: tuple[int, ...]
    layouts: tuple[StoredLayout, ...]
    tree: list[Any]
    results: tuple[StoredResult, ...]


def serialize(compiled: jax.stages.Compiled) -> StoredProgram:
    """Return the bytes and the description of a program. Raises ProgramFormatError if it has none.

    The program may be compiled for a device that is not there.
    """
    try:
        inner = _unloaded(compiled)
        executable = inner.xla_executable
        plain = not (inner.mut or inner.host_callbacks or inner.ordered_effects or inner.unordered_effects)
        if not plain or any(layout is not None for layout in inner.dispatch_in_layouts):
            raise ProgramFormatError("it has effects or layouts of its own")
        client = getattr(executable, "client", None)
        data = executable.serialize() if client is None else client.serialize_executable(executable)
        _check_code(data, "" if client is None else client.platform)
        layouts = tuple(map(_stored_layout, inner.xla_in_layouts))
        results = tuple(
            StoredResult(tuple(aval.shape), np.dtype(aval.dtype).name, bool(aval.weak_type), _stored_layout(layout))
            for aval, layout in zip(inner.output_avals, inner.xla_out_layouts, strict=True)
        )
        tree = _describe(compiled.out_tree.unflatten(range(len(results))))
        return StoredProgram(data, tuple(sorted(inner.kept_var_idx)), layouts, tree, results)
    except (AttributeError, TypeError, jax.errors.JaxRuntimeError) as error:
        raise ProgramFormatError(f"jax {jax.__version__} gives no bytes of it: {error}") from error


def load(stored: StoredProgram, program: Program) -> jax.stages.Compiled:
    """Load a program on the devices of its results. Runs nothing. Raises ProgramFormatError if jax cannot load it.

    program: the same as when it was compiled; its out_shardings must not be None.
    """
    try:
        return _load(stored, program)
    except (ImportError, AttributeError, TypeError, ValueError, KeyError, jax.errors.JaxRuntimeError) as error:
        raise ProgramFormatError(f"jax {jax.__version__} cannot load it: {error}") from error


def lacks_function(error: BaseException | None) -> bool:
    """Return whether an error, or its cause, says that a program was run whose machine code is not complete.

    XLA's words are "Function f not found (type id: 1)" and "Symbol f has type id 2, expected 1".
    """
    while error is not None:
        if isinstance(error, jax.errors.JaxRuntimeError) and "type id" in str(error):
            return True
        error = error.__cause__
    return False


def _check_code(executable: bytes, platform: str) -> None:
    """Raise ProgramFormatError if the kernels of a CPU's program have no machine code.

    XLA's CPU client leaves it out if it serializes an executable that it had loaded from bytes, as jax's cache does.
    Such a program loads without an error, and its first run fails.
    """
    has_kernels = platform == "cpu" and sys.platform == "linux" and _KERNEL in executable
    if has_kernels and _OBJECT_FILE not in executable:
        raise ProgramFormatError("its machine code is missing")


def _unloaded(compiled: jax.stages.Compiled) -> Any:
    return compiled._executable._unloaded_executable  # type: ignore[attr-defined]


def _devices(program: Program) -> list[Any]:
    sharding = jax.tree.leaves(program.out_shardings)[0]
    if isinstance(sharding, jax.sharding.NamedSharding):
        return list(sharding.mesh.devices.flat)  # type: ignore[union-attr]
    return list(sharding.device_set)


def _load(stored: StoredProgram, program: Program) -> jax.stages.Compiled:
    # not at the top: another version of jax may lack them, and then programs are compiled
    stages, pxla, xla_client = map(importlib.import_module, _INTERNALS)
    devices = _devices(program)
    client, held = devices[0].client, xla_client.DeviceList(tuple(devices))
    _check_code(stored.executable, client.platform)
    executable = client.deserialize_executable(stored.executable, executable_devices=held)
    arguments, in_tree = jax.tree.flatten((program.args, {}))
    structs = [arguments[index] for index in stored.kept]
    here = SingleDeviceSharding(devices[0])
    out = jax.tree.structure(_rebuilt(stored.tree))
    out_shardings = jax.tree.broadcast(program.out_shardings, jax.tree.unflatten(out, range(out.num_leaves)))
    in_avals = [ShapedArray(s.shape, s.dtype) for s in structs]
    out_avals = [ShapedArray(r.shape, _dtype(r.dtype), weak_type=r.weak_type) for r in stored.results]
    fields: dict[str, Any] = {
        "xla_executable": executable,
        "device_list": held,
        "backend": client,
        "input_avals": in_avals,
        "input_shardings": [s.sharding or here for s in structs],
        "output_avals": out_avals,
        "output_shardings": jax.tree.leaves(out_shardings),
        "committed": True,
        "name": program.name,
        "unordered_effects": [],
        "ordered_effects": [],
        "keepalive": [],
        "host_callbacks": [],
        "kept_var_idx": set(stored.kept),
        "mut": None,
        "xla_in_layouts": [_layout(layout) for layout in stored.layouts],
        "dispatch_in_layouts": [None] * len(in_avals),
        "xla_out_layouts": [_layout(result.layout) for result in stored.results],
        "all_args_info": None,
        "pgle_profiler": None,
    }
    loaded = pxla.UnloadedMeshExecutable(**fields).load()
    avals = [ShapedArray(s.shape, s.dtype) for s in arguments]
    info = jax.tree.unflatten(in_tree, [stages.ArgInfo(aval, donated=False) for aval in avals])
    return stages.Compiled(loaded, [], info, out, no_kwargs=True)


def _stored_layout(layout: Any) -> StoredLayout:
    tiling = None if layout.tiling is None else tuple(map(tuple, layout.tiling))
    return StoredLayout(tuple(layout.major_to_minor), tiling, layout.sub_byte_element_size_in_bits)


def _layout(stored: StoredLayout) -> Layout:
    return Layout(
        stored.major_to_minor,
        stored.tiling,  # type: ignore[arg-type]
        stored.sub_byte_element_size_in_bits,
    )


def _dtype(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name, name))


def _node_classes() -> Mapping[str, type[Any]]:
    """Return the classes that a result may have, by name. No other class is ever made from a file."""
    return {cls.__name__: cls for cls in (SlotState, Sampled, Verified, ScaledPages, StateArrays)}


def _describe(tree: Any) -> list[Any]:
    if tree is None:
        return ["none"]
    if type(tree) in (tuple, list):
        return [type(tree).__name__, *map(_describe, tree)]
    if isinstance(tree, dict):
        return ["dict", list(tree), *map(_describe, tree.values())]
    if type(tree).__name__ in _node_classes():
        fields = tree if isinstance(tree, tuple) else [getattr(tree, f.name) for f in dataclasses.fields(tree)]
        return [type(tree).__name__, *map(_describe, fields)]
    if isinstance(tree, int):
        return ["leaf"]
    raise ProgramFormatError(f"it returns a {type(tree).__name__}")


def _rebuilt(described: Sequence[Any]) -> Any:
    kind, *inner = described
    if kind in ("none", "leaf"):
        return None if kind == "none" else 0
    if kind == "dict":
        return dict(zip(inner[0], map(_rebuilt, inner[1:]), strict=True))
    parts = [_rebuilt(part) for part in inner]
    if kind in ("tuple", "list"):
        return tuple(parts) if kind == "tuple" else parts
    return _node_classes()[kind](*parts)
