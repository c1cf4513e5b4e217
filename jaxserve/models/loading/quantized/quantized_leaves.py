"""The leaves of quantised parameters, from any reader of wide ones: each rectangle is read and encoded once.

Owns the order of leaves. Little float32 is held at a time, so that loading takes not much more than the result.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.sharding import Sharding

from jaxserve.models.loading.file_formats.safetensors_file import empty_aligned
from jaxserve.models.loading.quantized.encode import encode
from jaxserve.models.weights import Packing, ParamSpec

Bounds = tuple[tuple[int, int], ...]
Read = Callable[[ParamSpec, tuple[slice, ...]], np.ndarray]  # a parameter and a rectangle -> its numbers
ReadCodes = Callable[[ParamSpec, tuple[slice, ...], Packing], dict[str, np.ndarray]]  # -> {role: array}
ReadOrder = Callable[[ParamSpec], np.ndarray]  # a parameter -> its inputs sorted by group
ENCODED_BYTES = 2**20  # bytes of float32 that are encoded at a time, by each of four threads


def by_parameter(specs: Sequence[ParamSpec]) -> list[tuple[ParamSpec, ...]]:
    """Group the leaves of each parameter, in order."""
    groups = itertools.groupby(specs, lambda spec: spec.wide().name)
    return [tuple(leaves) for _, leaves in groups]


def read_parameter(
    specs: Sequence[ParamSpec],
    shardings: Sequence[Sharding],
    read: Read,
    codes: ReadCodes | None = None,
    order: ReadOrder | None = None,
) -> tuple[jax.Array, ...]:
    """Make the leaves of one parameter, placed by `shardings`. codes, order: read what is kept of the checkpoint."""
    encoded: dict[Bounds, dict[str, np.ndarray]] = {}

    def part(spec: ParamSpec, index: tuple[slice, ...] | None) -> np.ndarray:
        """Return the numbers of one leaf at `index`. Leaves of the same numbers share the work."""
        assert index is not None
        if spec.packing is None:
            return read(spec, index)
        if spec.packing.role == "order":
            assert order is not None
            return order(spec.wide())[index]
        bounds = _wide_bounds(spec, index)
        if spec.shape[-1] == 1:  # a row's only scale was read with some of its numbers
            bounds = next((each for each in encoded if each[:-1] == bounds[:-1]), bounds)
        if bounds not in encoded:
            index = tuple(slice(*bound) for bound in bounds)
            if spec.packing.stored:
                assert codes is not None
                encoded[bounds] = codes(spec.wide(), index, spec.packing)
            else:
                encoded[bounds] = _encoded(specs, bounds, read)
        return encoded[bounds][spec.packing.role]

    def leaf(spec: ParamSpec, sharding: Sharding) -> jax.Array:
        return jax.make_array_from_callback(spec.shape, sharding, lambda i: part(spec, i), dtype=spec.dtype)

    last = sorted(zip(specs, shardings, strict=True), key=lambda pair: pair[0].shape[-1] == 1)
    made = {spec.name: leaf(spec, sharding) for spec, sharding in last}
    return tuple(made[spec.name] for spec in specs)


def _wide_bounds(spec: ParamSpec, index: tuple[slice, ...]) -> Bounds:
    """Return the rectangle of the wide parameter that a rectangle of a leaf stands for."""
    assert spec.packing is not None
    *rows, (first, last) = (s.indices(n)[:2] for s, n in zip(index, spec.shape, strict=True))
    numbers = spec.packing.wide[-1] // spec.shape[-1]
    return (*rows, (first * numbers, last * numbers))


def _encoded(specs: Sequence[ParamSpec], bounds: Bounds, read: Read) -> dict[str, np.ndarray]:
    """Read and encode a rectangle, some indices of its first axis at a time: {role: part of the leaf}."""
    (first, last), *rest = bounds
    wide, packing = specs[0].wide(), specs[0].packing
    assert packing is not None
    sizes = {spec.packing.role: spec for spec in specs if spec.packing is not None}
    *inner, depth = [b - a for a, b in bounds]
    out = {
        role: empty_aligned((*inner, depth * spec.shape[-1] // wide.shape[-1]), np.dtype(spec.dtype))
        for role, spec in sizes.items()
    }
    step = max(1, ENCODED_BYTES // (4 * math.prod(b - a for a, b in rest)))
    for a in range(first, last, step):
        b = min(a + step, last)
        numbers = read(wide, (slice(a, b), *(slice(*bound) for bound in rest)))
        values, scales = encode(numbers, packing.kind, packing.group)
        out["values"][a - first : b - first], out["scales"][a - first : b - first] = values, scales
    return out
