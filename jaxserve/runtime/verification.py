"""Run steps with drafts, on the host side of the runner: their input, dispatch and results. See sampling/verify.py."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import jax
import numpy as np

from jaxserve.runtime.compilation.buckets import verify_rows
from jaxserve.runtime.compilation.program_table import ProgramTable
from jaxserve.runtime.programs import Leaves
from jaxserve.runtime.sampling.logprobs import unpack_logprobs
from jaxserve.runtime.sampling.slots import SlotState
from jaxserve.runtime.sampling.verify import Verified
from jaxserve.runtime.steps import step_input
from jaxserve.types.step import SampledTokens, ScheduledRow, SchedulerOutput

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
    """The `StepHandle` of a step with drafts. finish: (masks or None, rows that get no token) -> the results."""

    def __init__(self, rows: Sequence[ScheduledRow], finish: Finish, *, masked: bool) -> None:
        self._num_rows = len(rows)
        self._want_logprobs = any(row.logprobs is not None for row in rows)
        self._finish = finish
        self._verified: Verified | None = None
        self._late: list[int] = []
        if not masked:
            self._run(None)

    @property
    def waits_for_mask(self) -> bool:
        return self._verified is None

    def sample(self, bitmask: np.ndarray, late: Sequence[int] = ()) -> None:
        """See `StepHandle`. bitmask: int32 [positions, words]. Raises RuntimeError if the step waits for none."""
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
        )
