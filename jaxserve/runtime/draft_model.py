"""A draft model on the device: a small model with the served model's vocabulary that guesses the next tokens.

It computes each token that the served model computes, in the same program, and keeps its K and V in further layers of
layer group 0: on the same pages, so that prefix hits, preemption and copies of pages need nothing of their own. After a
step it continues each row greedily. Its K and V of guessed tokens lie behind the row's last token, where the next step
writes again. Its numbers never reach the served model, so a wrong guess costs time and changes no token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxserve.errors import ConfigError
from jaxserve.models.config import ModelConfig
from jaxserve.models.decoder import AttendLayer, CausalLM
from jaxserve.models.layers import Cache, StateInputs
from jaxserve.ops.linear import Products
from jaxserve.ops.paged_attention import Heads
from jaxserve.runtime.kv_cache import LayerCache
from jaxserve.runtime.step_input import FROM_DEVICE, TokenInput

Leaves = tuple[jax.Array, ...]
Caches = tuple[Cache, ...]
# the tokens of rows of one token each -> the attention of all layers, the served model's first
AttendTo = Callable[[TokenInput], AttendLayer]


@dataclass(frozen=True)
class DraftModel:
    """The device side of a draft model.

    bind: makes the model from its own leaves while tracing. first_leaf, first_layer: number of leaves and layers of the
    served model, which come first. layers: its caches. count: drafts of a row
    """

    bind: Callable[[Leaves], CausalLM]
    first_leaf: int
    first_layer: int
    layers: tuple[LayerCache, ...]
    linear: Products
    count: int

    def run(self, leaves: Leaves, tokens: TokenInput, caches: Caches, attend: AttendLayer) -> tuple[jax.Array, Caches]:
        """Compute T tokens -> (hidden states [T, D], the caches of the draft model).

        leaves: the weights of both models. caches: of the draft model. attend: of the layers of both
        """
        first = self.first_layer

        def attend_own(
            layer_index: int, heads: Heads | StateInputs, cache: Cache, sinks: jax.Array | None = None
        ) -> tuple[jax.Array, Cache]:
            """Attend the heads of T tokens in a layer of the draft model -> (out [T, N, H], cache)."""
            return attend(first + layer_index, heads, cache, sinks)

        model = self.bind(leaves[self.first_leaf :])
        return model(tokens.token_ids, tokens.positions, caches, attend_own, self.linear)

    def propose(
        self, leaves: Leaves, tokens: TokenInput, room: jax.Array, caches: Caches, attend_to: AttendTo
    ) -> tuple[jax.Array, Caches]:
        """Continue rows greedily -> (drafts int32 [R, count], -1: none; the caches of the draft model).

        tokens: the last token of each of R rows. room: int32 [R], tokens that fit the row's pages. A row ends where its
        pages end, because the place behind them belongs to another row.
        """
        model, drafts = self.bind(leaves[self.first_leaf :]), []
        index = jnp.arange(room.shape[0], dtype=jnp.int32)
        token = tokens.token_ids
        for place in range(self.count):
            live = (tokens.num_tokens > 0) & (tokens.positions + place < room)
            positions = jnp.where(live, tokens.positions + place, 0)
            row = jnp.where(live, index, room.shape[0])
            now = TokenInput(token, positions, row, tokens.slots, positions, live.astype(jnp.int32))
            hidden, caches = self.run(leaves, now, caches, attend_to(now))
            token = jnp.argmax(model.logits(hidden, self.linear), axis=1).astype(jnp.int32)
            drafts.append(jnp.where(live, token, FROM_DEVICE))
        return jnp.stack(drafts, axis=1), caches


def check_draft_model(draft: ModelConfig, served: ModelConfig) -> None:
    """Raise ConfigError if `draft` cannot guess tokens of `served`."""
    fix = "set speculation.draft_model to a smaller model of the same family"
    if draft.bidirectional or draft.labels or any(draft.layer_states):
        raise ConfigError(f"speculation.draft_model: {draft.architecture} cannot be a draft model", fix=fix)
    if (count := draft.vocab_size) != served.vocab_size:
        raise ConfigError(
            f"speculation.draft_model has {count} tokens in its vocabulary, and the model {served.vocab_size}", fix=fix
        )
