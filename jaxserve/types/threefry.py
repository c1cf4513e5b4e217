"""The counter-based random numbers that draw tokens (JAX, on the device) and test watermarks (numpy, on the host).

Threefry-2x32 with 20 rounds of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011. Implemented here so
that a seed's numbers do not depend on JAX's version or configuration.
"""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))

Array = TypeVar("Array", bound=Any)  # jax.Array or np.ndarray; this file must not import jax


def threefry2x32(key0: Array, key1: Array, count0: Array, count1: Array) -> tuple[Array, Array]:
    """Return two uint32 arrays [...] of random bits for four uint32 arrays [...] of one shape, by numpy or by JAX."""
    keys = (key0, key1, key0 ^ key1 ^ np.uint32(0x1BD11BDA))
    x0, x1 = count0 + keys[0], count1 + keys[1]
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            x0 = x0 + x1
            x1 = ((x1 << np.uint32(rotation)) | (x1 >> np.uint32(32 - rotation))) ^ x0
        x0 = x0 + keys[(group + 1) % 3]
        x1 = x1 + keys[(group + 2) % 3] + np.uint32(group + 1)
    return x0, x1
