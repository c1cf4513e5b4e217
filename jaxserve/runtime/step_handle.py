"""A dispatched step: device arrays on their way to the host, and what is left to do with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import numpy as np

from jaxserve.engine.request import SampledTokens
from jaxserve.runtime.sampler import Sampled, unpack_logprobs

Pooled = tuple[Sequence[int], jax.Array]
PromptLogprobs = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


class DeviceStep:
    """The `StepHandle` of a step of R rows.

    sampling        the rows that got a token, ascending; sampled holds them first, in this order
    finish          of a masked step: bitmask of the sampling rows -> Sampled
    prompt          row -> [packed log-probabilities on the device, valid entries], in order
    pooled          [(rows, embeddings on the device [n and more, D], of these rows in order)]
    """

    def __init__(
        self,
        num_rows: int,
        sampling: Sequence[int],
        sampled: Sampled | None,
        want_logprobs: bool,
        *,
        finish: Callable[[np.ndarray], Sampled] | None = None,
        prompt: dict[int, list[tuple[jax.Array, int]]] | None = None,
        pooled: Sequence[Pooled] = (),
    ) -> None:
        self._num_rows = num_rows
        self._sampling = sampling
        self._want_logprobs = want_logprobs
        self._finish = finish
        self._prompt = prompt or {}
        self._pooled = pooled
        self._sampled = sampled
        self._copy_async()
        for chunks in self._prompt.values():
            for packed, _ in chunks:
                packed.copy_to_host_async()
        for _, embeddings in pooled:
            embeddings.copy_to_host_async()

    @property
    def waits_for_mask(self) -> bool:
        return self._finish is not None

    def sample(self, bitmask: np.ndarray) -> None:
        """Dispatch head and sampler of a masked step. bitmask: int32 [R, W]. Raises RuntimeError on other steps."""
        if self._finish is None:
            raise RuntimeError("this step is not masked, or was sampled already")
        self._sampled = self._finish(bitmask[self._sampling])
        self._finish = None
        self._copy_async()

    def _copy_async(self) -> None:
        if self._sampled is not None:
            self._sampled.tokens.copy_to_host_async()
            if self._want_logprobs:
                self._sampled.logprobs.copy_to_host_async()

    def result(self) -> SampledTokens:
        """Wait for the step. Rows that did not sample have num_valid 0 and ok True."""
        if self._finish is not None:
            raise RuntimeError("a masked step has no result before sample(bitmask)")
        tokens = np.zeros((self._num_rows, 2), np.int32)
        tokens[:, 1] = 1
        valid = np.zeros(self._num_rows, np.int32)
        logprobs: tuple[np.ndarray | None, ...] = (None,) * 4
        if self._sampled is not None:
            tokens[self._sampling] = np.asarray(self._sampled.tokens)[: len(self._sampling)]
            valid[self._sampling] = 1
            if self._want_logprobs:
                logprobs = self._spread_logprobs(np.asarray(self._sampled.logprobs))
        embeddings = fetch_embeddings(self._pooled)
        for row, embedding in embeddings.items():
            tokens[row, 1] = np.isfinite(embedding).all()
        return SampledTokens(
            token_ids=tokens[:, :1],
            num_valid=valid,
            ok=tokens[:, 1] > 0,
            logprobs=logprobs[0],
            ranks=logprobs[1],
            top_ids=logprobs[2],
            top_logprobs=logprobs[3],
            prompt_logprobs={row: _join(chunks) for row, chunks in self._prompt.items()} or None,
            embeddings=embeddings,
        )

    def _spread_logprobs(self, packed: np.ndarray) -> tuple[np.ndarray, ...]:
        rows = np.zeros((self._num_rows, packed.shape[1]), np.int32)
        rows[self._sampling] = packed[: len(self._sampling)]
        return tuple(values[:, None] for values in unpack_logprobs(rows))


def fetch_embeddings(pooled: Sequence[Pooled]) -> dict[int, np.ndarray]:
    """By row, float32 [D]."""
    arrays = [(rows, np.asarray(embeddings)) for rows, embeddings in pooled]
    return {row: array[i] for rows, array in arrays for i, row in enumerate(rows)}


def _join(chunks: list[tuple[jax.Array, int]]) -> PromptLogprobs:
    return unpack_logprobs(np.concatenate([np.asarray(packed)[:count] for packed, count in chunks]))
