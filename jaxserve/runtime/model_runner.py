"""The runner: takes SchedulerOutput, returns tokens. It has the weights, KV cache, slot state and compiled programs.

Each step is packed into one int32 array and dispatched without waiting; a handle reads the tokens later. The scheduler
decides which request runs when and which page belongs to whom. A step depends only on its SchedulerOutput and on the
arrays on the device.

A step of decode rows only is one dispatch, `decode[B]`. If one of its rows has a token mask or requests a rare output,
or if `decode[B]` is not compiled yet, the step is `decode_hidden[B]` followed by `head_sample[R]`: the host computes
the masks during the forward pass. With drafts it is `decode_hidden[T]` followed by `verify[T]`. Every other step
(prefill, deterministic mode) is `extend[T]` followed by `head_sample[R]` for the rows that sample.

ExtraOutputs dispatches outputs that few rows request: embeddings, hidden states, log-probabilities of prompt tokens. It
computes them from the hidden states of the last extend or decode_hidden, in programs of a fixed number of tokens.
Verification is the host side of steps with drafts; sampling/verify.py is the device side.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence

import jax
import numpy as np

from jaxserve.models.checkpoint.loader import LoadedModel
from jaxserve.runtime import memory, step_input
from jaxserve.runtime.adapters import DeviceAdapters
from jaxserve.runtime.compilation import compiler, program_cache
from jaxserve.runtime.compilation.buckets import verify_rows
from jaxserve.runtime.compilation.compiler import (
    WARM_UP_SECONDS,
    BeforeRun,
    LateCompilation,
    ProgramTable,
    WarmUp,
    compiles_programs,
    measured_times,
)
from jaxserve.runtime.host_pages import HostPools, PageTransfer
from jaxserve.runtime.memory import MemoryPlan
from jaxserve.runtime.mesh import DeviceMesh
from jaxserve.runtime.program_set import POOL_GROUP, PROMPT_CHUNK, WRITE_ADAPTER
from jaxserve.runtime.programs import Caches, Leaves
from jaxserve.runtime.runner_config import RunnerConfig
from jaxserve.runtime.runner_setup import RunnerSetup
from jaxserve.runtime.sampling import slots
from jaxserve.runtime.sampling.extras import DeviceExtras, HeadExtras, TokensOf, expert_tokens, hidden_tokens, pack_ids
from jaxserve.runtime.sampling.logprobs import unpack_logprobs
from jaxserve.runtime.sampling.sampler import Sampled
from jaxserve.runtime.sampling.slots import SlotState
from jaxserve.runtime.sampling.verify import Verified
from jaxserve.runtime.step_input import DeviceStep, PageUpdates, Pooled, PromptChunk, StepOutputs
from jaxserve.runtime.towers import EncodingStep, TowerRunner
from jaxserve.types.extras import MAX_LOGPROB_IDS, ExtraParams
from jaxserve.types.scheduling import StepTimes, TowerLimits
from jaxserve.types.step import SampledTokens, ScheduledRow, SchedulerOutput, SlotInit


class ExtraOutputs:
    """The programs `pool` and `prompt_logprobs`, and the prompts of requests that want their log-probabilities.

    In all methods `hidden` is the buffer of hidden states [max T, D], and `ends` the end of each row's tokens in it.
    num_dispatches: programs started so far.
    """

    def __init__(self, compiled: Mapping[str, jax.stages.Compiled]) -> None:
        self.num_dispatches = 0
        self._compiled = compiled
        self._prompts: dict[int, tuple[list[int], ExtraParams]] = {}  # by slot

    def admit(self, init: SlotInit) -> None:
        """Store the prompt of a new request if it wants log-probabilities of its prompt."""
        self._prompts.pop(init.slot, None)
        if init.params.prompt_logprobs is not None:
            self._prompts[init.slot] = init.token_ids[: init.num_prompt_tokens], init.params.extras

    def clear(self) -> None:
        """Forget all prompts."""
        self._prompts.clear()

    def pool(self, leaves: Leaves, hidden: jax.Array, embedding: Sequence[int], ends: Sequence[int]) -> list[Pooled]:
        """Dispatch the embeddings, or a head's scores, of the rows `embedding`, from hidden [max T, D]."""
        groups = [embedding[first : first + POOL_GROUP] for first in range(0, len(embedding), POOL_GROUP)]
        return [(group, self._pool(leaves, hidden, [ends[i] - 1 for i in group])) for group in groups]

    def hidden_states(
        self, leaves: Leaves, hidden: jax.Array, rows: Sequence[ScheduledRow], ends: Sequence[int]
    ) -> list[TokensOf]:
        """Dispatch the hidden states that the rows request, from hidden [max T, D]."""
        tokens = hidden_tokens(rows, ends)
        groups = [tokens[first : first + POOL_GROUP] for first in range(0, len(tokens), POOL_GROUP)]
        return [
            ([row for row, _ in group], self._pool(leaves, hidden, [token for _, token in group], plain=True))
            for group in groups
        ]

    def _pool(self, leaves: Leaves, hidden: jax.Array, token_indices: Sequence[int], plain: bool = False) -> jax.Array:
        """Dispatch embeddings, or if `plain` hidden states, of at most POOL_GROUP tokens of hidden [max T, D]."""
        packed = np.zeros(1 + POOL_GROUP, np.int32)
        packed[0] = plain
        packed[1 : 1 + len(token_indices)] = token_indices
        self.num_dispatches += 1
        return self._compiled["pool"](leaves, hidden, packed)

    def prompt_logprobs(
        self, leaves: Leaves, hidden: jax.Array, rows: Sequence[ScheduledRow], ends: Sequence[int]
    ) -> dict[int, list[PromptChunk]]:
        """Dispatch the log-probabilities of the prompt tokens that follow each row's tokens, if the row wants them.

        leaves: the weights, one array [shape] per parameter. hidden: [max T, D].
        """
        if not self._prompts:
            return {}
        results: dict[int, list[PromptChunk]] = {}
        for i, row in enumerate(rows):
            if row.prompt_logprobs is not None and row.token_ids:
                prompt, extras = self._prompts[row.slot]
                targets = prompt[row.start + 1 : row.start + row.num_tokens + 1]
                first = ends[i] - row.num_tokens
                results[i] = [
                    self._prompt_chunk(leaves, hidden, first + done, targets[done : done + PROMPT_CHUNK], extras)
                    for done in range(0, len(targets), PROMPT_CHUNK)
                ]
        return {row: chunks for row, chunks in results.items() if chunks}

    def _prompt_chunk(
        self, leaves: Leaves, hidden: jax.Array, first: int, targets: list[int], extras: ExtraParams
    ) -> PromptChunk:
        packed = np.zeros((2, PROMPT_CHUNK), np.int32)
        packed[0, : len(targets)] = range(first, first + len(targets))
        packed[1, : len(targets)] = targets
        self.num_dispatches += 1
        found, id_logprobs = self._compiled["prompt_logprobs"](leaves, hidden, packed, pack_ids(extras))
        return PromptChunk(found, len(targets), id_logprobs if extras.logprob_token_ids else None)


