"""Extra outputs of a step (types/extras.py) on the host side of the runner.

It finds the rows that request them, and converts device arrays to StepExtras.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from jaxserve.runtime.sampling.logprobs import unpack_logprobs
from jaxserve.runtime.sampling.sampler import Sampled
from jaxserve.types.extras import MAX_LOGPROB_IDS, ExtraParams, SamplingMasks, StepExtras
from jaxserve.types.step import ScheduledRow

TokensOf = tuple[Sequence[int], jax.Array]  # the row of each token, and a device array with one entry per token
NOTHING = ExtraParams()


@dataclass(frozen=True)
class HeadExtras:
    """The extra outputs of head and sampler that the sampling rows of a step request.

    logprob_ids: int32 [R, MAX_LOGPROB_IDS], tokens whose log-probabilities are requested; None if no row has any.
    sampling_mask: at least one row requests the candidates of its token.
    """

    logprob_ids: np.ndarray | None = None
    sampling_mask: bool = False

    @classmethod
    def of(cls, rows: Sequence[ScheduledRow]) -> HeadExtras:
        """Collect the requests of the sampling rows."""
        asked = [row.extras or NOTHING for row in rows]
        return cls(
            np.stack([pack_ids(each) for each in asked]) if any(each.logprob_token_ids for each in asked) else None,
            any(each.sampling_mask for each in asked),
        )

    @property
    def wanted(self) -> bool:
        return self.sampling_mask or self.logprob_ids is not None


def pack_ids(params: ExtraParams) -> np.ndarray:
    """Return the requested ids as int32 [MAX_LOGPROB_IDS], padded with token 0."""
    ids = np.zeros(MAX_LOGPROB_IDS, np.int32)
    ids[: len(params.logprob_token_ids)] = params.logprob_token_ids
    return ids


def hidden_tokens(rows: Sequence[ScheduledRow], ends: Sequence[int]) -> list[tuple[int, int]]:
    """Return (row, token of the step) of every requested hidden state. ends: end of each row's tokens in the step."""
    tokens = []
    for i, row in enumerate(rows):
        mode = (row.extras or NOTHING).hidden_states
        end = ends[i]
        if mode == "all" and row.token_ids:
            tokens += [(i, token) for token in range(end - row.num_tokens, end)]
        elif mode and row.samples:
            tokens.append((i, end - 1))
    return tokens


def fetch_hidden(groups: Sequence[TokensOf]) -> dict[int, np.ndarray]:
    """Return the hidden states of each row, float32 [its tokens, D]."""
    found: dict[int, list[np.ndarray]] = {}
    for rows, states in groups:
        for row, state in zip(rows, np.asarray(states), strict=False):
            found.setdefault(row, []).append(state)
    return {row: np.stack(states) for row, states in found.items()}


def expert_tokens(rows: Sequence[ScheduledRow], ends: Sequence[int]) -> dict[int, slice]:
    """Return, for each row that requests routed experts, its tokens in the step. ends: as in `hidden_tokens`."""
    return {
        i: slice(ends[i] - row.num_tokens, ends[i])
        for i, row in enumerate(rows)
        if row.extras is not None and row.extras.routed_experts
    }


@dataclass(frozen=True, kw_only=True)
class DeviceExtras:
    """The extra outputs of a step on the device.

    head        whether `Sampled.id_logprobs` and `Sampled.candidates` are requested
    hidden      [(rows, hidden states [n and more, D], of these rows in order)]; a row may have several
    experts     int32 [T, L, K], of which the slices of expert_tokens (row -> tokens) are requested
    """

    head: bool
    hidden: Sequence[TokensOf]
    experts: jax.Array | None
    expert_tokens: Mapping[int, slice]

    def arrays(self) -> list[jax.Array]:
        """Return the arrays to copy to the host, without `Sampled`'s."""
        states = [vectors for _, vectors in self.hidden]
        return states if self.experts is None or not self.expert_tokens else [*states, self.experts]

    def sampled_arrays(self, sampled: Sampled) -> list[jax.Array]:
        """Return the arrays of `sampled` to copy to the host."""
        found = (sampled.id_logprobs, sampled.candidates) if self.head else ()
        return [array for array in found if array is not None]

    def fetch(
        self,
        sampled: Sampled | None,
        sampling: Sequence[int],
        num_rows: int,
        prompt_id_logprobs: Mapping[int, np.ndarray],
    ) -> StepExtras:
        """Wait for the arrays and return the extras of `num_rows` rows.

        sampling: the rows that `sampled` holds, in order. prompt_id_logprobs: of each row, float32 [n, MAX_LOGPROB_IDS]
        """
        id_logprobs = masks = None
        if self.head and sampled is not None:
            assert sampled.id_logprobs is not None and sampled.candidates is not None
            id_logprobs = spread(np.asarray(sampled.id_logprobs), sampling, num_rows).view(np.float32)
            masks = SamplingMasks(*unpack_logprobs(spread(np.asarray(sampled.candidates), sampling, num_rows)))
        return StepExtras(id_logprobs, prompt_id_logprobs, masks, fetch_hidden(self.hidden), self._fetch_experts())

    def _fetch_experts(self) -> dict[int, np.ndarray] | None:
        if self.experts is None or not self.expert_tokens:
            return None
        experts = np.asarray(self.experts)
        return {row: experts[tokens] for row, tokens in self.expert_tokens.items()}


def spread(packed: np.ndarray, sampling: Sequence[int], num_rows: int) -> np.ndarray:
    """Spread packed int32 [bucket, n], one entry per sampling row, to int32 [num_rows, n]. Other rows get zeros."""
    rows = np.zeros((num_rows, packed.shape[1]), np.int32)
    rows[sampling] = packed[: len(sampling)]
    return rows
