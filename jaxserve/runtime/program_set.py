"""The programs to compile: each step function with its shapes.

This file decides the shapes and shardings of the programs' arguments and results, the arguments that they donate, and
their compiler options.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jaxserve.runtime import step_input
from jaxserve.runtime.adapters import AdapterArrays
from jaxserve.runtime.compilation.buckets import Buckets, verify_rows
from jaxserve.runtime.compilation.compiler import Program
from jaxserve.runtime.host_pages import TRANSFER_PAGES, transfer_name
from jaxserve.runtime.kv_cache import AnyCache, LayerCache
from jaxserve.runtime.mesh import DeviceMesh
from jaxserve.runtime.programs import StepPrograms
from jaxserve.runtime.sampling import slots
from jaxserve.runtime.sampling.slots import SlotState
from jaxserve.runtime.sampling.vocab import Vocab
from jaxserve.runtime.towers import TowerPrograms
from jaxserve.types.extras import MAX_LOGPROB_IDS

WRITE_ADAPTER = "write_adapter"
POOL_GROUP = 32  # tokens per dispatch of pool
PROMPT_CHUNK = 64  # tokens per dispatch of prompt_logprobs, which needs memory for logits [C, V]


@dataclass(frozen=True)
class Shapes:
    """The shapes of all long-lived device arrays, as pytrees of ShapeDtypeStruct with shardings."""

    leaves: tuple[jax.ShapeDtypeStruct, ...]
    caches: tuple[Any, ...]  # structs of Pages
    state: SlotState
    hidden: jax.ShapeDtypeStruct  # [largest extend, D]
    replicated: NamedSharding
    pool: jax.ShapeDtypeStruct | None = None  # [parts, E, D], rows of pictures; None: the model takes none

    @classmethod
    def of(
        cls,
        leaves: tuple[jax.Array | jax.ShapeDtypeStruct, ...],
        layers: tuple[AnyCache, ...],
        mesh: DeviceMesh,
        *,
        num_pages: Sequence[int],
        state: SlotState,
        hidden: jax.ShapeDtypeStruct,
        pool: jax.ShapeDtypeStruct | None = None,
    ) -> Shapes:
        """Collect the shapes.

        leaves: the weights, one array [shape] per parameter, and the arrays of adapters. num_pages: of each layer group
        state: from `slots.state_shapes`, without shardings. hidden: the buffer of hidden states. pool: see the field
        """
        sharded = jax.tree.map(
            lambda s, cut: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=NamedSharding(mesh.mesh, cut)),
            state,
            slots.state_partition(state, Vocab.of(state.vocab_size, mesh.mesh).columns),
        )
        return cls(
            leaves=tuple(jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for x in leaves),
            caches=tuple(layer.struct(num_pages[layer.group]) for layer in layers),
            state=sharded,
            hidden=hidden,
            replicated=mesh.replicated,
            pool=pool,
        )

    @property
    def mask_words(self) -> int:
        return self.state.allow_mask.shape[1]

    @property
    def cache_shardings(self) -> tuple[Any, ...]:
        return jax.tree.map(lambda leaf: leaf.sharding, self.caches)

    @property
    def state_shardings(self) -> SlotState:
        return jax.tree.map(lambda array: array.sharding, self.state)

    def ints(self, *shape: int) -> jax.ShapeDtypeStruct:
        """Return the struct of a replicated int32 array."""
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=self.replicated)


@dataclass(frozen=True)
class ProgramSet:
    """The programs of a runner. `all()` lists those that serve requests; other methods make a single program."""

    steps: StepPrograms
    shapes: Shapes
    buckets: Buckets
    options: Mapping[str, bool | str]
    max_drafts: int = 0  # of a row
    identity: str | None = None  # see Program
    tower: TowerPrograms | None = None  # None: the model takes no pictures
    adapters: AdapterArrays | None = None

    def all(self) -> list[Program]:
        """Return every program that the runner compiles at start."""
        return [
            *map(self.decode, self.buckets.decode),
            *map(self.decode_hidden, self.buckets.decode_hidden),
            *map(self.extend, self.buckets.extend),
            *map(self.head_sample, self.buckets.head),
            *map(self.verify, self.buckets.verify),
            *map(self.draft, self.buckets.draft),
            *self.small(),
            self.allocate(),
            *self.encode(),
        ]

    def first(self) -> list[Program]:
        """Return the fewest programs that serve every step: the largest of each family, and the small ones.

        `decode` is left out, because `decode_hidden` and `head_sample` compute decode rows too, and samplers take
        longest to compile.
        """
        b = self.buckets
        hidden = [self.decode_hidden(b.decode_hidden[-1])] if b.decode_hidden else []
        steps = [*hidden, self.extend(b.extend[-1]), self.head_sample(b.head[-1])]
        return [*steps, *self.small(), self.allocate(), *self.encode()]

    def rest(self) -> list[Program]:
        """Return the programs that `first` leaves out, in the order in which a single user gains most.

        The step of 32 prompt tokens comes with the steps of one row, the step of 64 with the steps of two rows.
        """
        first = {program.name for program in self.first()}
        families = ("decode_hidden", "head_sample", "extend", "decode", "verify", "draft")

        def order(program: Program) -> tuple[float, int, int]:
            family, _, size = program.name.rstrip("]").partition("[")
            rows = max(1.0, int(size) / 32) if family == "extend" else float(size)
            return rows, families.index(family), -int(size)

        return sorted((program for program in self.all() if program.name not in first), key=order)

    def largest(self) -> list[Program]:
        """Return the programs that need the most temporary memory, one per family."""
        decode = [self.decode(self.buckets.decode[-1])] if self.buckets.decode else []
        verify = [self.verify(self.buckets.verify[-1])] if self.buckets.verify else []
        draft = [self.draft(self.buckets.draft[-1])] if self.buckets.draft else []
        encode = [program for program in self.encode() if program.name in self._largest_pieces()]
        extend, head = self.extend(self.buckets.extend[-1]), self.head_sample(self.buckets.head[-1])
        return [*decode, extend, head, *verify, *draft, *encode]

    def _largest_pieces(self) -> tuple[str, ...]:
        """Return the names of the tower's programs that need the most temporary memory."""
        if self.tower is None:
            return ()
        size = self.tower.limits.sizes[-1]
        return tuple(f"encode_{kind}[{size}]" for kind in ("attend", "project", "queries", "mlp"))

    def encode(self) -> list[Program]:
        """Return the programs of the tower, and the one that makes its pool."""
        s = self.shapes
        if self.tower is None or s.pool is None:
            return []
        pool = s.pool

        def zeros() -> jax.Array:
            return jnp.zeros(pool.shape, pool.dtype)

        return [
            *self.tower.programs(s.leaves, pool, s.replicated, self._program),
            self._program("allocate_pictures", zeros, (), (), s.replicated),
        ]

    def extend_rows(self, num_tokens: int) -> int:
        """Return the largest number of rows of a step of `num_tokens` tokens."""
        return min(num_tokens, self.shapes.state.num_slots)

    def extend_updates(self, num_tokens: int) -> int:
        """Return the page-table entries that an extend step carries: enough for its own tokens.

        The pages of a prefix hit may not fit; `set_pages` writes those first.
        """
        of_states = self.extend_rows(num_tokens) * self.steps.state_columns
        return (self.extend_rows(num_tokens) + num_tokens // self.steps.page_size) * self.steps.num_groups + of_states

    def packed_size(self, family: str, size: int) -> int:
        """Return the length of the packed input of a program of a step."""
        groups, flag = self.steps.num_groups, int(self.steps.guesses is not None)
        match family:
            case "decode":
                return step_input.decode_size(size, groups) + flag
            case "decode_hidden":
                return step_input.hidden_size(size, groups) + flag
            case "head_sample":
                return step_input.head_size(size)
            case "verify":
                return step_input.verify_size(size, verify_rows(size))
            case "draft":
                return step_input.draft_size(size)
            case _:
                return step_input.extend_size(size, self.extend_rows(size), self.extend_updates(size)) + flag

    def zeros(self, family: str, size: int, longest: int) -> np.ndarray:
        """Return the packed input of a first run. longest: most tokens of a sequence

        The draft model rests in `decode`, the step with which drafts compete, and in no other.
        """
        packed = np.zeros(self.packed_size(family, size), np.int32)
        if family == "extend":  # tokens of one row: without them no attention runs; the other rows are absent
            rows = self.extend_rows(size)
            packed[1:rows] = self.shapes.state.num_slots
            packed[2 * rows] = min(size, longest)
        if family == "draft":
            packed[size:] = longest
        if family == "decode" and self.steps.guesses is not None:
            packed[-1] = 1
        return packed

    def padding(self, family: str, size: int) -> np.ndarray:
        """Return the packed input of a step without rows, which changes neither slots nor pages."""
        packed = self._padding(family, size)
        if self.steps.guesses is None or family in ("head_sample", "draft"):
            return packed
        return step_input.pack_rests(packed, family == "decode")

    def _padding(self, family: str, size: int) -> np.ndarray:
        groups, num_slots, none = self.steps.num_groups, self.shapes.state.num_slots, step_input.PageUpdates([], [], [])
        match family:
            case "decode":
                return step_input.pack_decode([], none, size, num_slots, False, groups)
            case "decode_hidden":
                decode = step_input.pack_decode([], none, size, num_slots, False, groups)
                return np.concatenate([decode, np.zeros(2 * size, np.int32)])  # offsets and literals
            case "head_sample":
                return step_input.pack_head([], [], size, num_slots)
            case "draft":
                return step_input.pack_draft([], [], size, num_slots)
            case _:
                assert family == "extend", family
                rows, updates = self.extend_rows(size), self.extend_updates(size)
                return step_input.pack_extend([], none, size, rows, updates, num_slots)

    def decode(self, rows: int) -> Program:
        s = self.shapes
        args = (s.leaves, s.caches, s.state, s.ints(self.packed_size("decode", rows)))
        out = (s.cache_shardings, s.state_shardings, s.replicated)
        return self._program(f"decode[{rows}]", self.steps.decode, args, (1, 2), out, weight=10_000 + rows)

    def decode_hidden(self, rows: int) -> Program:
        s = self.shapes
        args = (s.leaves, s.caches, s.state, s.hidden, s.ints(self.packed_size("decode_hidden", rows)))
        out = (s.cache_shardings, s.state_shardings, s.replicated, s.replicated)
        return self._program(
            f"decode_hidden[{rows}]", self.steps.decode_hidden, args, (1, 2, 3), out, weight=5_000 + rows
        )

    def extend(self, tokens: int) -> Program:
        s, rows = self.shapes, self.extend_rows(tokens)
        function = functools.partial(self.steps.extend, size=(tokens, rows))
        args = (s.leaves, s.caches, s.state, s.hidden, s.ints(self.packed_size("extend", tokens)))
        if s.pool is not None:
            args = (*args, s.ints(4, tokens), s.pool)
        out = (s.cache_shardings, s.state_shardings, s.replicated, s.replicated, s.replicated)
        return self._program(f"extend[{tokens}]", function, args, (1, 2, 3), out, weight=20_000 + tokens)

    def head_sample(self, rows: int) -> Program:
        s = self.shapes
        packed, bitmask = s.ints(self.packed_size("head_sample", rows)), s.ints(rows, s.mask_words)
        args = (s.leaves, s.state, s.hidden, packed, bitmask, s.ints(rows, MAX_LOGPROB_IDS))
        out = (s.state_shardings, s.replicated)
        return self._program(f"head_sample[{rows}]", self.steps.head_sample, args, (1,), out, weight=rows)

    def verify(self, tokens: int) -> Program:
        s, rows = self.shapes, verify_rows(tokens)
        function = functools.partial(self.steps.verify, size=(tokens, rows, self.max_drafts))
        args = (s.leaves, s.state, s.hidden, s.ints(self.packed_size("verify", tokens)), s.ints(tokens, s.mask_words))
        out = (s.state_shardings, s.replicated)
        return self._program(f"verify[{tokens}]", function, args, (1,), out, weight=5_000 + tokens)

    def draft(self, rows: int) -> Program:
        s = self.shapes
        args = (s.leaves, s.caches, s.state, s.ints(self.packed_size("draft", rows)))
        out = (s.cache_shardings, s.replicated)
        return self._program(f"draft[{rows}]", self.steps.draft, args, (1,), out, weight=10_000 + rows)

    def small(self) -> Iterator[Program]:
        """Yield the programs that take (state, packed) and donate the state, then (leaves, hidden, ...) and nothing."""
        s, words = self.shapes, self.shapes.mask_words
        state_programs: list[tuple[str, Callable[..., Any], tuple[int, ...]]] = [
            ("admit", slots.admit, (slots.ADMIT_GROUP, slots.ADMIT_WIDTH)),
            ("admit_masks", slots.admit_masks, (1 + 2 * words,)),
            ("admit_bias", slots.admit_bias, (1 + 2 * slots.MAX_LOGIT_BIAS,)),
            ("admit_tokens", slots.admit_tokens, (2 + slots.TOKEN_CHUNK,)),
            ("set_pages", step_input.set_pages, (3, step_input.PAGE_UPDATES)),
        ]
        if s.pool is not None:
            state_programs.append(("admit_deltas", slots.admit_deltas, (2, slots.ADMIT_GROUP)))
        for name, function, shape in state_programs:
            yield self._program(name, function, (s.state, s.ints(*shape)), (0,), s.state_shardings)
        args = (s.leaves, s.hidden, s.ints(2, PROMPT_CHUNK), s.ints(MAX_LOGPROB_IDS))
        yield self._program("prompt_logprobs", self.steps.prompt_logprobs, args, (), s.replicated)
        yield self._program("pool", self.steps.pool, (s.leaves, s.hidden, s.ints(1 + POOL_GROUP)), (), s.replicated)

    def allocate(self) -> Program:
        """Return the program that makes the empty arrays: (caches, state, hidden, masks and ids by rows).

        jnp.zeros would compile a program for each shape.
        """
        s = self.shapes
        masks = {rows: s.ints(rows, s.mask_words) for rows in (*self.buckets.head, *self.buckets.verify)}
        ids = {rows: s.ints(rows, MAX_LOGPROB_IDS) for rows in self.buckets.head}
        structs = (s.caches, s.state, s.hidden, masks, ids)

        def zeros() -> Any:
            return jax.tree.map(lambda struct: jnp.zeros(struct.shape, struct.dtype), structs)

        shardings = jax.tree.map(lambda struct: struct.sharding, structs)
        return self._program("allocate", zeros, (), (), shardings)

    def write_adapter(self) -> Iterator[Program]:
        """Yield the program that writes an adapter to a slot, if there is room for adapters. It donates the stacks."""
        if (arrays := self.adapters) is not None:
            args = (arrays.stacks, arrays.updates, self.shapes.ints())
            yield self._program(WRITE_ADAPTER, arrays.write, args, (0,), tuple(arrays.shardings))

    def exported_pages(self, count: int, group: int = 0) -> Any:
        """Return the structs of `count` exported pages: [count, ...] per array of a layer of the group."""
        s = self.shapes
        export = functools.partial(self.steps.export_pages, group=group)
        pages = jax.eval_shape(export, s.caches, s.ints(count))
        return jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=s.replicated), pages)

    def transfers(self) -> Iterator[Program]:
        """Yield the programs that export and import pages: of each layer group, since a page id is of one group."""
        s, steps = self.shapes, self.steps
        layers = (layer for layer in steps.layers if isinstance(layer, LayerCache))
        for group in sorted({layer.group for layer in layers if layer.reads is None}):
            export = functools.partial(steps.export_pages, group=group)
            fill = functools.partial(steps.import_pages, group=group)
            for size in TRANSFER_PAGES:
                args = (s.caches, s.ints(size))
                yield self._program(transfer_name("export", size, group), export, args, (), s.replicated)
                args = (*args, self.exported_pages(size, group))
                yield self._program(transfer_name("import", size, group), fill, args, (0,), s.cache_shardings)

    def _program(
        self,
        name: str,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        donate: tuple[int, ...],
        out_shardings: Any,
        weight: int = 0,
    ) -> Program:
        return Program(name, function, args, donate, out_shardings, weight, self.options, self.identity)
