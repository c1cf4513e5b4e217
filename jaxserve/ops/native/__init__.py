"""CPU kernels in C, for operations that XLA compiles badly there. Each is an XLA custom call on XLA's threads.

`load` compiles and registers them. On a machine without a C compiler the XLA formulations are used instead.
The kernels read row-major arrays of one device: call them inside shard_map, or if nothing is sharded.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxserve.errors import ConfigError
from jaxserve.ops.kernel_library import build, kept, library_name
from jaxserve.ops.quantized import BLOCK, Quantized
from jaxserve.system import CacheDirectoryError, OpenDirectory, opened, user_cache
from jaxserve.transport.socket_directory import scratch_directory

logger = logging.getLogger(__name__)

_MATMUL, _MATMUL_FEW = "jaxserve_matmul", "jaxserve_matmul_few"
_ATTEND, _ATTEND_PROMPTS = "jaxserve_attend", "jaxserve_attend_prompts"
_ROUNDED, _ROUNDED_FEW = "jaxserve_matmul_rounded", "jaxserve_matmul_rounded_few"
_RECUR = "jaxserve_recur"
_GROUPED, _GROUPED_FEW = "jaxserve_matmul_grouped", "jaxserve_matmul_grouped_few"
FEW = 8  # largest number of tokens that matmul_few accepts
# Length of a weight's rows from which matmul_few is the faster one. With [2816, 16], as of an adapter, it takes 35 us
# for one token and 251 for eight, and matmul 19 and 20. With [2816, 64] it takes 40 and 92, matmul 50 and 56 (AVX2).
FEW_DEPTH = 64
ROUNDED_FORMS = ("bfloat16", "int8", "uint8")  # values of weights whose products round activations; uint8: 4 bits
HEAD_DIM_STEP = 16  # head_dim must be a multiple of this


@functools.cache  # XLA's registry is process-wide: a name may be registered once
def load() -> ctypes.CDLL:
    """Make the kernels callable in this process, and return their library.

    Raises ConfigError with the reason if they cannot be compiled.
    """
    try:
        with scratch_directory() as scratch:
            library = _open(scratch)  # a loaded library stays usable after its file is deleted
    except OSError as error:
        raise ConfigError(f"the CPU's kernels cannot be compiled: {error}", fix="set runtime.attention: xla") from error
    products = (_MATMUL, _MATMUL_FEW, _ROUNDED, _ROUNDED_FEW, _GROUPED, _GROUPED_FEW)
    for name in (*products, _ATTEND, _ATTEND_PROMPTS, _RECUR):
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(library, name)), platform="cpu")
    return library


def can_round(dtype: jnp.dtype) -> bool:
    """Return whether `matmul_rounded` accepts weights whose values have this dtype, on this processor.

    int8, and uint8 with two 4-bit values in each, need AVX2 or NEON's dot products. bfloat16 needs AVX512_BF16
    and AVX512_VNNI.
    """
    has = load().jaxserve_rounds()
    return (dtype in (jnp.int8, jnp.uint8) and has > 0) or (dtype == jnp.bfloat16 and has > 1)


def _open(scratch: Path) -> ctypes.CDLL:
    """Open the library in the user's cache, or one compiled for this process if no cache directory is safe."""
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
            os.unlink(library_name(), dir_fd=cache.descriptor)  # truncated, for example by a power cut: build again
    return ctypes.CDLL(kept(cache, scratch))


Weight = jax.Array | Quantized


def takes(w: Weight) -> bool:
    """Return whether the products accept a weight of this form."""
    if isinstance(w, Quantized):
        return w.tensor_scale is None
    return w.dtype in (jnp.float32, jnp.bfloat16)


def matmul(x: jax.Array, w: Weight) -> jax.Array:
    """Multiply x float32 [T, K] by w [N, K] transposed -> float32 [T, N]. A row's bits do not depend on T.

    w is float32, bfloat16 or quantized. The result has the same bits as with the same weights in float32.
    """
    return _product(_MATMUL, x, w)


def matmul_few(x: jax.Array, w: Weight) -> jax.Array:
    """Do `matmul` for x [T, K] of at most FEW rows, and faster.

    It sums in another order than `matmul`, and for one row in another order than for more.
    """
    assert x.shape[0] <= FEW
    return _product(_MATMUL_FEW, x, w)


def rounds(w: Weight) -> bool:
    """Return whether `matmul_rounded` accepts this weight, on this processor."""
    if isinstance(w, Quantized):
        return can_round(w.values.dtype) and not w.is_e2m1 and w.group % BLOCK == 0
    return can_round(w.dtype) and w.shape[-1] % 2 == 0


def matmul_rounded(x: jax.Array, w: Weight, *, few: bool = False) -> jax.Array:
    """Do `matmul` with each row of x float32 [T, K] rounded first -> float32 [T, N], at least about twice as fast.

    For a bfloat16 weight x is rounded to bfloat16. For an 8-bit or 4-bit weight it is quantized to 8 bits, with a scale
    for each group of at most 128 values. The caller has checked `rounds`. few: faster for up to FEW rows (with AVX2
    alone up to 4), with sums in another order.
    """
    assert rounds(w)
    return _product(_ROUNDED_FEW if few and x.shape[0] <= FEW else _ROUNDED, x, w)


