"""Rare outputs of a step: log-probabilities of requested ids, candidates of a draw, hidden states, routed experts.

This is the host side: it finds the rows that request them, and converts device arrays to the fields of SampledTokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np

from jaxserve.runtime.sampling.logprobs import unpack_logprobs
from jaxserve.runtime.sampling.sampler import Sampled
from jaxserve.types.sampling import MAX_WATCHED, SamplingParams
from jaxserve.types.step import Details, ScheduledRow

TokensOf = tuple[Sequence[int], jax.Array]  # the row of each token, and a device array with one entry per token


@dataclass(frozen=True)
class Asked:
    """The rare outputs that the sampling rows of a step request.

    watched_ids: int32 [R, MAX_WATCHED], tokens whose log-probabilities are requested; None if no row has any.
    support: at least one row requests the candidates of its draw (the sampling mask).
    """

    watched_ids: np.ndarray | None = None
    support: bool = False

    @classmethod
    def of(cls, rows: Sequence[ScheduledRow]) -> Asked:
        """Collect the requests of the sampling rows."""
        details = [row.detail for row in rows]
        if not any(details):
            return cls()
        watched = any(detail is not None and detail.logprob_token_ids for detail in details)
        return cls(
            np.stack([pack_watched(detail) for detail in details]) if watched else None,
            any(detail is not None and detail.support for detail in details),
        )

    @property
    def anything(self) -> bool:
        return self.support or self.watched_ids is not None


def pack_watched(params: SamplingParams | None) -> np.ndarray:
    """Return the requested ids as int32 [MAX_WATCHED], padded with token 0."""
    ids = np.zeros(MAX_WATCHED, np.int32)
    if params is not None:
        ids[: len(params.logprob_token_ids)] = params.logprob_token_ids
    return ids


def hidden_places(rows: Sequence[ScheduledRow], ends: Sequence[int]) -> list[tuple[int, int]]:
    """Return (row, token of the step) of every requested hidden state. ends: end of each row's tokens in the step."""
    places = []
    for i, row in enumerate(rows):
        mode = "" if row.detail is None else row.detail.hidden_states
        end = ends[i]
        if mode == "all" and row.token_ids:
            places += [(i, token) for token in range(end - row.num_tokens, end)]
        elif mode and row.samples:
            places.append((i, end - 1))
    return places


def expert_places(rows: Sequence[ScheduledRow], ends: Sequence[int]) -> dict[int, slice]:
    """Return, for each row that requests routed experts, its tokens in the step. ends: as in `hidden_places`."""
    return {
        i: slice(ends[i] - row.num_tokens, ends[i])
        for i, row in enumerate(rows)
        if row.detail is not None and row.detail.experts
    }


def fetch_hidden(groups: Sequence[TokensOf]) -> dict[int, np.ndarray]:
    """Return the hidden states of each row, float32 [its tokens, D]."""
    found: dict[int, list[np.ndarray]] = {}
    for rows, states in groups:
        for row, state in zip(rows, np.asarray(states), strict=False):
            found.setdefault(row, []).append(state)
    return {row: np.stack(states) for row, states in found.items()}


def fetch_details(sampled: Sampled, sampling: Sequence[int], num_rows: int) -> Details:
    """Convert the rare outputs of a step of `num_rows` rows. sampling: the rows that `sampled` holds, in order."""
    assert sampled.watched is not None and sampled.support is not None
    watched = spread(np.asarray(sampled.watched), sampling, num_rows).view(np.float32)
    return Details(watched, *unpack_logprobs(spread(np.asarray(sampled.support), sampling, num_rows)))


def spread(packed: np.ndarray, sampling: Sequence[int], num_rows: int) -> np.ndarray:
    """Spread packed int32 [bucket, n], one entry per sampling row, to int32 [num_rows, n]. Other rows get zeros."""
    rows = np.zeros((num_rows, packed.shape[1]), np.int32)
    rows[sampling] = packed[: len(sampling)]
    return rows
