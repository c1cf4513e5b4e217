"""Paged attention for Hopper in Pallas Mosaic GPU: tensor memory accelerator copies and wgmma products.

One kernel takes blocks of queries. A block is consecutive tokens of one row times the G query heads of a kv head; these
are the 64 rows of a wgmma, token after token. A decode block has one token and leaves the other rows empty, which costs
no time because decode is bound by memory; its context is cut into splits. A prefill block has 64 / G tokens and is not
split.

A program has two warpgroups. The memory warpgroup copies K and V of a tile, page by page, into a ring buffer of
`stages` stages in shared memory. The compute warpgroup multiplies from there.

    memory    wait for stage free -> copy K, V -> (hardware arrives at k_ready, v_ready)
    compute   wait k_ready -> scores -> arrive k_free -> softmax -> wait v_ready -> add values -> arrive v_free

8-bit pages are copied unconverted, with the scales of a page's tokens. The compute warpgroup converts the values of a
tile to q's dtype, which is exact, and writes them to one tile in shared memory for wgmma. The scales multiply the
scores and the weights, which have fewer elements than K and V.

Values have the interleaved layout. Scales are [P, 1, 2 * KH, page_size], or [P, 1, KH, page_size] if V is K
(PageScalesLayout), so that a kernel can copy a page's scales of a head as one block.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxserve.errors import ConfigError
from jaxserve.ops.paged_attention.base import MASKED, AttentionMetadata, AttentionSpec, InterleavedLayout, split_slots
from jaxserve.ops.paged_attention.ragged import Rows, attend_ragged, query_blocks
from jaxserve.ops.paged_attention.scaled_pages import Pages, ScaledPages, is_scaled
from jaxserve.ops.paged_attention.split_kv import LOG2E, PROGRAMS, LayerPages, join_splits, num_splits

CONCATENATES = jax.__version_info__ >= (0, 11)  # whether Mosaic joins arrays in registers
COPY_ALIGN = 128  # bytes: where the tensor memory accelerator may write in shared memory


def scales_in_flight(stages: int, pages: int, kept: int, page_size: int) -> Any:
    """Return the shared memory of scales, float32 [stages, pages of a tile, rows, page_size].

    A page has at least as many rows as make COPY_ALIGN bytes. Rows after the `kept` rows of K and V are not used.
    """
    rows = max(kept, COPY_ALIGN // (4 * page_size))
    return plgpu.SMEM((stages, pages, rows, page_size), jnp.float32)


def widen(tile, wide) -> None:
    """Convert the values of a tile, int8 or E4M3 [tile, D] in shared memory, to the dtype of `wide`, exactly."""
    values = plgpu.load(tile, layout=plgpu.Layout.WGMMA_UPCAST_2X)  # pyright: ignore[reportCallIssue]
    if values.dtype != jnp.int8:  # E4M3 becomes bfloat16 by way of float32
        values = values.astype(jnp.float32)
    wide[...] = values.astype(wide.dtype)
    plgpu.commit_smem()


def column_scales(pages, row: int, first: jax.Array, is_live: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Return the scales float32 [tile] of K (row 0) or V, one for each column of wgmma's result.

    pages: a stage of `scales_in_flight`. first: the position of the tile's first token in the context, int32 [].
    A token that is not live has 0: its page may hold another request's NaN.
    """
    num_pages, _, page_size = pages.shape
    by_column = plgpu.Layout.WGMMA.reduce(0)
    parts = [plgpu.load(pages.at[page, row], layout=by_column) for page in range(num_pages)]  # pyright: ignore[reportCallIssue]
    place = first + plgpu.broadcasted_iota(jnp.int32, (num_pages * page_size,), 0, layout=by_column)
    return jnp.where(is_live(place), jnp.concatenate(parts), 0.0)


