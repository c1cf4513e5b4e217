"""A dispatched step: its results are device arrays that are being copied to the host."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from jaxserve.runtime.sampling.details import TokensOf, fetch_details, fetch_hidden, spread
from jaxserve.runtime.sampling.logprobs import unpack_logprobs
from jaxserve.runtime.sampling.sampler import Sampled
from jaxserve.types.step import RowStatus, SampledTokens

Pooled = tuple[Sequence[int], jax.Array]
PromptLogprobs = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


class PromptChunk(NamedTuple):
    """Log-probabilities of `num_valid` prompt tokens on the device.

    packed: int32 [C, 2 + 2K] of `pack_logprobs`. watched: int32 [C, N], None if no ids are requested.
    """

    packed: jax.Array
    num_valid: int
    watched: jax.Array | None = None


class DeviceStep:
    """The `StepHandle` of a step of R rows.

    sampling        the rows that got a token, ascending; sampled holds them first, in this order
    finish          of a masked step: bitmask of the sampling rows, and which of them get no token -> Sampled
    prompt          row -> the chunks of its log-probabilities, in order
    pooled          [(rows, embeddings on the device [n and more, D], of these rows in order)]
    hidden          [(rows, hidden states on the device), likewise; a row may have several]
    experts         int32 [T, L, K] on the device, of which the slices of expert_rows (row -> tokens) are asked for
    detailed        whether `Sampled.watched` and `Sampled.support` are asked for
    finite          bool [R and more] on the device: whether the hidden states of a row are; None: the sampler says it
    """

    def __init__(
        self,
        num_rows: int,
        sampling: Sequence[int],
        sampled: Sampled | None,
        want_logprobs: bool,
        *,
        finish: Callable[[np.ndarray, Collection[int]], Sampled] | None = None,
        prompt: dict[int, list[PromptChunk]] | None = None,
        pooled: Sequence[Pooled] = (),
        hidden: Sequence[TokensOf] = (),
        detailed: bool = False,
        finite: jax.Array | None = None,
        experts: jax.Array | None = None,
        expert_rows: Mapping[int, slice] | None = None,
    ) -> None:
        self._num_rows = num_rows
        self._sampling = sampling
        self._want_logprobs = want_logprobs
        self._finish = finish
        self._late: list[int] = []
        self._prompt = prompt or {}
        self._pooled = pooled
        self._hidden = hidden
        self._detailed = detailed
        self._finite = finite
        self._experts = experts if expert_rows else None
        self._expert_rows = expert_rows or {}
        _copy_async(self._finite, self._experts)
        self._sampled = sampled
        self._copy_async()
        for chunks in self._prompt.values():
            for chunk in chunks:
                _copy_async(chunk.packed, chunk.watched)
        for _, vectors in (*pooled, *hidden):
            vectors.copy_to_host_async()

    @property
    def waits_for_mask(self) -> bool:
        return self._finish is not None

    def sample(self, bitmask: np.ndarray, late: Sequence[int] = ()) -> None:
        """Dispatch head and sampler of a masked step. bitmask: int32 [R, W]. late: rows that get no token.

        Raises RuntimeError if the step is not masked or was sampled already.
        """
        if self._finish is None:
            raise RuntimeError("this step is not masked, or was sampled already")
        self._late = list(late)
        self._sampled = self._finish(bitmask[self._sampling], {self._sampling.index(row) for row in late})
        self._finish = None
        self._copy_async()

    def _copy_async(self) -> None:
        if self._sampled is not None:
            self._sampled.tokens.copy_to_host_async()
            if self._want_logprobs:
                self._sampled.logprobs.copy_to_host_async()
            if self._detailed:
                _copy_async(self._sampled.watched, self._sampled.support)

    def result(self) -> SampledTokens:
        """Wait for the step and return its tokens. Rows that did not sample have num_valid 0.

        Raises RuntimeError if the step still waits for `sample`.
        """
        if self._finish is not None:
            raise RuntimeError("a masked step has no result before sample(bitmask)")
        tokens = np.zeros((self._num_rows, 2), np.int32)
        valid = np.zeros(self._num_rows, np.int32)
        logprobs: tuple[np.ndarray | None, ...] = (None,) * 4
        details = None
        if self._sampled is not None:
            tokens[self._sampling] = np.asarray(self._sampled.tokens)[: len(self._sampling)]
            valid[self._sampling] = 1
            tokens[self._late], valid[self._late] = 0, 0
            if self._want_logprobs:
                logprobs = self._spread_logprobs(np.asarray(self._sampled.logprobs))
            if self._detailed:
                details = fetch_details(self._sampled, self._sampling, self._num_rows)
        embeddings = fetch_embeddings(self._pooled)
        return SampledTokens(
            token_ids=tokens[:, :1],
            num_valid=valid,
            status=self._status(tokens[:, 1], embeddings),
            logprobs=logprobs[0],
            ranks=logprobs[1],
            top_ids=logprobs[2],
            top_logprobs=logprobs[3],
            prompt_logprobs={row: _join(chunks) for row, chunks in self._prompt.items()} or None,
            embeddings=embeddings,
            details=details,
            prompt_watched={row: w for row, chunks in self._prompt.items() if (w := _join_watched(chunks)) is not None},
            hidden=fetch_hidden(self._hidden),
            experts=self._fetch_experts(),
        )

    def _status(self, sampled: np.ndarray, embeddings: Mapping[int, np.ndarray]) -> np.ndarray:
        """Return the RowStatus of each row, uint8 [R]. sampled: int32 [R], 0 for rows without a token."""
        status = sampled.astype(np.uint8)
        if self._finite is not None:
            status[~np.asarray(self._finite)[: self._num_rows]] = RowStatus.NOT_FINITE
        for row, embedding in embeddings.items():
            if not np.isfinite(embedding).all():
                status[row] = RowStatus.NOT_FINITE
        return status

    def _fetch_experts(self) -> dict[int, np.ndarray] | None:
        if self._experts is None:
            return None
        experts = np.asarray(self._experts)
        return {row: experts[tokens] for row, tokens in self._expert_rows.items()}

    def _spread_logprobs(self, packed: np.ndarray) -> tuple[np.ndarray, ...]:
        rows = spread(packed, self._sampling, self._num_rows)
        return tuple(values[:, None] for values in unpack_logprobs(rows))


def _copy_async(*arrays: jax.Array | None) -> None:
    for array in arrays:
        if array is not None:
            array.copy_to_host_async()


def fetch_embeddings(pooled: Sequence[Pooled]) -> dict[int, np.ndarray]:
    """Return the embedding of each row, float32 [D]."""
    arrays = [(rows, np.asarray(embeddings)) for rows, embeddings in pooled]
    return {row: array[i] for rows, array in arrays for i, row in enumerate(rows)}


def _join(chunks: list[PromptChunk]) -> PromptLogprobs:
    return unpack_logprobs(np.concatenate([np.asarray(chunk.packed)[: chunk.num_valid] for chunk in chunks]))


def _join_watched(chunks: list[PromptChunk]) -> np.ndarray | None:
    """Join to float32 [n, MAX_WATCHED]."""
    found = [np.asarray(chunk.watched)[: chunk.num_valid] for chunk in chunks if chunk.watched is not None]
    return np.concatenate(found).view(np.float32) if found else None