Finish = Callable[[np.ndarray | None, Collection[int]], Verified]


class Verification:
    """The programs `verify[T]` of a table. num_slots: slot of padding rows. num_words: of a row's token mask."""

    def __init__(self, programs: ProgramTable, num_slots: int, num_words: int) -> None:
        self._programs = programs
        self._num_slots = num_slots
        self._num_words = num_words

    def bucket(self, output: SchedulerOutput) -> int:
        """Return the size of the program that a step needs. Raises ValueError if it is too large."""
        return self._programs.fit("verify", max(output.num_tokens + output.num_drafts, 2 * len(output.rows)))

    def run(
        self,
        arrays: tuple[Leaves, SlotState, jax.Array],
        rows: Sequence[ScheduledRow],
        bucket: int,
        bitmask: np.ndarray | jax.Array,
        late: Collection[int] = (),
    ) -> tuple[SlotState, Verified]:
        """Dispatch head and sampler after the forward pass of a step.

        arrays: leaves, state and hidden states [max T, D]. bitmask: int32 [n, W] with a row per token, or an array of
        the device that is not read. late: rows that get no token.
        """
        masked = isinstance(bitmask, np.ndarray)
        if isinstance(bitmask, np.ndarray):
            given, bitmask = bitmask, np.zeros((bucket, self._num_words), np.int32)
            bitmask[: len(given)] = given
        packed = step_input.pack_verify(rows, (bucket, verify_rows(bucket)), self._num_slots, late, masked=masked)
        return self._programs.by_size["verify"][bucket](*arrays, packed, bitmask)


