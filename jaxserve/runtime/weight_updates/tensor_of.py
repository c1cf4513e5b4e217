"""Reads checkpoint tensors back from the parameters made of them: the inverse of models/checkpoint/loader.py."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import jax
import numpy as np

from jaxserve.errors import InvalidValueError
from jaxserve.models.weights import ParamSpec, Part

MAX_NUMBERS = 2**19  # of one answer; more would hold up the HTTP process for 0.1 s and more


def tensor_of(specs: Sequence[ParamSpec], leaves: Sequence[jax.Array], name: str, num_rows: int) -> np.ndarray:
    """Return the first `num_rows` indices of the first axis of checkpoint tensor `name`: float32 [rows, ...].

    specs, leaves: of all parameters, in the same order. Raises InvalidValueError if no parameter has the tensor, if it
    is quantised, or if the answer would have more than MAX_NUMBERS numbers.
    """
    found = list(_parts_of(specs, leaves, name))
    if not found:
        raise InvalidValueError(f"the model has no tensor {name[:200]!r}", param="name")
    shape = found[0][1].shape
    num_rows = min(num_rows, shape[0])
    if (most := MAX_NUMBERS // max(1, int(np.prod(shape[1:])))) < num_rows:
        raise InvalidValueError(
            f"{num_rows} rows of a tensor {list(shape)} are too many; at most {most}", param="truncate_size"
        )
    out = np.zeros(shape, np.float32)
    for leaf, part in found:
        first, last = part.rows or (0, shape[0])
        out[first:last] = _numbers(np.asarray(leaf), part).reshape(last - first, *shape[1:])
    return out[:num_rows]


def _parts_of(specs: Sequence[ParamSpec], leaves: Sequence[jax.Array], name: str) -> Iterator[tuple[jax.Array, Part]]:
    for spec, leaf in zip(specs, leaves, strict=True):
        for part in spec.parts:
            if part.name == name:
                if spec.packing is not None:
                    raise InvalidValueError(f"{name} is held in {spec.packing.kind}", param="name")
                yield leaf, part


def _numbers(leaf: np.ndarray, part: Part) -> np.ndarray:
    """Return what a part has of its checkpoint tensor, in the order of that tensor."""
    view = leaf[tuple(slice(start, start + size) for start, size in zip(part.start, part.view, strict=True))]
    once = view[:: part.repeat]
    if part.transpose is None:
        return once
    return once.reshape([part.shape[axis] for axis in part.transpose]).transpose(np.argsort(part.transpose))