def matmul_grouped(x: jax.Array, w: Weight, sizes: jax.Array, *, few: bool) -> jax.Array:
    """Multiply each row of x float32 [T, K] by its group's w [E, N, K] transposed -> float32 [T, N].

    The rows of a group are contiguous, in the order of the groups; sizes int32 [E] counts them. Rows of x after the
    last group give 0. few: groups of at most FEW rows have the speed and the bits of `matmul_few`.
    """
    groups, rows, _ = w.shape
    flat = w.matrix() if isinstance(w, Quantized) else w.reshape(groups * rows, -1)
    return _call(_GROUPED_FEW if few else _GROUPED, x, flat, rows, sizes)


def _product(name: str, x: jax.Array, w: Weight) -> jax.Array:
    return _call(name, x, w, w.shape[0])


def _call(name: str, x: jax.Array, w: Weight, rows: int, *behind: jax.Array) -> jax.Array:
    assert x.dtype == jnp.float32 and takes(w)
    result = jax.ShapeDtypeStruct((x.shape[0], rows), jnp.float32)
    return jax.ffi.ffi_call(name, result)(x, *jax.tree.leaves(w), *behind)


class PagedContext(NamedTuple):
    """The context that the rows of a layer attend to.

    cache: [P, 2, page_size, KH * D], or [P, 1, ...] if V is K; float32, bfloat16 or its bits in uint16, or
      with scales float32 [P, 2, page_size, KH] int8, float8_e4m3fn or its bits in uint8.
    page_table: int32 [R, max_pages]. sinks: [N]. sliding_window: tokens. soft_cap: of the scores.
    chunk: tokens; a layer has no sliding_window beside it.
    """

    cache: jax.Array
    page_table: jax.Array
    sinks: jax.Array | None = None
    sliding_window: int | None = None
    soft_cap: float | None = None
    scales: jax.Array | None = None
    chunk: int | None = None


def attend(q: jax.Array, kv_lens: jax.Array, context: PagedContext) -> jax.Array:
    """Compute the attention of rows that have one token each, at position kv_len - 1 -> float32 [R, N, D].

    q: float32 [R, N, D], already scaled; D is a multiple of HEAD_DIM_STEP.
    kv_lens: int32 [R]; a row with kv_len 0 gives zeros.
    """
    return _attend(_ATTEND, q, (kv_lens,), context)


def attend_prompts(q: jax.Array, rows: tuple[jax.Array, jax.Array, jax.Array], context: PagedContext) -> jax.Array:
    """Compute the attention of the rows that have at least two tokens: q float32 [T, N, D], scaled -> [T, N, D].

    rows: the first packed token, the number of tokens and the context length of each row, int32 [R] each. A row's
    tokens are the last of its context. Other tokens get zeros. D is a multiple of HEAD_DIM_STEP.
    """
    return _attend(_ATTEND_PROMPTS, q, rows, context)


def _attend(name: str, q: jax.Array, rows: tuple[jax.Array, ...], context: PagedContext) -> jax.Array:
    cache, page_table, sinks, sliding_window, soft_cap, scales, chunk = context
    assert q.dtype == jnp.float32 and q.shape[2] % HEAD_DIM_STEP == 0
    assert (cache.dtype in (jnp.float32, jnp.bfloat16, jnp.uint16)) == (scales is None)
    none = jnp.full((q.shape[1],), -jnp.inf, jnp.float32)
    call = jax.ffi.ffi_call(name, jax.ShapeDtypeStruct(q.shape, jnp.float32))
    return call(
        q,
        cache,
        page_table,
        *rows,
        none if sinks is None else sinks.astype(jnp.float32),
        jnp.array([-chunk if chunk else sliding_window or 0], jnp.int32),
        jnp.array([soft_cap or 0.0], jnp.float32),
        *([] if scales is None else [scales]),
    )


class RecurrentState(NamedTuple):
    """A layer with a recurrent state: its arrays and parameters, as `ops.state.base` describes them.

    kind: 0, 1 and 2 for "delta", "channel_delta" and "mamba2". limits: the floor of the decay (0: none), and the least
    and the most dt.
    """

    state: jax.Array
    ring: jax.Array
    conv: jax.Array
    conv_bias: jax.Array | None
    log_a: jax.Array
    dt_bias: jax.Array
    skip: jax.Array | None
    kind: int
    limits: tuple[float, float, float]


def recur(layer: RecurrentState, raw: jax.Array, rows: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Advance a layer by raw [T, Hk, C] -> (out [T, H, V], state, ring), the last two in place if they are donated.

    rows: the arrays of `StateRows`, in their order. K and V are multiples of HEAD_DIM_STEP. raw, the ring and the
    convolution are float32 or bfloat16. A row's bits do not depend on how its tokens are cut into steps.
    """
    state, ring, conv = layer.state, layer.ring, layer.conv
    assert state.shape[2] % HEAD_DIM_STEP == 0
    assert state.shape[3] % HEAD_DIM_STEP == 0
    assert raw.dtype == ring.dtype
    out = jax.ShapeDtypeStruct((raw.shape[0], *state.shape[1:4:2]), raw.dtype)
    results = [out, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (state, ring))]
    call = jax.ffi.ffi_call(_RECUR, results, input_output_aliases={0: 1, 1: 2})
    out, state, ring = call(
        state,
        ring,
        raw,
        conv,
        jnp.zeros((0,), conv.dtype) if layer.conv_bias is None else layer.conv_bias.astype(conv.dtype),
        layer.log_a,
        layer.dt_bias,
        jnp.zeros((0,), jnp.float32) if layer.skip is None else layer.skip,
        *rows,
        jnp.array([layer.kind], jnp.int32),
        jnp.array(layer.limits, jnp.float32),
    )
    return out, state, ring