class PageScalesLayout(InterleavedLayout):
    """The layout of 8-bit pages, see the module docstring. Other pages have `InterleavedLayout`."""

    def scale_shape(
        self, num_pages: int, page_size: int, num_kv_heads: int, *, latent: bool = False
    ) -> tuple[int, ...]:
        return num_pages, 1, num_kv_heads if latent else 2 * num_kv_heads, page_size

    def write(self, cache: Pages, k: jax.Array, v: jax.Array, slot_mapping: jax.Array) -> Pages:
        """Write k and v [T, KH, D] at slot_mapping int32 [T], see `Backend.write`."""
        if not isinstance(cache, ScaledPages):
            return super().write(cache, k, v, slot_mapping)
        tokens, kv_heads, head_dim = k.shape
        once = cache.shape[2] == kv_heads
        rows = k if once else jnp.stack([k, v], axis=2).reshape(tokens, 2 * kv_heads, head_dim)
        new = ScaledPages.of(rows, cache.dtype)
        page, offset = split_slots(slot_mapping, cache.shape[0], cache.shape[1])
        values = cache.values.at[page, offset].set(new.values, mode="drop", unique_indices=True)
        scales = cache.scales.at[page, 0, :, offset].set(new.scales[..., 0], mode="drop", unique_indices=True)
        return ScaledPages(values, scales)

    def export_pages(self, cache: Pages, page_ids: jax.Array, num_kv_heads: int) -> Pages:
        """Return pages page_ids int32 [n] -> [n, page_size, 2 * KH, D], see `Backend.export_pages`."""
        return _turned(super().export_pages(cache, page_ids, num_kv_heads))

    def import_pages(self, cache: Pages, page_ids: jax.Array, pages: Pages) -> Pages:
        """Write pages [n, page_size, 2 * KH, D] at page_ids int32 [n], see `Backend.import_pages`."""
        return super().import_pages(cache, page_ids, _turned(pages))


def _turned(pages: Pages) -> Pages:
    """Exchange the axes 1 and 3 of scales: [n, 1, 2 * KH, page_size] and [n, page_size, 2 * KH, 1]."""
    return ScaledPages(pages.values, pages.scales.swapaxes(1, 3)) if isinstance(pages, ScaledPages) else pages


ROWS = 64  # rows of a wgmma
HEAD_ALIGN = 8  # rows of q in shared memory are padded to a multiple of this
SHARED_BYTES = 232_448 - 4096  # of a program on Hopper; barriers and alignment take up to 3 KB
SWIZZLE = 128  # bytes: 64 columns of 16 bits, so head_dim is a multiple of 64


@dataclass(frozen=True)
class MosaicTuning:
    """Tokens per tile, tiles in flight, and tokens per split. programs: the number that should fill the GPU"""

    tile: int = 64
    stages: int = 4
    split_tokens: int = 128
    programs: int = PROGRAMS

    def shared_bytes(self, head_dim: int) -> int:
        """Return the bytes of a program's shared memory: K and V in flight, queries, output, weights and sums.

        From two stages on, 8-bit pages need no more, except for their scales: half the bytes in flight, and one tile.
        """
        rows = 2 * self.stages * self.tile + 2 * ROWS
        scales = self.stages * self.tile // HEAD_ALIGN * COPY_ALIGN
        return 2 * (rows * head_dim + ROWS * self.tile) + 4 * ROWS + scales


