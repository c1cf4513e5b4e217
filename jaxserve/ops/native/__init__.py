"""The CPU's own kernels, in C: what XLA has no good form for there. Each is an XLA custom call on XLA's own threads.

`load` compiles and registers them; a machine without a C compiler does without, and XLA's forms serve. The kernels
read arrays in row-major order and are for one device: inside shard_map, or where nothing is sharded.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp

from jaxserve.cache_directory import CacheDirectoryError, OpenDirectory, opened, user_cache
from jaxserve.errors import ConfigError
from jaxserve.ops.native.library import build, kept, library_name

logger = logging.getLogger(__name__)

_MATMUL, _MATVEC, _ATTEND = "jaxserve_matmul", "jaxserve_matvec", "jaxserve_attend"
LANES = 16  # a head's depth is a multiple of it


@functools.cache  # XLA's registry is the process's: a name is registered once
def load() -> None:
    """Makes the kernels callable in this process. ConfigError with the reason where they cannot be compiled."""
    with tempfile.TemporaryDirectory(prefix="jaxserve-") as scratch:
        library = _open(Path(scratch))  # a library in use needs no name
    for name in (_MATMUL, _MATVEC, _ATTEND):
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(library, name)), platform="cpu")


def _open(scratch: Path) -> ctypes.CDLL:
    """The library of the user's cache, or one made for this process if there is no safe cache."""
    try:
        with opened(user_cache("kernels")) as cache:
            return _open_kept(cache, scratch)
    except (CacheDirectoryError, OSError) as error:
        logger.warning("the compiled kernels are not kept: %s", error)
    try:
        return ctypes.CDLL(str(build(scratch)))
    except OSError as error:
        raise ConfigError(f"the CPU's kernels cannot be loaded: {error}", fix="set runtime.attention: xla") from error


def _open_kept(cache: OpenDirectory, scratch: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(kept(cache, scratch))
    except OSError:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(library_name(), dir_fd=cache.descriptor)  # cut short, by a loss of power say: once more
    return ctypes.CDLL(kept(cache, scratch))


def matmul(x: jax.Array, w: jax.Array) -> jax.Array:
    """x [T, K] times w [N, K] transposed: [T, N]. All float32; a row's bits do not depend on T."""
    return _product(_MATMUL, x, w)


def matvec(x: jax.Array, w: jax.Array) -> jax.Array:
    """`matmul` of one row, x [1, K], in the order of memory: faster, and with other roundings."""
    assert x.shape[0] == 1
    return _product(_MATVEC, x, w)


def _product(name: str, x: jax.Array, w: jax.Array) -> jax.Array:
    assert x.dtype == w.dtype == jnp.float32
    return jax.ffi.ffi_call(name, jax.ShapeDtypeStruct((x.shape[0], w.shape[0]), jnp.float32))(x, w)


def attend(
    q: jax.Array,
    cache: jax.Array,
    page_table: jax.Array,
    kv_lens: jax.Array,
    sinks: jax.Array | None,
    *,
    sliding_window: int | None,
    soft_cap: float | None,
) -> jax.Array:
    """Attention of rows with one token each, at position kv_len - 1; zeros where kv_len is 0. float32 [R, N, D].

    q [R, N, D] float32 and scaled, D a multiple of LANES; cache [P, 2 or 1, page_size, KH * D] of float32 or bfloat16;
    page_table int32 [R, max_pages]; kv_lens int32 [R]; sinks [N].
    """
    assert q.dtype == jnp.float32 and q.shape[2] % LANES == 0 and cache.dtype in (jnp.float32, jnp.bfloat16)
    none = jnp.full((q.shape[1],), -jnp.inf, jnp.float32)
    call = jax.ffi.ffi_call(_ATTEND, jax.ShapeDtypeStruct(q.shape, jnp.float32))
    return call(
        q,
        cache,
        page_table,
        kv_lens,
        none if sinks is None else sinks.astype(jnp.float32),
        jnp.array([sliding_window or 0], jnp.int32),
        jnp.array([soft_cap or 0.0], jnp.float32),
    )
