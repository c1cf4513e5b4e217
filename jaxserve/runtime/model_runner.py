"""The runner: SchedulerOutput in, tokens out. Owns the weights, the KV cache, the slot state and the compiled programs.

Each step is packed into one int32 array and dispatched without waiting; the handle reads the tokens later. Which
request runs when, and which page is whose, is decided by the scheduler: a step here is a function of its
SchedulerOutput and of the device state alone.

A step of decode rows only is one dispatch, `decode[B]`. If one of them is masked or asks for a detail, it is
`decode_hidden[B]` and then `head_sample[R]`: the weights are read once, and the forward pass runs while the masks are
computed. Every other step (chunks of prompts, deterministic mode) is `extend[T]` and then `head_sample[R]` for the rows
that sample.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Collection, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.models.loading.loader import LoadedModel
from jaxserve.ops.linear import linear
from jaxserve.ops.paged_attention import Backend, get_backend
from jaxserve.runtime import kv_cache, memory, step_input
from jaxserve.runtime.compilation import program_cache
from jaxserve.runtime.compilation.buckets import Buckets, fit, make_buckets
from jaxserve.runtime.compilation.compiler import CompileCounter, Progress, compile_all, compiler_options
from jaxserve.runtime.memory import MemoryPlan
from jaxserve.runtime.mesh import DeviceMesh
from jaxserve.runtime.program_set import (
    PAGE_GROUP,
    POOL_GROUP,
    PROMPT_CHUNK,
    ProgramSet,
    Shapes,
)
from jaxserve.runtime.programs import Caches, Leaves, StepPrograms
from jaxserve.runtime.runner_config import RunnerConfig
from jaxserve.runtime.sampling import slots
from jaxserve.runtime.sampling.details import Asked, TokensOf, expert_places, hidden_places, pack_watched
from jaxserve.runtime.sampling.sampler import Sampled
from jaxserve.runtime.sampling.slots import SlotState
from jaxserve.runtime.sampling.vocab import Vocab
from jaxserve.runtime.step_handle import DeviceStep, Pooled, PromptChunk
from jaxserve.runtime.step_input import PageUpdates
from jaxserve.types.sampling import MAX_WATCHED, SamplingParams
from jaxserve.types.step import ScheduledRow, SchedulerOutput, SlotInit
from jaxserve.types.step_times import StepTimes
from jaxserve.types.window_size import WindowSize

WARM_UP_SECONDS = 5.0
FIRST_RUN_SECONDS = 1.0  # a longer run takes hardly longer for being the first


class ModelRunner:
    """The device side of one engine (`engine.request.Runner`).

    Made in one go: plan the memory, compile every program, allocate. Raises ConfigError where the model does not fit.

    config, plan, backend, buckets     as resolved; plan.num_pages and plan.max_model_len are the scheduler's limits
    steps                              the step functions, plain and not jitted: see `programs.StepPrograms`
    leaves, caches, state, hidden      the live device arrays; the programs donate the last three
    compile_seconds                    of all programs
    num_dispatches                     programs started so far
    """

    def __init__(
        self,
        loaded: LoadedModel,
        config: RunnerConfig,
        mesh: DeviceMesh,
        *,
        normalize_embeddings: bool = True,
        progress: Progress | None = None,
    ) -> None:
        started = time.perf_counter()
        if config.compile_cache is not None:
            program_cache.enable(config.compile_cache)
        self.config = config
        self.mesh = mesh
        self.leaves: Leaves = loaded.leaves
        self.structure = loaded.structure
        self.backend: Backend = get_backend(config.attention, mesh.platform)
        self.buckets: Buckets = make_buckets(
            config.max_num_seqs,
            config.max_num_batched_tokens,
            platform=mesh.platform,
            num_parameters=loaded.structure.num_parameters,
            deterministic=config.deterministic,
        )
        attention = loaded.config.attention_layers
        self._window = kv_cache.group_window(attention, config.max_model_len)
        self._layers = kv_cache.layer_caches(
            attention,
            self.backend,
            config.page_size,
            config.cache_dtype,
            mesh,
            windowed=self._window is not None,
        )
        self.steps = StepPrograms(
            bind=loaded.bind,
            backend=self.backend,
            layers=self._layers,
            page_size=config.page_size,
            linear=functools.partial(linear, deterministic=config.deterministic, native=self._native_products()),
            mesh=mesh.mesh,
            normalize_embeddings=normalize_embeddings,
            per_token=config.deterministic,
        )
        plan = self._plan()
        self._programs = self._program_set((plan.num_pages, plan.num_window_pages), plan.max_model_len)
        self.compiled = compile_all(self._programs.all(), progress=progress)
        scratch = max(map(memory.scratch_bytes, self.compiled.values())) * len(mesh.devices)
        self.plan: MemoryPlan = dataclasses.replace(plan, scratch_bytes=scratch)
        self._by_size = {
            family: {size: self.compiled[f"{family}[{size}]"] for size in sizes}
            for family, sizes in self.buckets.families().items()
        }
        self._allocate()
        self._prompts: dict[int, tuple[list[int], SamplingParams]] = {}  # by slot, where its logprobs are asked for
        self._unsampled: DeviceStep | None = None
        self.num_dispatches = 0  # programs started so far
        self.compile_seconds = time.perf_counter() - started
        self._counter = CompileCounter()

    # --- making

    def _plan(self) -> MemoryPlan:
        config, num_devices = self.config, len(self.mesh.devices)
        width = self._table_width(config.max_model_len)
        vocab_size = self.structure.config.vocab_size
        parts = Vocab.of(vocab_size, self.mesh.mesh).parts
        state = slots.state_bytes(config.max_num_seqs, vocab_size, width, parts=parts)
        hidden = self.buckets.max_tokens * self.structure.config.hidden_size * self._dtype.itemsize
        probe = config.num_pages is None and self.mesh.platform != "cpu"
        sizes = memory.Sizes(
            weight_bytes=sum(shard.data.nbytes for leaf in self.leaves for shard in leaf.addressable_shards),
            state_bytes=(state + hidden) * num_devices,
            scratch_bytes=(self._probe_scratch() if probe else self._estimate_scratch()) * num_devices,
            page_bytes=kv_cache.page_bytes(self._layers),
            page_size=config.page_size,
            max_num_seqs=config.max_num_seqs,
            window_page_bytes=kv_cache.page_bytes(self._layers, group=1),
            window=self._window_size(),
        )
        return memory.plan_memory(
            sizes,
            platform=self.mesh.platform,
            device_bytes=memory.device_memory(self.mesh.devices),
            memory_fraction=config.memory_fraction,
            num_pages=config.num_pages,
            max_model_len=config.max_model_len,
            shrink_context=config.shrink_context,
            num_window_pages=config.num_window_pages,
        )

    def _native_products(self) -> bool:
        """Whether linear layers go through the CPU's own kernels too: they are for one device."""
        return self.backend.name == "native" and len(self.mesh.devices) == 1

    def _window_size(self) -> WindowSize | None:
        if self._window is None:
            return None
        return WindowSize(self._window, self.config.page_size, self.config.max_num_batched_tokens)

    def _table_width(self, max_model_len: int) -> int:
        """Columns of a slot's row of page tables, all groups together."""
        return self.steps.num_groups * -(-max_model_len // self.config.page_size)

    def _probe_scratch(self) -> int:
        """Temporary bytes of the largest programs, compiled for a small pool: a pool's size adds nothing to them."""
        max_pages = -(-self.config.max_model_len // self.config.page_size)
        probe = compile_all(self._program_set((max_pages, max_pages), self.config.max_model_len).largest())
        return max(map(memory.scratch_bytes, probe.values()))

    def _estimate_scratch(self) -> int:
        """An upper estimate: ten float32 copies of a layer's widest activations, or of the logits."""
        model, rows = self.structure.config, self.config.max_num_seqs
        widest = 2 * model.intermediate_size + 4 * model.hidden_size + 4 * model.num_heads * model.head_dim
        return 10 * 4 * max(self.buckets.max_tokens * widest, rows * model.vocab_size)

    @property
    def _dtype(self) -> jnp.dtype:
        """Of the activations: the embedding's."""
        return jnp.dtype(self.structure.specs[0].dtype)

    def _program_set(self, num_pages: tuple[int, int], max_model_len: int) -> ProgramSet:
        config, model = self.config, self.structure.config
        shapes = Shapes.of(
            self.leaves,
            self._layers,
            self.mesh,
            num_pages=num_pages,
            num_slots=config.max_num_seqs,
            max_pages=self._table_width(max_model_len),
            vocab_size=model.vocab_size,
            hidden=(self.buckets.max_tokens, model.hidden_size),
            dtype=self._dtype,
        )
        options = compiler_options(self.mesh.platform, deterministic=config.deterministic)
        return ProgramSet(self.steps, shapes, self.buckets, options, config.page_programs)

    def _allocate(self) -> None:
        def zeros(struct: jax.ShapeDtypeStruct) -> jax.Array:
            return jnp.zeros(struct.shape, struct.dtype, device=struct.sharding)

        shapes = self._programs.shapes
        self.caches: Caches = kv_cache.allocate(self._layers, (self.plan.num_pages, self.plan.num_window_pages))
        self.state: SlotState = jax.tree.map(zeros, shapes.state)
        self.hidden: jax.Array = zeros(shapes.hidden)
        self._no_mask = {rows: zeros(shapes.ints(rows, shapes.mask_words)) for rows in self.buckets.head}
        self._no_ids = {rows: zeros(shapes.ints(rows, MAX_WATCHED)) for rows in self.buckets.head}

    def warm_up(self) -> StepTimes:
        """Run each program of a step for nothing, small ones first, and time those of prompts and decode rows.

        On a CPU the first run takes up to 0.1 s more than the next one, and some request would wait for it; so the
        second run is timed, unless the first was long. Ends after WARM_UP_SECONDS, because being ready is worth more.
        """
        began = time.perf_counter()
        seconds: dict[str, dict[int, float]] = {}
        for family, size in sorted(self._sizes(), key=lambda program: program[1]):
            taken = self._timed_run(family, size)
            if taken < FIRST_RUN_SECONDS:
                taken = min(taken, self._timed_run(family, size))
            seconds.setdefault(family, {})[size] = taken
            if time.perf_counter() - began > WARM_UP_SECONDS:
                break
        self.rebuild()
        program_cache.share()  # with the small ones that the first run of a program compiles
        return StepTimes.of(seconds.get("decode", {}), seconds.get("extend", {}))

    def _sizes(self) -> list[tuple[str, int]]:
        return [(family, size) for family, programs in self._by_size.items() for size in programs]

    def _timed_run(self, family: str, size: int) -> float:
        began = time.perf_counter()
        self._run_on_zeros(family, size)
        jax.block_until_ready((self.caches, self.state))
        return time.perf_counter() - began

    def _run_on_zeros(self, family: str, size: int) -> None:
        """Dispatch one program. What zeros mean to it does not matter: `rebuild` follows."""

        def zeros(length: int) -> np.ndarray:
            return np.zeros(length, np.int32)

        program = self._by_size[family][size]
        if family == "decode":
            packed = zeros(step_input.decode_size(size, self.steps.num_groups))
            self.caches, self.state, _ = program(self.leaves, self.caches, self.state, packed)
        elif family == "decode_hidden":
            packed = zeros(step_input.decode_size(size, self.steps.num_groups))
            arrays = program(self.leaves, self.caches, self.state, self.hidden, packed)
            self.caches, self.state, self.hidden, _ = arrays
        elif family == "head_sample":
            packed, masks, ids = zeros(step_input.head_size(size)), self._no_mask[size], self._no_ids[size]
            self.state, *_ = program(self.leaves, self.state, self.hidden, packed, masks, ids)
        else:
            rows, updates = self._programs.extend_rows(size), self._programs.extend_updates(size)
            packed = zeros(step_input.extend_size(size, rows, updates))
            packed[2 * rows] = min(size, self.plan.max_model_len)  # in one row: without one no attention would run
            arrays = program(self.leaves, self.caches, self.state, self.hidden, packed)
            self.caches, self.state, self.hidden, *_ = arrays

    def rebuild(self) -> None:
        """Start again with an empty cache and free slots; compiles nothing. For use after a failed step, which may
        have taken the donated arrays with it. The old ones go first: there is no room for both."""
        for array in jax.tree.leaves((self.caches, self.state, self.hidden, self._no_mask, self._no_ids)):
            array.delete()
        self._prompts.clear()
        self._unsampled = None
        self._allocate()

    # --- what the engine and its operator may ask

    def num_compiles(self) -> int:
        """XLA compilations in this process since the runner was ready; 0 while it serves."""
        return self._counter.count

    @functools.cached_property
    def decode_fn(
        self,
    ) -> Callable[[Leaves, Caches, SlotState, jax.Array], tuple[Caches, SlotState, Sampled]]:
        """The decode step as a pure jitted function over pytrees, which donates nothing:

            caches, state, sampled = runner.decode_fn(runner.leaves, runner.caches, runner.state, slots)

        slots: int32 [B] of running requests, whose next token must have its page. `sampled` has log-probabilities.
        The engine does not use it; calling it compiles once for each B.
        """
        return jax.jit(self.steps.decode_slots)

    @property
    def num_programs(self) -> int:
        return len(self.compiled)

    def close(self) -> None:
        """Stop counting compilations. The arrays go with the object."""
        self._counter.close()

    # --- a step

    def execute(self, output: SchedulerOutput) -> DeviceStep:
        """Dispatch a step and return at once. With `output.masked`, the caller calls `sample` on the handle before the
        next execute. Raises ValueError where a step is larger than configured: the scheduler broke its own limit."""
        if self._unsampled is not None and self._unsampled.waits_for_mask:
            raise RuntimeError("execute() before the masked step in flight was sampled")
        self._admit(output.slot_inits)
        rows = output.rows
        if not rows:
            return DeviceStep(0, [], None, False)
        asking = [row for row in rows if row.logprobs is not None]
        if output.num_decode_rows < len(rows) or self.config.deterministic:
            return self._run_extend(output)
        if output.masked or any(row.detail for row in asking):
            return self._run_decode_hidden(output)
        return self._run_decode(output, bool(asking))

    def _admit(self, inits: Sequence[SlotInit]) -> None:
        num_slots, vocab_size = self.config.max_num_seqs, self.structure.config.vocab_size
        for group in slots.pack_admit(list(inits), num_slots):
            self._update_state("admit", group)
        for init in inits:
            if (masks := slots.pack_masks(init, vocab_size)) is not None:
                self._update_state("admit_masks", masks)
            if (bias := slots.pack_bias(init)) is not None:
                self._update_state("admit_bias", bias)
            for chunk in slots.pack_tokens(init):
                self._update_state("admit_tokens", chunk)
            self._prompts.pop(init.slot, None)
            if init.params.prompt_logprobs is not None:
                self._prompts[init.slot] = init.token_ids[: init.num_prompt_tokens], init.params

    def _update_state(self, program: str, packed: np.ndarray) -> None:
        self.num_dispatches += 1
        self.state = self.compiled[program](self.state, packed)

    def _page_updates(self, output: SchedulerOutput, room: int) -> PageUpdates:
        """The step's page-table entries that fit into its own array; the rest is written ahead of it."""
        column = self.state.page_table.shape[1] // self.steps.num_groups
        updates, rest = PageUpdates.of(output.rows, output.window_pages, column).split(room)
        for group in step_input.pack_pages(rest, self.config.max_num_seqs):
            self._update_state("set_pages", group)
        return updates

    def _run_decode(self, output: SchedulerOutput, want_logprobs: bool) -> DeviceStep:
        bucket = fit(self.buckets.decode, len(output.rows))
        packed = self._pack_decode(output, bucket, want_logprobs)
        program = self._by_size["decode"][bucket]
        self.num_dispatches += 1
        self.caches, self.state, sampled = program(self.leaves, self.caches, self.state, packed)
        return DeviceStep(len(output.rows), range(len(output.rows)), sampled, want_logprobs)

    def _pack_decode(self, output: SchedulerOutput, bucket: int, want_logprobs: bool) -> np.ndarray:
        groups = self.steps.num_groups
        updates = self._page_updates(output, groups * bucket)
        return step_input.pack_decode(output.rows, updates, bucket, self.config.max_num_seqs, want_logprobs, groups)

    def _run_decode_hidden(self, output: SchedulerOutput) -> DeviceStep:
        bucket = fit(self.buckets.decode_hidden, len(output.rows))
        packed = self._pack_decode(output, bucket, want_logprobs=False)
        program = self._by_size["decode_hidden"][bucket]
        self.num_dispatches += 1
        arrays = program(self.leaves, self.caches, self.state, self.hidden, packed)
        self.caches, self.state, self.hidden, experts = arrays
        return self._run_head(output.rows, output.masked, None, experts)

    def _run_extend(self, output: SchedulerOutput) -> DeviceStep:
        rows = output.rows
        num_tokens = sum(row.num_tokens for row in rows)
        bucket = fit(self.buckets.extend, num_tokens)
        updates = self._page_updates(output, self._programs.extend_updates(bucket))
        row_bucket = self._programs.extend_rows(bucket)
        packed = step_input.pack_extend(
            rows, updates, bucket, row_bucket, self._programs.extend_updates(bucket), self.config.max_num_seqs
        )
        program = self._by_size["extend"][bucket]
        self.num_dispatches += 1
        arrays = program(self.leaves, self.caches, self.state, self.hidden, packed)
        self.caches, self.state, self.hidden, finite, experts = arrays
        return self._run_head(rows, output.masked, finite, experts)

    def _run_head(
        self, rows: Sequence[ScheduledRow], masked: bool, finite: jax.Array | None, experts: jax.Array | None
    ) -> DeviceStep:
        ends = list(itertools.accumulate(row.num_tokens for row in rows))
        sampling = [i for i, row in enumerate(rows) if row.samples and not row.embed]
        want_logprobs = any(rows[i].logprobs is not None for i in sampling)
        detailed = any(row.detail is not None for row in rows)
        asked = Asked.of([rows[i] for i in sampling]) if detailed else Asked()
        step = functools.partial(
            DeviceStep,
            len(rows),
            prompt=self._dispatch_prompt_logprobs(rows, ends) if self._prompts else None,
            pooled=self._dispatch_pool([i for i, row in enumerate(rows) if row.samples and row.embed], ends),
            hidden=self._dispatch_hidden(rows, ends) if detailed else (),
            finite=finite,
            experts=experts,
            expert_rows=expert_places(rows, ends) if detailed and experts is not None else None,
        )
        if not sampling:
            return step([], None, False)
        finish = functools.partial(
            self._head_sample,
            [rows[i].slot for i in sampling],
            [ends[i] - 1 for i in sampling],
            want_logprobs,
            asked,
        )
        if not masked:
            return step(sampling, finish(None), want_logprobs, detailed=asked.anything)
        self._unsampled = step(sampling, None, want_logprobs, finish=finish, detailed=asked.anything)
        return self._unsampled

    def _head_sample(
        self,
        row_slots: list[int],
        token_indices: list[int],
        want_logprobs: bool,
        asked: Asked,
        bitmask: np.ndarray | None,
        late: Collection[int] = (),
    ) -> Sampled:
        """late: of the rows, those that get no token"""
        row_slots = [self.config.max_num_seqs if i in late else slot for i, slot in enumerate(row_slots)]
        bucket, masked = fit(self.buckets.head, len(row_slots)), bitmask is not None
        packed = step_input.pack_head(
            row_slots, token_indices, bucket, self.config.max_num_seqs, want_logprobs, masked, asked.support
        )
        mask: jax.Array | np.ndarray = self._no_mask[bucket]
        if bitmask is not None:
            mask = np.zeros((bucket, self._programs.shapes.mask_words), np.int32)
            mask[: len(bitmask)] = bitmask
        ids: jax.Array | np.ndarray = self._no_ids[bucket]
        if asked.watched_ids is not None:
            ids = np.zeros((bucket, MAX_WATCHED), np.int32)
            ids[: len(row_slots)] = asked.watched_ids
        program = self._by_size["head_sample"][bucket]
        self.num_dispatches += 1
        self.state, sampled = program(self.leaves, self.state, self.hidden, packed, mask, ids)
        return sampled

    def _dispatch_pool(self, embedding: list[int], ends: Sequence[int]) -> list[Pooled]:
        """The embeddings of these rows, a group a dispatch."""
        groups = [embedding[first : first + POOL_GROUP] for first in range(0, len(embedding), POOL_GROUP)]
        return [(group, self._pool([ends[i] - 1 for i in group])) for group in groups]

    def _dispatch_hidden(self, rows: Sequence[ScheduledRow], ends: Sequence[int]) -> list[TokensOf]:
        places = hidden_places(rows, ends)
        groups = [places[first : first + POOL_GROUP] for first in range(0, len(places), POOL_GROUP)]
        return [([row for row, _ in group], self._pool([token for _, token in group], True)) for group in groups]

    def _pool(self, token_indices: list[int], plain: bool = False) -> jax.Array:
        packed = np.zeros(1 + POOL_GROUP, np.int32)
        packed[0] = plain
        packed[1 : 1 + len(token_indices)] = token_indices
        self.num_dispatches += 1
        return self.compiled["pool"](self.hidden, packed)

    def _dispatch_prompt_logprobs(
        self, rows: Sequence[ScheduledRow], ends: Sequence[int]
    ) -> dict[int, list[PromptChunk]]:
        """For each row that asks: the log-probabilities of the prompt tokens that follow those of its chunk."""
        results: dict[int, list[PromptChunk]] = {}
        for i, row in enumerate(rows):
            if row.prompt_logprobs is not None and row.token_ids:
                prompt, params = self._prompts[row.slot]
                targets = prompt[row.start + 1 : row.start + row.num_tokens + 1]
                first = ends[i] - row.num_tokens
                results[i] = [
                    self._prompt_chunk(first + done, targets[done : done + PROMPT_CHUNK], params)
                    for done in range(0, len(targets), PROMPT_CHUNK)
                ]
        return {row: chunks for row, chunks in results.items() if chunks}

    def _prompt_chunk(self, first: int, targets: list[int], params: SamplingParams) -> PromptChunk:
        packed = np.zeros((2, PROMPT_CHUNK), np.int32)
        packed[0, : len(targets)] = range(first, first + len(targets))
        packed[1, : len(targets)] = targets
        self.num_dispatches += 1
        found, watched = self.compiled["prompt_logprobs"](self.leaves, self.hidden, packed, pack_watched(params))
        return PromptChunk(found, len(targets), watched if params.watched_token_ids else None)

    # --- pages, with RunnerConfig.page_programs, of a model without groups of layers: an id is one place in every layer

    def copy_pages(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """Copy whole pages, in every layer: sources[i] to destinations[i], none of which is also a source."""
        for first in range(0, len(sources), PAGE_GROUP):
            packed = np.full((2, PAGE_GROUP), self.plan.num_pages, np.int32)
            chunk = slice(first, first + PAGE_GROUP)
            packed[0, : len(sources[chunk])] = sources[chunk]
            packed[1, : len(sources[chunk])] = destinations[chunk]
            self.caches = self.compiled["copy_pages"](self.caches, packed)

    def export_pages(self, page_ids: Sequence[int]) -> list[np.ndarray]:
        """The pages' content after every step dispatched so far: one array [n, page_size, 2 * KH, H] a layer."""
        groups = [
            (self.compiled["export_pages"](self.caches, ids), count) for ids, count in self._page_groups(page_ids)
        ]
        layers = range(len(self._layers))
        return [np.concatenate([np.asarray(pages[i])[:count] for pages, count in groups]) for i in layers]

    def import_pages(self, page_ids: Sequence[int], pages: Sequence[np.ndarray]) -> None:
        """Fill pages with what `export_pages` gave."""
        first = 0
        for ids, count in self._page_groups(page_ids):
            padded = [np.zeros((PAGE_GROUP, *layer.shape[1:]), layer.dtype) for layer in pages]
            for out, layer in zip(padded, pages, strict=True):
                out[:count] = layer[first : first + count]
            self.caches = self.compiled["import_pages"](self.caches, ids, tuple(padded))
            first += count

    def _page_groups(self, page_ids: Sequence[int]) -> list[tuple[np.ndarray, int]]:
        groups = []
        for first in range(0, len(page_ids), PAGE_GROUP):
            chunk = page_ids[first : first + PAGE_GROUP]
            ids = np.full(PAGE_GROUP, self.plan.num_pages, np.int32)
            ids[: len(chunk)] = chunk
            groups.append((ids, len(chunk)))
        return groups

    # --- weights

    def update_weights(self, leaves: Sequence[jax.Array | np.ndarray]) -> None:
        """Serve other weights from the next step on, without compiling: leaves as in `leaves`, in the same order.

        KV pages written before keep the old weights' values; flush the prefix cache. Raises ValueError that names
        the first leaf of another shape or dtype, and then changes nothing.
        """
        specs = self.structure.specs
        if len(leaves) != len(specs):
            raise ValueError(f"{len(leaves)} leaves given, the model has {len(specs)}")
        for leaf, spec in zip(leaves, specs, strict=True):
            if leaf.shape != spec.shape or leaf.dtype != spec.dtype:
                raise ValueError(f"{spec.name} is {spec.dtype}{spec.shape}, and {leaf.dtype}{leaf.shape} was given")
        pairs = zip(leaves, self.leaves, strict=True)
        self.leaves = tuple(jax.device_put(new, old.sharding) for new, old in pairs)