@dataclass(frozen=True)
class MosaicGpuBackend(PageScalesLayout):
    """See the module docstring. interpret: run the kernel in its interpreter, which needs jax 0.11."""

    name: str = "mosaic_gpu"
    tuning: MosaicTuning = MosaicTuning()
    interpret: bool = False

    def cache_shape(
        self, num_pages: int, page_size: int, num_kv_heads: int, head_dim: int, *, latent: bool = False
    ) -> tuple[int, ...]:
        """Return the shape. Raises ConfigError for sizes that the tensor memory accelerator cannot copy."""
        _require(head_dim % (SWIZZLE // 2) == 0, f"a head_dim that is a multiple of 64, not {head_dim}")
        _require(
            page_size % HEAD_ALIGN == 0 and self.tuning.tile % page_size == 0,
            f"a page_size of 8, 16, 32 or 64, not {page_size}",
        )
        needed = self.tuning.shared_bytes(head_dim)
        _require(needed <= SHARED_BYTES, f"a smaller head_dim: {head_dim} takes {needed} bytes of shared memory")
        return super().cache_shape(num_pages, page_size, num_kv_heads, head_dim, latent=latent)

    def scale_shape(
        self, num_pages: int, page_size: int, num_kv_heads: int, *, latent: bool = False
    ) -> tuple[int, ...]:
        """Return the shape, see `PageScalesLayout`. Raises ConfigError if jax cannot compile the kernel for them."""
        _require(CONCATENATES, "jax 0.11 or newer, and Python 3.12, for pages of 8 bits")
        return super().scale_shape(num_pages, page_size, num_kv_heads, latent=latent)

    def attend(
        self,
        q: jax.Array,
        cache: Pages,
        metadata: AttentionMetadata,
        spec: AttentionSpec,
        sinks: jax.Array | None = None,
    ) -> jax.Array:
        """Attend 16-bit q [T, N, D] -> [T, N, D], see `Backend.attend`. Raises ConfigError for other dtypes."""
        held = q.dtype == cache.dtype or is_scaled(cache.dtype)
        _require(held and q.dtype.itemsize == 2, f"16 bit activations and a cache of them or of 8 bits, not {q.dtype}")
        _require(spec.chunk is None, "layers without chunks")
        _require(q.shape[1] <= spec.num_kv_heads * ROWS, f"at most {ROWS} query heads a kv head")
        layer = LayerPages(cache, metadata.page_table, spec, sinks)
        decode = functools.partial(_attend_last_tokens, self, layer)
        extend = functools.partial(_attend_long_rows, self, layer)
        return attend_ragged(q, metadata, decode, extend)


def _require(held: bool, what: str) -> None:
    if not held:
        raise ConfigError(f"attention backend 'mosaic_gpu' needs {what}", fix="use runtime.attention: triton")


class _Blocks(NamedTuple):
    """Blocks of queries, int32 [B] each: the row, the position of the first token, the end of the visible context."""

    row: jax.Array
    first: jax.Array
    end: jax.Array  # 0 if unused


def _attend_last_tokens(backend: MosaicGpuBackend, layer: LayerPages, q: jax.Array, kv_lens: jax.Array) -> jax.Array:
    """Attend q [R, N, D], the token at kv_len - 1 of each row -> [R, N, D]. Zeros if kv_len is 0."""
    rows = q.shape[0]
    tuning, longest = backend.tuning, layer.page_table.shape[1] * layer.cache.shape[1]
    splits = num_splits(tuning.programs, rows * layer.spec.num_kv_heads, longest, tuning.split_tokens)
    blocks = _Blocks(jnp.arange(rows, dtype=jnp.int32), kv_lens - 1, kv_lens)
    return _attend_blocks(backend, layer, q[:, None], blocks, splits)[:, 0]


def _attend_long_rows(backend: MosaicGpuBackend, layer: LayerPages, q: jax.Array, rows: Rows) -> jax.Array:
    """Attend the rows of two or more tokens: q [T, N, D] -> [T, N, D]. Zeros for all other rows."""
    num_tokens, heads, _ = q.shape
    size = ROWS // (heads // layer.spec.num_kv_heads)
    work = query_blocks(rows, num_tokens, size, min_tokens=2)
    index = work.first[:, None] + jnp.arange(size, dtype=jnp.int32)[None]  # [B, size]: index of a token in its row
    token = rows.start[work.row][:, None] + index
    first = rows.kv_len[work.row] - rows.q_len[work.row] + work.first
    end = jnp.where(work.live, jnp.minimum(first + size, rows.kv_len[work.row]), 0)
    out = _attend_blocks(backend, layer, q.at[token].get(mode="clip"), _Blocks(work.row, first, end), splits=1)
    mine = work.live[:, None] & (index < rows.q_len[work.row][:, None])
    return jnp.zeros_like(q).at[jnp.where(mine, token, num_tokens)].set(out, mode="drop")


def _attend_blocks(
    backend: MosaicGpuBackend, layer: LayerPages, q: jax.Array, blocks: _Blocks, splits: int
) -> jax.Array:
    """Attend blocks q [B, tokens of a block, N, D] -> the same shape. Zeros for unused blocks."""
    num_blocks, size, heads, head_dim = q.shape
    kv_heads, page_size = layer.spec.num_kv_heads, layer.cache.shape[1]
    group = heads // kv_heads
    padded = pl.cdiv(size * group, HEAD_ALIGN) * HEAD_ALIGN
    grouped = q.reshape(num_blocks, size, kv_heads, group, head_dim).swapaxes(1, 2)
    grouped = grouped.reshape(num_blocks, kv_heads, size * group, head_dim)
    grouped = jnp.pad(grouped, ((0, 0), (0, 0), (0, padded - size * group), (0, 0)))
    tile, stages, dtype = backend.tuning.tile, backend.tuning.stages, q.dtype
    tiled, page_copies = _tiled(head_dim, dtype), tile // page_size
    stored, scaled = layer.cache.dtype, isinstance(layer.cache, ScaledPages)
    in_flight = plgpu.SMEM((stages, tile, head_dim), stored, transforms=_tiled(head_dim, stored))
    wide = plgpu.SMEM((tile, head_dim), dtype, transforms=tiled)
    scales = scales_in_flight(stages, page_copies, layer.cache.shape[2] // kv_heads, page_size)
    body = functools.partial(_kernel, spec=layer.spec, splits=splits, group=group if size > 1 else ROWS)
    kernel = plgpu.kernel(
        body if scaled else lambda q, kv, *refs, **scratch: body(q, kv, None, *refs, **scratch),
        out_type=[
            jax.ShapeDtypeStruct((num_blocks, splits, kv_heads, padded, head_dim), dtype),
            jax.ShapeDtypeStruct((num_blocks, splits, kv_heads, ROWS), jnp.float32),
        ],
        scratch_types={
            "q_smem": plgpu.SMEM((ROWS, head_dim), dtype, transforms=tiled),
            "k_smem": in_flight,
            "v_smem": in_flight,
            "weights_smem": plgpu.SMEM((ROWS, tile), dtype, transforms=tiled),
            "out_smem": plgpu.SMEM((ROWS, head_dim), dtype, transforms=tiled),
            "lse_smem": plgpu.SMEM((ROWS,), jnp.float32),
            "q_ready": plgpu.Barrier(),
            "k_ready": plgpu.Barrier(num_arrivals=page_copies * (2 if scaled else 1), num_barriers=stages),
            "v_ready": plgpu.Barrier(num_arrivals=page_copies, num_barriers=stages),
            "k_free": plgpu.Barrier(num_barriers=stages),
            "v_free": plgpu.Barrier(num_barriers=stages),
        }
        | ({"wide_smem": wide, "scales_smem": scales} if scaled else {}),
        grid=(num_blocks, kv_heads, splits),
        grid_names=("block", "head", "split"),
        num_threads=2,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        # InterpretGPUParams exists since jax 0.11.
        interpret=plgpu.InterpretGPUParams() if backend.interpret else False,  # pyright: ignore[reportAttributeAccessIssue]
    )
    out, lse = kernel(grouped, *jax.tree.leaves(layer.cache), layer.page_table, *blocks)

    def by_token(rows: jax.Array) -> jax.Array:
        """Reorder [B, S, KH, rows of a block, ...] to [B * tokens of a block, S, N, ...]."""
        rows = rows[:, :, :, : size * group]
        rows = rows.reshape(num_blocks, splits, kv_heads, size, group, *rows.shape[4:])
        return jnp.moveaxis(rows, 3, 1).reshape(num_blocks * size, splits, heads, *rows.shape[5:])

    return join_splits(by_token(out), by_token(lse), layer.sinks).astype(dtype).reshape(q.shape)


def _tiled(columns: int, dtype: jnp.dtype) -> tuple[Any, ...]:
    """Return the layout in shared memory of rows of `columns` elements: swizzled by as many bytes as divide a row."""
    swizzle = SWIZZLE if columns * dtype.itemsize % SWIZZLE == 0 else SWIZZLE // 2
    return plgpu.TilingTransform((8, swizzle // dtype.itemsize)), plgpu.SwizzleTransform(swizzle)


def _kernel(  # noqa: C901  three warpgroups of one kernel
    q_ref,  # [B, KH, M, D], M = tokens of a block * G, rounded up to a multiple of HEAD_ALIGN
    kv_ref,  # [P, page_size, 2 * KH, D], or [P, page_size, KH, D] if V is K
    scales_ref,  # float32, see PageScalesLayout; None: the pages have no scales
    table_ref,  # int32 [R, max_pages]
    row_ref,  # int32 [B], as the next two: see _Blocks
    first_ref,
    end_ref,
    out_ref,  # [B, S, KH, M, D]
    lse_ref,  # float32 [B, S, KH, 64]
    *,
    q_smem,
    k_smem,
    v_smem,
    weights_smem,
    out_smem,
    lse_smem,
    q_ready,
    k_ready,
    v_ready,
    k_free,
    v_free,
    wide_smem: Any = None,  # [tile, D] in q's dtype, and the scales of the tiles in flight: if the pages have 8 bits
    scales_smem: Any = None,
    spec: AttentionSpec,
    splits: int,
    group: int,  # rows per token
) -> None:
    block, head, split = (lax.axis_index(name) for name in ("block", "head", "split"))
    stages, tile, head_dim = k_smem.shape
    heads, page_size = q_ref.shape[2], kv_ref.shape[1]
    # Rows per kv head: 2, or 1 if V is K. A single row is copied to both buffers, because V's is cleared below.
    kept = kv_ref.shape[2] // q_ref.shape[1]
    row, position, end = row_ref[block], first_ref[block], end_ref[block]
    oldest = 0 if spec.sliding_window is None else jnp.maximum(position + 1 - spec.sliding_window, 0)
    first, last = oldest // tile, pl.cdiv(end, tile)
    share = pl.cdiv(last - first, splits)
    begin = first + split * share
    steps = jnp.maximum(jnp.minimum(begin + share, last) - begin, 0)

    def to_multiply(tiles, slot: jax.Array) -> Any:
        """Return the tile of a stage, an int32 [], in q's dtype, in shared memory. Pages of 8 bits share one."""
        if scales_ref is None:
            return tiles.at[slot]
        widen(tiles.at[slot], wide_smem)
        return wide_smem

    def is_live(place: jax.Array) -> jax.Array:
        """Return whether a query of the block may see positions of the context, int32 [...]."""
        live = place < end
        return live if spec.sliding_window is None else live & (place >= oldest)

    def by_scales(numbers: jax.Array, step: jax.Array, row: int) -> jax.Array:
        """Multiply values [64, tile] by the scales of a tile's tokens, of K (row 0) or of V."""
        if scales_ref is None:
            return numbers
        first = (begin + step) * tile
        scales = column_scales(scales_smem.at[lax.rem(step, stages)], row, first, is_live)
        return numbers * lax.broadcast_in_dim(scales, numbers.shape, [1])

    @pl.when(lax.axis_index("warpgroup") == 1)
    def _memory() -> None:
        plgpu.set_max_registers(40, action="decrease")

        def copy_tile(step: jax.Array) -> None:
            """Copy K and V of tile `begin + step`, an int32 [], to its stage."""
            slot = lax.rem(step, stages)
            for page_of_tile in range(tile // page_size):
                column = (begin + step) * (tile // page_size) + page_of_tile
                page = table_ref[row, jnp.minimum(column, (end - 1) // page_size)]
                place = pl.ds(page_of_tile * page_size, page_size)
                plgpu.copy_gmem_to_smem(kv_ref.at[page, :, kept * head], k_smem.at[slot, place], k_ready.at[slot])
                v_row = kept * head + kept - 1
                plgpu.copy_gmem_to_smem(kv_ref.at[page, :, v_row], v_smem.at[slot, place], v_ready.at[slot])
                if scales_ref is not None:
                    rows = scales_smem.at[slot, page_of_tile, pl.ds(0, kept)]
                    plgpu.copy_gmem_to_smem(scales_ref.at[page, 0, pl.ds(kept * head, kept)], rows, k_ready.at[slot])

        @pl.loop(0, jnp.minimum(steps, stages))
        def _fill(step: jax.Array) -> None:
            copy_tile(step)

        def wait_for_slot(step: jax.Array) -> None:
            """Wait until the compute warpgroup has finished with the stage of `step`, an int32 []."""
            plgpu.barrier_wait(k_free.at[lax.rem(step, stages)])
            plgpu.barrier_wait(v_free.at[lax.rem(step, stages)])

        @pl.loop(stages, steps)
        def _refill(step: jax.Array) -> None:
            wait_for_slot(step)
            copy_tile(step)

        @pl.loop(jnp.maximum(steps - stages, 0), steps)
        def _drain(step: jax.Array) -> None:  # every arrival must be waited for before the barriers are freed
            wait_for_slot(step)

    @pl.when(lax.axis_index("warpgroup") == 0)
    def _compute() -> None:
        plgpu.set_max_registers(232, action="increase")
        plgpu.copy_gmem_to_smem(q_ref.at[block, head], q_smem.at[pl.ds(0, heads)], q_ready)
        plgpu.barrier_wait(q_ready)

        def add_tile(step: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            """Add tile `begin + step`, an int32 [], to the softmax (values [64, D], maximum [64], denominator [64])."""
            values, top, total = state
            slot = lax.rem(step, stages)
            plgpu.barrier_wait(k_ready.at[slot])
            keys = to_multiply(k_smem, slot).transpose((1, 0))
            scores = by_scales(_wgmma((ROWS, tile), q_smem, keys) * spec.scale, step, 0)
            plgpu.barrier_arrive(k_free.at[slot])
            if spec.soft_cap is not None:
                scores = jnp.tanh(scores / spec.soft_cap) * spec.soft_cap
            token = _places((begin + step) * tile, (ROWS, tile), 1)
            query = position + lax.div(_places(0, (ROWS, tile), 0), jnp.int32(group))
            seen = (token <= query) & (token < end)
            if spec.sliding_window is not None:
                seen &= token > query - spec.sliding_window
            scores = jnp.where(seen, scores * LOG2E, MASKED)
            new_top = jnp.maximum(top, scores.max(axis=1))
            fade = jnp.exp2(top - new_top)
            weights = jnp.exp2(scores - lax.broadcast_in_dim(new_top, scores.shape, [0]))
            total = total * fade + weights.sum(axis=1)
            # through shared memory, because the interpreter's wgmma reads no registers
            weights_smem[...] = by_scales(weights, step, kept - 1).astype(weights_smem.dtype)
            plgpu.barrier_wait(v_ready.at[slot])
            v = to_multiply(v_smem, slot)

            partial = (begin + step + 1) * tile > end
            if spec.sliding_window is not None:
                partial |= (begin + step) * tile < oldest

            @pl.when(partial)
            def _clear() -> None:  # 0 * NaN is NaN: the page may hold another request's NaN
                numbers = v[...]
                live = is_live(_places((begin + step) * tile, numbers.shape, 0))
                v[...] = jnp.where(live, numbers, jnp.zeros_like(numbers))

            plgpu.commit_smem()
            added = _wgmma((ROWS, head_dim), weights_smem, v)
            plgpu.barrier_arrive(v_free.at[slot])
            values = values * lax.broadcast_in_dim(fade, values.shape, [0]) + added
            return values, new_top, total

        one_a_row = plgpu.Layout.WGMMA.reduce(1)
        nothing = (
            plgpu.layout_cast(jnp.zeros((ROWS, head_dim), jnp.float32), plgpu.Layout.WGMMA),
            plgpu.layout_cast(jnp.full((ROWS,), MASKED, jnp.float32), one_a_row),
            plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), one_a_row),
        )
        values, top, total = lax.fori_loop(0, steps, add_tile, nothing)
        total = jnp.maximum(total, 1e-30)
        out_smem[...] = (values / lax.broadcast_in_dim(total, values.shape, [0])).astype(out_smem.dtype)
        lse_smem[...] = top + jnp.log(total) * LOG2E
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_smem.at[pl.ds(0, heads)], out_ref.at[block, split, head])
        plgpu.copy_smem_to_gmem(lse_smem, lse_ref.at[block, split, head])
        plgpu.wait_smem_to_gmem(0)


def _wgmma(shape: tuple[int, int], a, b) -> jax.Array:
    """Multiply two operands in shared memory, wait, and return the product in registers."""

    def multiply(accumulator) -> jax.Array:
        plgpu.wgmma(accumulator, a, b)
        return accumulator[...]

    return pl.run_scoped(multiply, plgpu.ACC(shape, jnp.float32))  # pyright: ignore[reportPrivateImportUsage]


def _places(start: jax.Array | int, shape: tuple[int, int], axis: int) -> jax.Array:
    """Return int32 [*shape] of start, start + 1, ... along an axis."""
    return start + plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA)