class VerifyStep:
    """The `StepHandle` of a step with drafts.

    finish: (masks or None, rows that get no token) -> the results. propose: as of `DeviceStep`
    """

    def __init__(
        self, rows: Sequence[ScheduledRow], finish: Finish, propose: step_input.Propose | None = None, *, masked: bool
    ) -> None:
        self._num_rows = len(rows)
        self._want_logprobs = any(row.logprobs is not None for row in rows)
        self._finish = finish
        self._propose = propose
        self._drafts: jax.Array | None = None
        self._verified: Verified | None = None
        self._late: list[int] = []
        if not masked:
            self._run(None)

    @property
    def waits_for_mask(self) -> bool:
        return self._verified is None

    def sample(self, bitmask: np.ndarray, late: Sequence[int] = ()) -> None:
        """Sample, see `StepHandle`. bitmask: int32 [positions, words]. Raises RuntimeError if no mask is awaited."""
        if self._verified is not None:
            raise RuntimeError("this step is not masked, or was sampled already")
        self._late = list(late)
        self._run(bitmask)

    def _run(self, bitmask: np.ndarray | None) -> None:
        self._verified = self._finish(bitmask, self._late)
        self._verified.tokens.copy_to_host_async()
        self._verified.num_valid.copy_to_host_async()
        if self._want_logprobs:
            self._verified.logprobs.copy_to_host_async()
        if self._propose is not None:
            self._drafts = self._propose()
            self._drafts.copy_to_host_async()

    def result(self) -> SampledTokens:
        """Wait for the step and return its tokens. Raises RuntimeError if the step still waits for `sample`."""
        if self._verified is None:
            raise RuntimeError("a masked step has no result before sample(bitmask)")
        tokens = np.asarray(self._verified.tokens)[: self._num_rows]
        status = tokens[:, 0, 1].astype(np.uint8)
        status[self._late] = 0
        logprobs: tuple[np.ndarray | None, ...] = (None,) * 4
        if self._want_logprobs:
            packed = np.asarray(self._verified.logprobs)[: self._num_rows]
            flat = unpack_logprobs(packed.reshape(-1, packed.shape[-1]))
            logprobs = tuple(values.reshape(*packed.shape[:2], *values.shape[1:]) for values in flat)
        return SampledTokens(
            token_ids=tokens[:, :, 0],
            num_valid=np.asarray(self._verified.num_valid)[: self._num_rows],
            status=status,
            logprobs=logprobs[0],
            ranks=logprobs[1],
            top_ids=logprobs[2],
            top_logprobs=logprobs[3],
            drafts=None if self._drafts is None else np.asarray(self._drafts)[: self._num_rows],
        )


