"""Dispatch of outputs that few rows request: embeddings, hidden states, log-probabilities of prompt tokens.

They are computed from the hidden states of the last extend or decode_hidden, in programs of a fixed number of tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax
import numpy as np

from jaxserve.runtime.program_set import POOL_GROUP, PROMPT_CHUNK
from jaxserve.runtime.programs import Leaves
from jaxserve.runtime.sampling.extras import TokensOf, hidden_tokens, pack_ids
from jaxserve.runtime.steps.step_handle import Pooled, PromptChunk
from jaxserve.types.extras import ExtraParams
from jaxserve.types.step import ScheduledRow, SlotInit


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
        """Dispatch the embeddings, or numbers of a head, of the rows `embedding`, from hidden [max T, D]."""
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
