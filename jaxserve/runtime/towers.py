"""The tower of a model on the device: its programs, and the pool of rows that prompt chunks read.

A picture is encoded in several dispatches, so that the steps of the language model run between them:

    encode_start[P]    patches uint8 [P, W] -> x [P, D]: normalized and projected, positions added
    encode_attend[P]   the first half of a block on x. All blocks are equal, so one program runs them all, each with its
                       own weights
    encode_project[P]  of large pictures, in place of the first half: queries, keys and values [P, N, H]
    encode_queries[P]  then, several times: the attention of some of the patches, a part of the first half
    encode_mlp[P]      the second half
    encode_deep[P]     rows of the states after a deepstack block -> pool
    encode_end[P]      rows of the states after the last block -> pool

Blocks are halved because on a CPU a block of 1024 patches takes half a second. Attention is in parts from 4096 patches
on, because with 16,384 it takes an H200 as long as four steps of the language model.

Pictures that are wanted at once share a program, the smallest that the first one fits; each patch sees its own picture
only. With `runtime.deterministic` a program has one picture, since sums of other lengths are rounded in another order.
The scheduler says which pictures and pieces run in a step, and which rows of the pool they have, see
scheduler/pictures.py.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from flax import nnx

from jaxserve.models.checkpoint.structure import ModelStructure
from jaxserve.models.vision.config import PatchLayout, PieceKind, TowerPiece, VisionConfig, patch_layout
from jaxserve.models.vision.tower import QueriesKeysValues, embedded, segments_row
from jaxserve.types.picture import Picture
from jaxserve.types.scheduling import TowerLimits
from jaxserve.types.step import EncodePart, SampledTokens, StepHandle

PATCHES = (256, 1024, 4096, 16384)  # of the programs
CPU_TOKENS, MAX_TOKENS = 256, 4096  # tokens of the largest picture, on a CPU and elsewhere
MOST_SECONDS = 0.3  # of the pieces of a step
MOST_SCORES = 2**23  # of a head in a piece. With 16 heads they move 2 GB through memory: 0.5 ms on an H200

MakeProgram = Callable[[str, Callable[..., Any], tuple[Any, ...], tuple[int, ...], Any], Any]
Leaves = tuple[jax.Array, ...]


def tower_limits(
    config: VisionConfig, platform: str, max_num_batched_tokens: int, *, deterministic: bool = False
) -> TowerLimits:
    """Return how pictures are encoded on a platform. deterministic: each picture has a program of its own"""
    most = CPU_TOKENS if platform == "cpu" else MAX_TOKENS
    largest = most * config.merge**2
    sizes = (*(size for size in PATCHES if size < largest), largest)
    return TowerLimits(
        num_rows=max(max_num_batched_tokens, most),
        merge=config.merge,
        pieces={size: tuple(piece.kind for piece in config.pieces(num_parts(size))) for size in sizes},
        packs=not deterministic,
    )


def num_parts(size: int) -> int:
    """Return the parts of the first half of a block of `size` patches: a power of 2, 1 if it is not cut."""
    parts = 1
    while size * size > parts * MOST_SCORES and size % (2 * parts) == 0:
        parts *= 2
    return parts


@dataclass(frozen=True)
class TowerModule:
    """A module of the tower, whose weights are arguments of a program.

    indices: of its weights among the model's leaves
    """

    graphdef: nnx.GraphDef
    treedef: Any
    indices: tuple[int, ...]

    @classmethod
    def of(cls, structure: ModelStructure, path: Sequence[str | int]) -> TowerModule:
        """Find the module of the model at `path`, which begins with `visual`."""
        shapes = tuple(jax.ShapeDtypeStruct(spec.shape, spec.dtype) for spec in structure.specs)
        module: Any = structure.bind(shapes)  # pyright: ignore[reportArgumentType]  structs in place of arrays
        for step in path:
            module = module[step] if isinstance(step, int) else getattr(module, step)
        graphdef, state = nnx.split(module)
        places = {spec.name: index for index, spec in enumerate(structure.specs)}
        names = [".".join(map(str, (*path, *name))) for name, _ in nnx.to_flat_state(state)]
        return cls(graphdef, jax.tree.structure(state), tuple(places[name] for name in names))

    def bind(self, leaves: Leaves) -> Any:
        """Make the module with these weights, an array [shape] for each of `indices`."""
        return nnx.merge(self.graphdef, jax.tree.unflatten(self.treedef, leaves))

    def chosen(self, leaves: Sequence[Any]) -> tuple[Any, ...]:
        """Return the module's weights among the model's leaves, arrays or structs [shape]."""
        return tuple(leaves[index] for index in self.indices)


class TowerPrograms:
    """The programs of a tower: the functions, and their arguments for the compiler.

    pieces: those that pictures run through, by the patches of their programs. pool_shape: [parts, E, D] of the pool of
    rows
    """

    def __init__(self, structure: ModelStructure, limits: TowerLimits) -> None:
        config = structure.config.vision
        assert config is not None
        self.config, self.limits = config, limits
        self.pieces = {size: config.pieces(num_parts(size)) for size in limits.sizes}
        self.dtype = structure.activation_dtype
        self.pool_shape = config.row_parts, limits.num_rows, config.out_size
        self.start = TowerModule.of(structure, ("visual", "patch_embed"))
        self.table = TowerModule.of(structure, ("visual", "pos_embed")) if config.table else None
        self.blocks = [TowerModule.of(structure, ("visual", "blocks", index)) for index in range(config.depth)]
        late = range(len(config.deepstack))
        self.deep = [TowerModule.of(structure, ("visual", "deepstack_merger_list", index)) for index in late]
        self.end = TowerModule.of(structure, ("visual", "merger"))

    @property
    def num_bytes(self) -> int:
        """Bytes of the pool, and of the states that the largest pictures have between two pieces."""
        size = self.limits.sizes[-1]
        states = size * self.config.hidden_size * (1 if num_parts(size) == 1 else 4)
        return (math.prod(self.pool_shape) + states) * self.dtype.itemsize

    def leaves_of_start(self, leaves: Sequence[Any]) -> tuple[Any, ...]:
        """Return the arguments of `encode_start`: weights of the projection, and of the table of positions."""
        return self.start.chosen(leaves), () if self.table is None else self.table.chosen(leaves)

    def run_start(
        self, start: Leaves, table: Leaves, patches: jax.Array, places: jax.Array, weights: jax.Array
    ) -> jax.Array:
        """Run `embedded`: patches uint8 [P, W] and their layout -> x [P, D]."""
        positions = None if self.table is None else self.table.bind(table)
        return embedded(self.config, self.start.bind(start), positions, patches, places, weights, self.dtype)

    def run_attend(
        self, leaves: Leaves, x: jax.Array, places: jax.Array, segments: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Run the first half of a block: x [P, D] -> (x [P, D], an int32 scalar to wait for)."""
        return _with_mark(self.blocks[0].bind(leaves).attend(x, places, segments))

    def run_project(self, leaves: Leaves, x: jax.Array, places: jax.Array) -> tuple[QueriesKeysValues, jax.Array]:
        """Run `TowerBlock.project`: x [P, D] -> (three arrays [P, N, H], an int32 scalar to wait for)."""
        q, k, v = self.blocks[0].bind(leaves).project(x, places)
        return (q, k, v), _mark(q)

    def run_queries(
        self, leaves: Leaves, x: jax.Array, projected: QueriesKeysValues, segments: jax.Array, part: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Run a part of the first half of a block: x [P, D] -> (x [P, D], an int32 scalar to wait for).

        part: int32 scalar, from 0 on
        """
        count = x.shape[0] // num_parts(x.shape[0])
        return _with_mark(self.blocks[0].bind(leaves).attend_part(x, projected, segments, part * count, count))

    def run_mlp(self, leaves: Leaves, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Run the second half of a block: x [P, D] -> (x [P, D], an int32 scalar to wait for)."""
        return _with_mark(self.blocks[0].bind(leaves).feed_forward(x))

    def run_deep(
        self, leaves: Leaves, pool: jax.Array, x: jax.Array, targets: jax.Array, part: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Merge the states x [P, D] after a deepstack block, and write their rows to a part of the pool.

        Returns the pool [parts, E, D] and an int32 scalar to wait for. targets: int32 [P / merge^2], the rows' places
        in the pool, E for padding. part: int32 scalar
        """
        rows, mark = _with_mark(self.deep[0].bind(leaves)(x).astype(pool.dtype))
        return pool.at[part, targets].set(rows, mode="drop"), mark

    def run_end(self, leaves: Leaves, pool: jax.Array, x: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Merge the states x [P, D] after the last block, and write their rows to part 0 of the pool."""
        rows, mark = _with_mark(self.end.bind(leaves)(x).astype(pool.dtype))
        return pool.at[0, targets].set(rows, mode="drop"), mark

    def programs(self, leaves: Sequence[Any], pool: Any, replicated: Any, make: MakeProgram) -> Iterator[Any]:
        """Yield `make(name, function, args, donated args, out shardings)` of each program. leaves, pool: structs"""

        def struct(dtype: jax.typing.DTypeLike, *shape: int) -> jax.ShapeDtypeStruct:
            """Return the struct of a replicated array."""
            return jax.ShapeDtypeStruct(shape, dtype, sharding=replicated)

        ints = functools.partial(struct, jnp.int32)
        for size in self.limits.sizes:
            x, targets = struct(self.dtype, size, self.config.hidden_size), ints(size // self.limits.merge**2)
            patches, weights = struct(jnp.uint8, size, self.config.width), struct(jnp.float32, size, 4)
            places = ints(size, 6)
            args: tuple[Any, ...] = (*self.leaves_of_start(leaves), patches, places, weights)
            yield make(f"encode_start[{size}]", self.run_start, args, (), replicated)
            both, weights = (replicated, replicated), self.blocks[0].chosen(leaves)
            if num_parts(size) == 1:
                yield make(f"encode_attend[{size}]", self.run_attend, (weights, x, places, ints(size)), (1,), both)
            else:
                head = struct(self.dtype, size, self.config.num_heads, self.config.head_dim)
                yield make(f"encode_project[{size}]", self.run_project, (weights, x, places), (), both)
                args = (weights, x, (head,) * 3, ints(size), ints())
                yield make(f"encode_queries[{size}]", self.run_queries, args, (1,), both)
            yield make(f"encode_mlp[{size}]", self.run_mlp, (weights, x), (1,), both)
            if self.deep:
                args = (self.deep[0].chosen(leaves), pool, x, targets, ints())
                yield make(f"encode_deep[{size}]", self.run_deep, args, (1,), both)
            args = (self.end.chosen(leaves), pool, x, targets)
            yield make(f"encode_end[{size}]", self.run_end, args, (1,), both)


def _with_mark(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return x [P, D], and an int32 scalar that is ready when x is: x itself may be donated before it is waited for."""
    return x, _mark(x)


def _mark(x: jax.Array) -> jax.Array:
    """Return an int32 scalar that is ready when x is."""
    return jnp.isfinite(x[(0,) * x.ndim]).astype(jnp.int32)


@dataclass(frozen=True)
class _InProgress:
    """Pictures that are being encoded.

    size: patches of their programs. x: their states [P, D] after the pieces that ran. layout: on the host
    projected: of the block whose first half has begun; None: no first half has
    """

    size: int
    x: jax.Array
    layout: PatchLayout
    projected: QueriesKeysValues | None = None


class TowerRunner:
    """Runs the tower. pool: the rows [parts, E, D], which the programs donate. num_dispatches: programs started"""

    def __init__(
        self, programs: TowerPrograms, compiled: Mapping[str, jax.stages.Compiled], allocate: Callable[[], jax.Array]
    ) -> None:
        self.limits = programs.limits
        self._programs = programs
        self._compiled = compiled
        self._allocate = allocate
        self._pictures: _InProgress | None = None
        self.num_dispatches = 0
        self.pool = allocate()

    def rebuild(self) -> None:
        """Replace the pool by an empty one."""
        self.release()
        self.pool = self._allocate()

    def release(self) -> None:
        """Free the arrays. `rebuild` makes them again."""
        self.pool.delete()
        self._pictures = None

    def warm_up(self, leaves: Leaves, step_seconds: float) -> None:
        """Run each program on a picture of each size, and measure the pieces for `limits`.

        step_seconds: of a step of decode rows; 0: it was not measured. The pieces of a step take at most as long. So a
        token of a running stream beside a picture takes as long as two steps, or as a step and one piece
        """
        merge, config = self.limits.merge, self._programs.config
        seconds: dict[tuple[str, int], float] = {}
        for size in self.limits.sizes:
            grid = 1, merge, size // merge
            picture = Picture(bytes(32), bytes(size * config.width), grid, 0, size // merge**2)
            state = self._start(leaves, (picture,))
            state.x.block_until_ready()
            kinds: dict[PieceKind, None] = {piece.kind: None for piece in self._programs.pieces[size]}
            for kind in kinds:
                taken = []
                for _ in range(2):  # the first run takes longer
                    began = time.perf_counter()
                    state, done = self._run_piece(leaves, TowerPiece(kind, 0), state, self._targets([], size))
                    done.block_until_ready()
                    taken.append(time.perf_counter() - began)
                seconds[kind, size] = min(taken)
        allowed = min(MOST_SECONDS, step_seconds)
        self.limits = dataclasses.replace(self.limits, seconds=seconds, step_seconds=allowed)

    def run(self, leaves: Leaves, part: EncodePart) -> jax.Array:
        """Dispatch pieces of the tower. Returns a scalar to wait for.

        leaves: the model's weights, one array [shape] per parameter
        """
        state = self._start(leaves, part.pictures) if part.first == 0 else self._pictures
        assert state is not None, "pictures go on that were not started"
        self._pictures = None  # their states are donated
        targets = self._targets(part.rows, state.size)
        pieces = self._programs.pieces[state.size]
        done: jax.Array | None = None
        for piece in pieces[part.first : part.last]:
            state, done = self._run_piece(leaves, piece, state, targets)
        if part.last < len(pieces):
            self._pictures = state
        assert done is not None, "no pieces"
        return done

    def _run_piece(
        self, leaves: Leaves, piece: TowerPiece, state: _InProgress, targets: np.ndarray
    ) -> tuple[_InProgress, jax.Array]:
        """Dispatch a piece. Returns the states behind it, and a scalar to wait for."""
        programs, layout, x, projected = self._programs, state.layout, state.x, state.projected
        kind, number, part = piece
        call = functools.partial(self._call, kind, state.size)
        match kind:
            case "attend":
                segments = layout.segments[segments_row(programs.config, number)]
                x, done = call(programs.blocks[number].chosen(leaves), x, layout.places, segments)
            case "project":
                projected, done = call(programs.blocks[number].chosen(leaves), x, layout.places)
            case "queries":
                segments = layout.segments[segments_row(programs.config, number)]
                x, done = call(programs.blocks[number].chosen(leaves), x, projected, segments, np.int32(part))
            case "mlp":
                projected = None
                x, done = call(programs.blocks[number].chosen(leaves), x)
            case "deep":
                weights = programs.deep[number].chosen(leaves)
                self.pool, done = call(weights, self.pool, x, targets, np.int32(1 + number))
            case "end":
                self.pool, done = call(programs.end.chosen(leaves), self.pool, x, targets)
        return dataclasses.replace(state, x=x, projected=projected), done

    def _start(self, leaves: Leaves, pictures: Sequence[Picture]) -> _InProgress:
        programs = self._programs
        size = self.limits.size_of(sum(picture.num_patches for picture in pictures))
        patches = np.zeros((size, programs.config.width), np.uint8)
        given = np.frombuffer(b"".join(picture.patches for picture in pictures), np.uint8)
        patches.reshape(-1)[: len(given)] = given
        layout = patch_layout(programs.config, [picture.grid for picture in pictures], size)
        args = (*programs.leaves_of_start(leaves), patches, layout.places, layout.weights)
        return _InProgress(size, self._call("start", size, *args), layout)

    def _targets(self, rows: Sequence[int], size: int) -> np.ndarray:
        targets = np.full(size // self.limits.merge**2, self.limits.num_rows, np.int32)
        targets[: len(rows)] = rows
        return targets

    def _call(self, piece: str, size: int, *args: Any) -> Any:
        self.num_dispatches += 1
        return self._compiled[f"encode_{piece}[{size}]"](*args)


class EncodingStep:
    """The `StepHandle` of a step that encodes too. It is read when the pieces of the tower have run.

    So no more than a step's pieces are ever in the device's queue before a new request.
    """

    def __init__(self, step: StepHandle, done: jax.Array) -> None:
        self._step = step
        self._done = done

    def sample(self, bitmask: np.ndarray, late: Sequence[int] = ()) -> None:
        """Sample the step, see `StepHandle`. bitmask: int32 [positions, words]"""
        self._step.sample(bitmask, late)

    def result(self) -> SampledTokens:
        """Wait for the step and for the pieces, and return the step's tokens."""
        found = self._step.result()
        began = time.perf_counter()
        self._done.block_until_ready()
        return msgspec.structs.replace(found, encode_seconds=time.perf_counter() - began)