class ModelRunner:
    """The device side of one engine (implements `types.step.StepRunner`).

    The constructor plans the memory, compiles the programs and allocates. With `config.early` it compiles only enough
    programs to serve every step. Raises ConfigError if the model does not fit. agree: returns the plan for all hosts
    from this host's plan

    config, plan, backend, buckets     as resolved; plan.num_pages and plan.max_model_len are the scheduler's limits
    steps                              the step functions, not jitted: see `programs.StepPrograms`
    pages, page, host                  export and import of pages; structs of an exported one; copies of evicted ones
    leaves, caches, state, hidden      the device arrays in use; the programs donate the last three
    draft_leaves                       the weights of a draft model
    adapters                           on the devices; None: there is no room for any
    late                               the programs that are still to compile; the owner starts it
    store                              where compiled programs are kept; None: nowhere, or in JAX's own cache
    compile_seconds                    time to compile the programs and to allocate
    """

    def __init__(
        self,
        loaded: LoadedModel,
        config: RunnerConfig,
        mesh: DeviceMesh,
        *,
        progress: compiler.Progress | None = None,
        agree: Callable[[MemoryPlan], MemoryPlan] = lambda plan: plan,
        store: compiler.ProgramStorage | None = None,
        draft: LoadedModel | None = None,
    ) -> None:
        started = time.perf_counter()
        if store is None and config.compile_cache is not None:
            program_cache.enable(config.compile_cache)
        self.config = config
        self.store = store
        self.mesh = mesh
        self.leaves: Leaves = loaded.leaves
        self.draft_leaves: Leaves = () if draft is None else draft.leaves
        self.structure = loaded.structure
        setup = RunnerSetup.of(loaded, config, mesh, draft)
        self.backend, self.buckets, self.steps = setup.backend, setup.buckets, setup.steps
        plan = agree(setup.plan())
        self._programs = setup.program_set(plan.pages_by_group, plan.max_model_len)
        wanted = self._programs.first() if config.early else self._programs.all()
        transfers = self._programs.transfers() if config.moves_pages else ()
        wanted = [*wanted, *transfers, *self._programs.write_adapter()]
        self.compiled = compiler.compile_all(wanted, progress=progress, store=store)
        scratch = max(map(memory.scratch_bytes, self.compiled.values())) * len(mesh.devices)
        self.plan: MemoryPlan = dataclasses.replace(plan, scratch_bytes=scratch)
        self._table = ProgramTable(self.buckets.by_program(), self.compiled)
        self._by_size = self._table.by_size
        self.late = LateCompilation(self._programs.rest() if config.early else (), store, self._take)
        self.pages = PageTransfer(self._programs.transfers, plan.pages_by_group, self.compiled)
        self.tower = None
        if setup.tower is not None:
            self.tower = TowerRunner(setup.tower, self.compiled, self.compiled["allocate_pictures"])
        words = self._programs.shapes.mask_words
        self._verification = Verification(self._table, config.max_num_seqs, words)
        self.adapters: DeviceAdapters | None = None
        if setup.adapters is not None:
            self.adapters = DeviceAdapters(setup.adapters, self.compiled[WRITE_ADAPTER])
        self._allocate()
        self.page = self._programs.exported_pages(1)
        pages = self.page, *(self._programs.exported_pages(1, group) for group in range(1, self.steps.num_groups))
        self.host = HostPools(self.pages, pages, plan.host_pages_by_group, config.page_file)
        self._extra = ExtraOutputs(self.compiled)
        self._unsampled: DeviceStep | VerifyStep | None = None
        self._num_dispatches = 0
        self.compile_seconds = time.perf_counter() - started
        self._counter = compiler.CompileCounter(compiles_programs)
        for close in (self._counter.close, self.host.close):  # of an engine that is dropped without `close`
            weakref.finalize(self, close)

    def _take(self, name: str, program: jax.stages.Compiled) -> None:
        self.compiled[name] = program
        self._table.add(name, program)

    def _allocate(self) -> None:
        arrays = self.compiled["allocate"]()
        self.caches: Caches
        self.state: SlotState
        self.hidden: jax.Array
        self.caches, self.state, self.hidden, self._no_mask, self._no_ids = arrays

    def warm_up(self, before_run: BeforeRun | None = None, after_runs: Callable[[], None] = lambda: None) -> StepTimes:
        """Run the programs of a step on dummy input, small ones first: requests then do not pay the first-run cost.

        Returns the measured times of steps. before_run: called before each run, with the program's family and size.
        after_runs: called before `end_warm_up`, whose programs wait for the same programs on other hosts
        """
        times = measured_times(self, self.mesh.platform, self.config.max_drafts, before_run)
        after_runs()
        self.end_warm_up(times.decode_seconds(self.config.max_num_seqs))
        return times

    def end_warm_up(self, step_seconds: float = 0.0) -> None:
        """Run the programs that are not of a step, and discard the dummy state. step_seconds: of decode rows"""
        self._run_small()
        if self.tower is not None:
            self.tower.warm_up(self.leaves, step_seconds)
        if self.config.moves_pages:
            self.caches = self.pages.warm_up(self.caches)
        if self.adapters is not None:
            self.adapters.warm_up()
        self.rebuild()
        program_cache.share()  # again: the first run of a program compiles small helper programs

    def _run_small(self) -> None:
        """Run each program that updates slots or reads hidden states, on zeros: one that was loaded may be damaged."""
        for program in self._programs.small():
            compiled, takes_state = self.compiled[program.name], bool(program.donate)
            structs = program.args[1:] if takes_state else program.args[2:]
            zeros = [np.zeros(struct.shape, struct.dtype) for struct in structs]
            if takes_state:
                self.state = jax.block_until_ready(compiled(self.state, *zeros))
            else:
                jax.block_until_ready(compiled(self._weights, self.hidden, *zeros))

    def sizes(self) -> list[tuple[str, int]]:
        """Return family and size of each program of a step."""
        return [(family, size) for family, programs in self._by_size.items() for size in programs]

    def padding_runs(self) -> WarmUp:
        """Return the runs of all programs on padding. They change nothing that a request depends on."""
        run = functools.partial(self.timed_run, padding=True)
        return WarmUp(self.sizes(), run, WARM_UP_SECONDS[self.mesh.platform])

    @property
    def extend_sizes(self) -> tuple[int, ...]:
        """Return the tokens of the compiled `extend` programs, ascending."""
        return self._table.sizes("extend")

    def timed_run(self, family: str, size: int, *, padding: bool = False) -> float:
        """Run a program on dummy input and return the seconds.

        It may overwrite state, so `rebuild` must follow, unless the input is padding only.
        """
        began = time.perf_counter()
        self._run_on_zeros(family, size, padding=padding)
        jax.block_until_ready((self.caches, self.state))
        return time.perf_counter() - began

    def _run_on_zeros(self, family: str, size: int, *, padding: bool = False) -> None:
        program, programs = self._by_size[family][size], self._programs
        packed = programs.padding(family, size) if padding else programs.zeros(family, size, self.plan.max_model_len)
        if family == "decode":
            self.caches, self.state, _ = program(self._weights, self.caches, self.state, packed)
        elif family == "head_sample":
            arrays = program(self._weights, self.state, self.hidden, packed, self._no_mask[size], self._no_ids[size])
            self.state, *_ = arrays
        elif family == "draft":
            self.caches, _ = program(self._weights, self.caches, self.state, packed)
        elif family == "verify":
            self.state, _ = program(self._weights, self.state, self.hidden, packed, self._no_mask[size])
        else:
            pictures = self._pictures((), size) if family == "extend" else ()
            arrays = program(self._weights, self.caches, self.state, self.hidden, packed, *pictures)
            self.caches, self.state, self.hidden, *_ = arrays

    def rebuild(self) -> None:
        """Replace the device arrays by empty ones, without compiling. For use after a failed step.

        A failed step may have consumed the donated arrays. The old arrays are freed first, because memory has no room
        for both.
        """
        self.release()
        if self.adapters is not None:
            self.adapters.rebuild()
        self._allocate()
        if self.tower is not None:
            self.tower.rebuild()

    def release(self) -> None:
        """Free the device arrays except the weights. `rebuild` makes them again; until then no step may run."""
        for array in jax.tree.leaves((self.caches, self.state, self.hidden, self._no_mask, self._no_ids)):
            array.delete()
        if self.tower is not None:
            self.tower.release()
        if self.adapters is not None:
            self.adapters.release()
        self._extra.clear()
        self._unsampled = None
        self.host.clear()

    # --- properties for the engine and its operator

    def num_compiles(self) -> int:
        """Return the XLA compilations in this process since the runner was ready. It must stay 0 while serving.

        Programs of `late` and of other engines do not count, nor page programs, which are compiled at their first use.
        """
        return self._counter.count

    @functools.cached_property
    def decode_fn(
        self,
    ) -> Callable[[Leaves, Caches, SlotState, jax.Array], tuple[Caches, SlotState, Sampled]]:
        """Return the decode step as a pure jitted function over pytrees. It donates nothing:

            caches, state, sampled = runner.decode_fn(runner.leaves, runner.caches, runner.state, slots)

        slots: int32 [B] of running requests; the page of their next token must be allocated. `sampled` includes
        log-probabilities. The engine does not use this function. It compiles once per B.
        """
        options = compiler.compiler_options(
            self.mesh.platform, deterministic=self.config.deterministic, several=jax.process_count() > 1
        )
        return jax.jit(self.steps.decode_slots, compiler_options=dict(options))

    @property
    def tower_limits(self) -> TowerLimits | None:
        """Return how pictures are encoded; None: the model takes none."""
        return None if self.tower is None else self.tower.limits

    @property
    def num_programs(self) -> int:
        """Return the number of programs of the start, including the ones that are still being compiled."""
        return len(self.compiled) + self.late.total - self.late.done

    @property
    def num_dispatches(self) -> int:
        """Return the number of programs started so far."""
        return self._num_dispatches + self._extra.num_dispatches + (self.tower.num_dispatches if self.tower else 0)

    def close(self) -> None:
        """Stop compiling, stop counting and close the page file. The arrays are freed with the object.

        No step may follow. A second call does nothing.
        """
        self.late.close()
        self._counter.close()
        self.host.close()

    # --- a step

    def execute(self, output: SchedulerOutput) -> DeviceStep | VerifyStep | EncodingStep:
        """Dispatch a step without waiting for it.

        If `output.masked`, the caller must call `sample` on the handle before the next `execute`; raises RuntimeError
        otherwise. Raises ValueError if the step is larger than the configured limits.
        """
        if self._unsampled is not None and self._unsampled.waits_for_mask:
            raise RuntimeError("execute() before the masked step in flight was sampled")
        self.caches = self.host.move(self.caches, output.page_moves)
        if self.adapters is not None:
            self.adapters.write(output.adapter_writes)
            self.adapters.assign(output.slot_inits)
        self._admit(output.slot_inits)
        step = self._run_rows(output)
        if not output.encodes:
            return step
        assert self.tower is not None, "pictures for a model that takes none"
        *_, done = [self.tower.run(self.leaves, part) for part in output.encodes]
        return EncodingStep(step, done)

    def _run_rows(self, output: SchedulerOutput) -> DeviceStep | VerifyStep:
        rows = output.rows
        if not rows:
            return DeviceStep(0, [], None, StepOutputs())
        if output.num_drafts:
            return self._run_verify(output)
        asking = [row for row in rows if row.logprobs is not None]
        if output.num_decode_rows < len(rows) or self.config.deterministic:
            return self._run_extend(output)
        apart = self._table.find("decode", len(rows)) is None  # its program is not there yet
        if apart or output.masked or any(row.extras is not None for row in asking):
            return self._run_decode_hidden(output)
        return self._run_decode(output, bool(asking))

    @property
    def _weights(self) -> Leaves:
        """Return the weights as the programs take them, one array [shape] per parameter, then the adapters' arrays."""
        return self.leaves + self.draft_leaves + (() if self.adapters is None else self.adapters.arguments)

    def _proposal(self, output: SchedulerOutput) -> step_input.Propose | None:
        """Return a function that dispatches the drafts that a step asks for; None if it asks for none.

        It is called when the step's tokens are sampled. Drafts have a program of their own, dispatched right behind the
        step's programs without waiting. The program has its layers once for each draft: so they are compiled for a few
        sizes of this program, and not into every program that samples.
        """
        if not output.draft_room:
            return None

        def propose() -> jax.Array:
            """Return drafts int32 [R and more, Q]."""
            bucket = self._table.fit("draft", len(output.rows))
            packed = step_input.pack_draft(output.rows, output.draft_room, bucket, self.config.max_num_seqs)
            self._num_dispatches += 1
            self.caches, drafts = self._by_size["draft"][bucket](self._weights, self.caches, self.state, packed)
            return drafts

        return propose

    def _admit(self, inits: Sequence[SlotInit]) -> None:
        num_slots, vocab_size = self.config.max_num_seqs, self.structure.config.vocab_size
        for group in slots.pack_admit(list(inits), num_slots):
            self._update_state("admit", group)
        if self.tower is not None:
            for group in slots.pack_deltas(list(inits), num_slots):
                self._update_state("admit_deltas", group)
        for init in inits:
            if (masks := slots.pack_masks(init, vocab_size)) is not None:
                self._update_state("admit_masks", masks)
            if (bias := slots.pack_bias(init)) is not None:
                self._update_state("admit_bias", bias)
            for chunk in slots.pack_tokens(init):
                self._update_state("admit_tokens", chunk)
            self._extra.admit(init)

    def _update_state(self, program: str, packed: np.ndarray) -> None:
        self._num_dispatches += 1
        self.state = self.compiled[program](self.state, packed)

    def _page_updates(self, output: SchedulerOutput, room: int) -> PageUpdates:
        """Return the step's first `room` page-table entries, to pack with the step. Writes the others right away."""
        column = (self.state.page_table.shape[1] - self.steps.state_columns) // self.steps.num_groups
        updates, rest = PageUpdates.of(output.rows, output.table_updates, column).split(room)
        for group in step_input.pack_pages(rest, self.config.max_num_seqs):
            self._update_state("set_pages", group)
        return updates

    def _with_flag(self, packed: np.ndarray, output: SchedulerOutput) -> np.ndarray:
        """Return a packed forward pass, with the flag of the step if there is a draft model."""
        return packed if self.steps.guesses is None else step_input.pack_rests(packed, output.rests)

    def _run_decode(self, output: SchedulerOutput, want_logprobs: bool) -> DeviceStep:
        bucket = self._table.fit("decode", len(output.rows))
        groups, rows = self.steps.num_groups, output.rows
        updates = self._page_updates(output, groups * bucket)
        packed = step_input.pack_decode(rows, updates, bucket, self.config.max_num_seqs, want_logprobs, groups)
        packed = self._with_flag(packed, output)
        program = self._by_size["decode"][bucket]
        self._num_dispatches += 1
        self.caches, self.state, sampled = program(self._weights, self.caches, self.state, packed)
        outputs = StepOutputs(logprobs=want_logprobs)
        return DeviceStep(len(rows), range(len(rows)), sampled, outputs, propose=self._proposal(output))

    def _run_decode_hidden(self, output: SchedulerOutput) -> DeviceStep:
        experts = self._run_hidden(output, self._table.fit("decode_hidden", len(output.rows)))
        return self._run_head(output, None, experts)

    def _run_hidden(self, output: SchedulerOutput, bucket: int) -> jax.Array | None:
        """Dispatch the forward pass of decode rows and their drafts. Returns the routed experts."""
        groups = self.steps.num_groups
        updates = self._page_updates(output, groups * bucket)
        packed = step_input.pack_hidden(output.rows, updates, bucket, self.config.max_num_seqs, groups)
        packed = self._with_flag(packed, output)
        program = self._by_size["decode_hidden"][bucket]
        self._num_dispatches += 1
        arrays = program(self._weights, self.caches, self.state, self.hidden, packed)
        self.caches, self.state, self.hidden, experts = arrays
        return experts

    def _run_verify(self, output: SchedulerOutput) -> VerifyStep:
        bucket = self._verification.bucket(output)
        self._run_hidden(output, bucket)

        def sample(bitmask: np.ndarray | None, late: Collection[int]) -> Verified:
            """Run `verify`. bitmask: int32 [tokens, W] or None; late: indices of the rows without a mask."""
            self._num_dispatches += 1
            mask = self._no_mask[bucket] if bitmask is None else bitmask
            arrays = self._weights, self.state, self.hidden
            self.state, verified = self._verification.run(arrays, output.rows, bucket, mask, late)
            return verified

        self._unsampled = VerifyStep(output.rows, sample, self._proposal(output), masked=output.masked)
        return self._unsampled

    def _run_extend(self, output: SchedulerOutput) -> DeviceStep:
        rows = output.rows
        num_tokens = sum(row.num_tokens for row in rows)
        bucket = self._table.fit("extend", num_tokens)
        updates = self._page_updates(output, self._programs.extend_updates(bucket))
        row_bucket = self._programs.extend_rows(bucket)
        packed = step_input.pack_extend(
            rows, updates, bucket, row_bucket, self._programs.extend_updates(bucket), self.config.max_num_seqs
        )
        packed = self._with_flag(packed, output)
        program = self._by_size["extend"][bucket]
        self._num_dispatches += 1
        pictures = self._pictures(rows, bucket)
        arrays = program(self._weights, self.caches, self.state, self.hidden, packed, *pictures)
        self.caches, self.state, self.hidden, finite, experts = arrays
        return self._run_head(output, finite, experts)

    def _pictures(self, rows: Sequence[ScheduledRow], bucket: int) -> tuple[np.ndarray, jax.Array] | tuple[()]:
        """Return the further arguments of `extend` for a model that takes pictures, see `StepPrograms.extend`."""
        if self.tower is None:
            return ()
        return step_input.pack_pictures(rows, bucket), self.tower.pool

    def _run_head(self, output: SchedulerOutput, finite: jax.Array | None, experts: jax.Array | None) -> DeviceStep:
        rows, propose = output.rows, self._proposal(output)
        ends = list(itertools.accumulate(row.num_tokens for row in rows))
        sampling = [i for i, row in enumerate(rows) if row.samples and not row.embed]
        embedding = [i for i, row in enumerate(rows) if row.samples and row.embed]
        asks_extras = any(row.extras is not None for row in rows)
        head = HeadExtras.of([rows[i] for i in sampling]) if asks_extras else HeadExtras()
        outputs = StepOutputs(
            logprobs=any(rows[i].logprobs is not None for i in sampling),
            prompt=self._extra.prompt_logprobs(self._weights, self.hidden, rows, ends),
            pooled=self._extra.pool(self._weights, self.hidden, embedding, ends),
            finite=finite,
            extras=self._device_extras(rows, ends, head, experts) if asks_extras else None,
        )
        step = functools.partial(DeviceStep, len(rows), sampling)
        if not sampling:
            return step(None, outputs)
        row_slots, last_tokens = [rows[i].slot for i in sampling], [ends[i] - 1 for i in sampling]
        finish = functools.partial(self._head_sample, row_slots, last_tokens, outputs.logprobs, head)
        if not output.masked:
            return step(finish(None), outputs, propose=propose)
        self._unsampled = step(None, outputs, finish, propose)
        return self._unsampled

    def _device_extras(
        self, rows: Sequence[ScheduledRow], ends: list[int], head: HeadExtras, experts: jax.Array | None
    ) -> DeviceExtras:
        hidden = self._extra.hidden_states(self._weights, self.hidden, rows, ends)
        tokens = expert_tokens(rows, ends)
        return DeviceExtras(head=head.wanted, hidden=hidden, experts=experts, expert_tokens=tokens)

    def _head_sample(
        self,
        row_slots: list[int],
        token_indices: list[int],
        want_logprobs: bool,
        extras: HeadExtras,
        bitmask: np.ndarray | None,
        late: Collection[int] = (),
    ) -> Sampled:
        """Dispatch head and sampler. late: indices into row_slots that get no token."""
        row_slots = [self.config.max_num_seqs if i in late else slot for i, slot in enumerate(row_slots)]
        bucket, masked = self._table.fit("head_sample", len(row_slots)), bitmask is not None
        wishes = step_input.HeadWishes(want_logprobs, masked, extras.sampling_mask)
        packed = step_input.pack_head(row_slots, token_indices, bucket, self.config.max_num_seqs, wishes)
        mask: jax.Array | np.ndarray = self._no_mask[bucket]
        if bitmask is not None:
            mask = np.zeros((bucket, self._programs.shapes.mask_words), np.int32)
            mask[: len(bitmask)] = bitmask
        ids: jax.Array | np.ndarray = self._no_ids[bucket]
        if extras.logprob_ids is not None:
            ids = np.zeros((bucket, MAX_LOGPROB_IDS), np.int32)
            ids[: len(row_slots)] = extras.logprob_ids
        program = self._by_size["head_sample"][bucket]
        self._num_dispatches += 1
        self.state, sampled = program(self._weights, self.state, self.hidden, packed, mask, ids)
        return sampled
