"""A dispatched step: its results are device arrays that are being copied to the host."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import numpy as np

from jaxserve.runtime.sampling.extras import DeviceExtras, spread
from jaxserve.runtime.sampling.logprobs import unpack_logprobs
from jaxserve.runtime.sampling.sampler import Sampled
from jaxserve.types.extras import StepExtras
from jaxserve.types.step import RowStatus, SampledTokens

Pooled = tuple[Sequence[int], jax.Array]
PromptLogprobs = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


class PromptChunk(NamedTuple):
    """Log-probabilities of `num_valid` prompt tokens on the device.

    packed: int32 [C, 2 + 2K] of `pack_logprobs`. id_logprobs: int32 [C, N], None if no ids are requested.
    """

    packed: jax.Array
    num_valid: int
    id_logprobs: jax.Array | None = None


@dataclass(frozen=True, kw_only=True)
class StepOutputs:
    """What a step of R rows yields besides its tokens. Arrays are on the device.

    logprobs        whether `Sampled.logprobs` are requested
    prompt          row -> the chunks of its log-probabilities, in order
    pooled          [(rows, embeddings [n and more, D], of these rows in order)]
    finite          bool [R and more]: whether the hidden states of a row are; None: the sampler says it
    extras          None: no row requests extra outputs
    """

    logprobs: bool = False
    prompt: Mapping[int, list[PromptChunk]] = field(default_factory=dict)
    pooled: Sequence[Pooled] = ()
    finite: jax.Array | None = None
    extras: DeviceExtras | None = None

    def arrays(self) -> Iterator[jax.Array]:
        """Yield the arrays to copy to the host, without those of `Sampled`."""
        chunks = itertools.chain.from_iterable(self.prompt.values())
        wanted = itertools.chain(
            [self.finite],
            *((chunk.packed, chunk.id_logprobs) for chunk in chunks),
            (vectors for _, vectors in self.pooled),
            () if self.extras is None else self.extras.arrays(),
        )
        yield from (array for array in wanted if array is not None)


Finish = Callable[[np.ndarray, Collection[int]], Sampled]


class DeviceStep:
    """The `StepHandle` of a step of R rows.

    sampling        the rows that got a token, ascending; sampled holds them first, in this order
    finish          of a masked step: bitmask of the sampling rows, and which of them get no token -> Sampled
    """

    def __init__(
        self,
        num_rows: int,
        sampling: Sequence[int],
        sampled: Sampled | None,
        outputs: StepOutputs,
        finish: Finish | None = None,
    ) -> None:
        self._num_rows = num_rows
        self._sampling = sampling
        self._sampled = sampled
        self._outputs = outputs
        self._finish = finish
        self._late: list[int] = []
        for array in outputs.arrays():
            array.copy_to_host_async()
        self._copy_async()

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
            if self._outputs.logprobs:
                self._sampled.logprobs.copy_to_host_async()
            if self._outputs.extras is not None:
                for array in self._outputs.extras.sampled_arrays(self._sampled):
                    array.copy_to_host_async()

    def result(self) -> SampledTokens:
        """Wait for the step and return its tokens. Rows that did not sample have num_valid 0.

        Raises RuntimeError if the step still waits for `sample`.
        """
        if self._finish is not None:
            raise RuntimeError("a masked step has no result before sample(bitmask)")
        tokens = np.zeros((self._num_rows, 2), np.int32)
        valid = np.zeros(self._num_rows, np.int32)
        logprobs: tuple[np.ndarray | None, ...] = (None,) * 4
        if self._sampled is not None:
            tokens[self._sampling] = np.asarray(self._sampled.tokens)[: len(self._sampling)]
            valid[self._sampling] = 1
            tokens[self._late], valid[self._late] = 0, 0
            if self._outputs.logprobs:
                logprobs = self._spread_logprobs(np.asarray(self._sampled.logprobs))
        embeddings = fetch_embeddings(self._outputs.pooled)
        return SampledTokens(
            token_ids=tokens[:, :1],
            num_valid=valid,
            status=self._status(tokens[:, 1], embeddings),
            logprobs=logprobs[0],
            ranks=logprobs[1],
            top_ids=logprobs[2],
            top_logprobs=logprobs[3],
            prompt_logprobs={row: _join(chunks) for row, chunks in self._outputs.prompt.items()} or None,
            embeddings=embeddings,
            extras=None if self._outputs.extras is None else self._fetch_extras(self._outputs.extras),
        )

    def _fetch_extras(self, extras: DeviceExtras) -> StepExtras:
        joined = {row: _join_ids(chunks) for row, chunks in self._outputs.prompt.items()}
        of_prompt = {row: values for row, values in joined.items() if values is not None}
        return extras.fetch(self._sampled, self._sampling, self._num_rows, of_prompt)

    def _status(self, sampled: np.ndarray, embeddings: Mapping[int, np.ndarray]) -> np.ndarray:
        """Return the RowStatus of each row, uint8 [R]. sampled: int32 [R], 0 for rows without a token."""
        status = sampled.astype(np.uint8)
        if self._outputs.finite is not None:
            status[~np.asarray(self._outputs.finite)[: self._num_rows]] = RowStatus.NOT_FINITE
        for row, embedding in embeddings.items():
            if not np.isfinite(embedding).all():
                status[row] = RowStatus.NOT_FINITE
        return status

    def _spread_logprobs(self, packed: np.ndarray) -> tuple[np.ndarray, ...]:
        rows = spread(packed, self._sampling, self._num_rows)
        return tuple(values[:, None] for values in unpack_logprobs(rows))


def fetch_embeddings(pooled: Sequence[Pooled]) -> dict[int, np.ndarray]:
    """Return the embedding of each row, float32 [D]."""
    arrays = [(rows, np.asarray(embeddings)) for rows, embeddings in pooled]
    return {row: array[i] for rows, array in arrays for i, row in enumerate(rows)}


def _join(chunks: list[PromptChunk]) -> PromptLogprobs:
    return unpack_logprobs(np.concatenate([np.asarray(chunk.packed)[: chunk.num_valid] for chunk in chunks]))


def _join_ids(chunks: list[PromptChunk]) -> np.ndarray | None:
    """Join to float32 [n, MAX_LOGPROB_IDS]."""
    found = [np.asarray(chunk.id_logprobs)[: chunk.num_valid] for chunk in chunks if chunk.id_logprobs is not None]
    return np.concatenate(found).view(np.float32) if found else None
