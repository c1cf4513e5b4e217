"""Drafts on the device: a small model with the served model's vocabulary, or a head, guesses the next tokens.

It computes each token that the served model computes, in the same program, and keeps its K and V in further layers of
layer group 0: on the same pages, so that prefix hits, preemption and copies of pages need nothing of their own. After a
step it continues each row greedily. Its K and V of guessed tokens lie behind the row's last token, where the next step
writes again. Its numbers never reach the served model, so a wrong guess costs time and changes no token.

A head (`models.draft_head`) makes K and V of position p from the model's hidden state of p and the token at p + 1. So a
step that computes the tokens [start, end) runs it at [start - 1, end - 1): the slot keeps the hidden states of its last
positions, one of which a row begins with. Behind a prefix hit the slot has none. Then the row runs it at [start, end),
the last time with a wrong token, which the next step or the next guess replaces. So it never writes a page of the hit,
whose last position may hold another request's token: that costs a little acceptance for as long as a head sees it.
Layer k of a head makes K and V of p with the token at p + 1 + k, so it runs at [start - 1 - k, end - 1 - k).

A step may leave it out (`SchedulerOutput.rests`). Its pages then keep what they held at these positions: zeros, K and V
of rejected guesses, or those of a former owner, which need not be finite. Nothing but later guesses reads them. A head
that goes on behind such steps begins as behind a prefix hit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxserve.errors import ConfigError
from jaxserve.models.config import EagleHead, ModelConfig, PredictorHead
from jaxserve.models.decoder import AttendLayer, CausalLM
from jaxserve.models.draft_head import DraftHead
from jaxserve.models.layers import Cache, StateInputs
from jaxserve.ops.linear import Products
from jaxserve.ops.paged_attention import Heads
from jaxserve.runtime.sampling.slots import SlotState
from jaxserve.runtime.step_input import FROM_DEVICE, TokenInput

Leaves = tuple[jax.Array, ...]
Caches = tuple[Cache, ...]
# tokens -> the attention of all layers, the served model's first
AttendTo = Callable[[TokenInput], AttendLayer]


class ServedTokens(NamedTuple):
    """T tokens of the served model.

    hidden: [T, D], the hidden states that the drafts depend on (`DraftHead.taps`): after the final norm, or inside the
    model; (): the tokens are not computed yet
    """

    model: CausalLM
    tokens: TokenInput
    hidden: tuple[jax.Array, ...]


@dataclass(frozen=True, kw_only=True)
class Guesser(ABC):
    """The device side of a draft model or head.

    first_leaf, first_layer: number of leaves and layers of the served model, which come first. linear: its own products
    count: drafts of a row. taps: as of `DraftHead`
    """

    first_leaf: int
    first_layer: int
    linear: Products
    count: int
    taps: tuple[int, ...] = ()

    @abstractmethod
    def follow(
        self, leaves: Leaves, step: ServedTokens, caches: Caches, state: SlotState, attend_to: AttendTo
    ) -> tuple[Caches, SlotState]:
        """Compute the tokens of a step too -> (its caches, the state, which keeps what the next guesses begin with).

        leaves: the weights of both models. caches: its own. attend_to: makes the attention of tokens over
        these caches
        """

    @abstractmethod
    def propose(
        self, leaves: Leaves, last: ServedTokens, room: jax.Array, caches: Caches, state: SlotState, attend_to: AttendTo
    ) -> tuple[jax.Array, Caches]:
        """Continue rows greedily -> (drafts int32 [R, count], -1: none; its caches).

        last: the last token of each of R rows. room: int32 [R], tokens that fit the row's pages. A row ends where its
        pages end, because the place behind them belongs to another row. The other arguments: as in `follow`
        """


@dataclass(frozen=True, kw_only=True)
class DraftModel(Guesser):
    """A draft model. bind: makes it from its own leaves while tracing"""

    bind: Callable[[Leaves], CausalLM]

    def follow(
        self, leaves: Leaves, step: ServedTokens, caches: Caches, state: SlotState, attend_to: AttendTo
    ) -> tuple[Caches, SlotState]:
        _, caches = self._run(leaves, step.tokens, caches, attend_to(step.tokens))
        return caches, state

    def _run(self, leaves: Leaves, tokens: TokenInput, caches: Caches, attend: AttendLayer) -> tuple[jax.Array, Caches]:
        """Compute T tokens -> (hidden states [T, D], its caches). attend: of the layers of both models"""
        first = self.first_layer

        def attend_own(
            layer_index: int, heads: Heads | StateInputs, cache: Cache, sinks: jax.Array | None = None
        ) -> tuple[jax.Array, Cache]:
            """Attend the heads of T tokens in a layer of the draft model -> (out [T, N, H], cache)."""
            return attend(first + layer_index, heads, cache, sinks)

        model = self.bind(leaves[self.first_leaf :])
        return model(tokens.token_ids, tokens.positions, caches, attend_own, self.linear)

    def propose(
        self, leaves: Leaves, last: ServedTokens, room: jax.Array, caches: Caches, state: SlotState, attend_to: AttendTo
    ) -> tuple[jax.Array, Caches]:
        tokens = last.tokens
        model, drafts = self.bind(leaves[self.first_leaf :]), []
        index = jnp.arange(room.shape[0], dtype=jnp.int32)
        token = tokens.token_ids
        for place in range(self.count):
            live = (tokens.num_tokens > 0) & (tokens.positions + place < room)
            positions = jnp.where(live, tokens.positions + place, 0)
            row = jnp.where(live, index, room.shape[0])
            now = TokenInput(token, positions, row, tokens.slots, positions, live.astype(jnp.int32))
            hidden, caches = self._run(leaves, now, caches, attend_to(now))
            token = jnp.argmax(model.logits(hidden, self.linear), axis=1).astype(jnp.int32)
            drafts.append(jnp.where(live, token, FROM_DEVICE))
        return jnp.stack(drafts, axis=1), caches


@dataclass(frozen=True, kw_only=True)
class DraftHeadModel(Guesser):
    """A head.

    bind: makes its layers from its own leaves while tracing. of_model: the served model's products. levels: of hidden
    states that a slot keeps (`head_levels`)
    """

    bind: Callable[[Leaves], tuple[DraftHead, ...]]
    of_model: Products
    levels: int = 1

    def follow(
        self, leaves: Leaves, step: ServedTokens, caches: Caches, state: SlotState, attend_to: AttendTo
    ) -> tuple[Caches, SlotState]:
        layers, new = self.bind(leaves[self.first_leaf :]), list(caches)
        states = layers[0].states(step.hidden, self.linear)
        kept = [(step.tokens, states)]
        tokens, hidden = behind(step.tokens, states, state, (0, self.levels))
        for index, layer in enumerate(layers):
            _, result, new[index] = self._run(layer, index, step.model, tokens, hidden, caches[index], attend_to)
            if index + 1 < len(layers):
                level = 0
                if self.levels > 1:
                    kept.append((tokens, result))
                    hidden, level = result, index + 1
                tokens, hidden = behind(tokens, hidden, state, (level, self.levels))
        for level, (tokens, hidden) in enumerate(kept):
            state = keep_hidden(state, tokens, hidden, (level, self.levels))
        return tuple(new), state

    def _run(
        self,
        layer: DraftHead,
        index: int,
        model: CausalLM,
        tokens: TokenInput,
        hidden: jax.Array,
        cache: Cache,
        attend_to: AttendTo,
    ) -> tuple[jax.Array, jax.Array, Cache]:
        """Run layer `index` on tokens and the hidden states [T, D] before them -> (out, next hidden, its cache)."""
        attend, own = attend_to(tokens), self.first_layer + index

        def attend_own(
            heads: Heads | StateInputs, cache: Cache, sinks: jax.Array | None = None
        ) -> tuple[jax.Array, Cache]:
            """Attend the heads of T tokens in the head's layer -> (out [T, N, H], cache)."""
            return attend(own, heads, cache, sinks)

        x = self.of_model.whole(model.embed(tokens.token_ids))
        return layer(x, hidden, tokens.positions, cache, attend_own, self.linear)

    def propose(
        self, leaves: Leaves, last: ServedTokens, room: jax.Array, caches: Caches, state: SlotState, attend_to: AttendTo
    ) -> tuple[jax.Array, Caches]:
        layers, tokens, new = self.bind(leaves[self.first_leaf :]), last.tokens, list(caches)
        first = tokens.positions - 1  # of the hidden state that a row's last token follows
        drafts: list[jax.Array] = []
        if len(layers) > 1:
            drafts, token, hidden, known = self._guess_in_turn(layers, last, new, state, attend_to)
        else:
            token = tokens.token_ids
            hidden, known = kept_hidden(state, tokens.slots, first)
        index, final = jnp.arange(room.shape[0], dtype=jnp.int32), len(layers) - 1
        for place in range(len(drafts), self.count):
            ahead = place - final
            live = known & (tokens.num_tokens > 0) & (first + ahead < room)
            positions = jnp.where(live, first + ahead, 0)
            row = jnp.where(live, index, room.shape[0])
            now = TokenInput(token, positions, row, tokens.slots, positions, live.astype(jnp.int32))
            out, hidden, new[final] = self._run(layers[final], final, last.model, now, hidden, new[final], attend_to)
            token = layers[final].guess(out, last.model, self.linear, self.of_model)
            drafts.append(jnp.where(live, token, FROM_DEVICE))
        return jnp.stack(drafts, axis=1), tuple(new)

    def _guess_in_turn(
        self,
        layers: Sequence[DraftHead],
        last: ServedTokens,
        caches: list[Cache],
        state: SlotState,
        attend_to: AttendTo,
    ) -> tuple[list[jax.Array], jax.Array, jax.Array, jax.Array]:
        """Let each layer guess once -> (the drafts, -1: none; the last guess; its hidden state; whether it is known).

        Layer k has not computed its last k + 1 positions: they need the row's last token and the k guesses so far.
        caches: those of the layers, which are replaced by the new ones. R rows: [R], the last two [R, D] and [R]
        """
        tokens, drafts = last.tokens, []
        first, has_token = tokens.positions[:, None] - 1, (tokens.num_tokens > 0)[:, None]
        read, hidden, known = tokens.token_ids[:, None], None, None
        for k, layer in enumerate(layers[: self.count]):
            positions = first + jnp.arange(-k, 1, dtype=jnp.int32)[None, :]
            slots = jnp.broadcast_to(tokens.slots[:, None], positions.shape)
            if hidden is None or known is None or self.levels == 1:
                hidden, known = kept_hidden(state, slots, positions, (0, self.levels))
            else:
                oldest, found = kept_hidden(state, slots[:, :1], positions[:, :1], (k, self.levels))
                hidden = jnp.concatenate([oldest, hidden], axis=1)
                known = jnp.concatenate([found, known], axis=1)
            live, count = (known & has_token).reshape(-1), positions.size
            starts = jnp.where(live, positions.reshape(-1), 0)
            row = jnp.where(live, jnp.arange(count, dtype=jnp.int32), count)
            now = TokenInput(read.reshape(-1), starts, row, slots.reshape(-1), starts, live.astype(jnp.int32))
            shape = hidden.shape
            out, result, caches[k] = self._run(
                layer, k, last.model, now, hidden.reshape(count, -1), caches[k], attend_to
            )
            hidden = result.reshape(shape)
            token = layer.guess(out.reshape(shape)[:, -1], last.model, self.linear, self.of_model)
            drafts.append(jnp.where(known[:, -1] & has_token[:, 0], token, FROM_DEVICE))
            read = jnp.concatenate([read, token[:, None]], axis=1)
        assert hidden is not None and known is not None
        return drafts, read[:, -1], hidden[:, -1], known[:, -1]


def head_levels(head: ModelConfig) -> int:
    """Return how many kinds of hidden states a slot keeps for a head: the model's, and the results that are chained."""
    form = head.head
    return form.layers if isinstance(form, PredictorHead) and form.chained else 1


def kept_positions(head: ModelConfig, max_drafts: int) -> int:
    """Return the number of hidden states that a slot keeps for a head.

    They are those of a step with drafts, of which any number may be rejected, and the one before. Layers that are not
    chained read some that are further back.
    """
    levels = head_levels(head)
    return levels * (2 + max_drafts) if levels > 1 else 1 + head.num_layers + max_drafts


Level = tuple[int, int]  # which of how many kinds of hidden states, see `head_levels`
_MODELS: Level = (0, 1)


def kept_hidden(
    state: SlotState, slots: jax.Array, positions: jax.Array, level: Level = _MODELS
) -> tuple[jax.Array, jax.Array]:
    """Return the hidden states [..., D] that slots keep of positions, int32 [...], and whether they do, bool [...]."""
    assert state.hidden is not None and state.hidden_at is not None
    place = _place(state.hidden_at.shape[1], positions, level)
    found = state.hidden_at.at[slots, place].get(mode="fill", fill_value=-1) == positions
    return state.hidden.at[slots, place].get(mode="clip"), found & (positions >= 0)


def _place(kept: int, positions: jax.Array, level: Level) -> jax.Array:
    """Return where a slot that keeps `kept` hidden states has those of positions."""
    index, count = level
    place = positions % (kept // count)
    return place + index * (kept // count) if index else place


def keep_hidden(state: SlotState, tokens: TokenInput, hidden: jax.Array, level: Level = _MODELS) -> SlotState:
    """Return the state with the hidden states [T, D] of the last tokens of each row."""
    assert state.hidden is not None and state.hidden_at is not None
    kept, row = state.hidden_at.shape[1] // level[1], tokens.row_of_token
    ends = (tokens.starts + tokens.num_tokens).at[row].get(mode="fill", fill_value=0)
    slots = tokens.slots.at[row].get(mode="fill", fill_value=state.num_slots)
    slots = jnp.where(tokens.positions >= ends - kept, slots, state.num_slots)
    place = _place(state.hidden_at.shape[1], tokens.positions, level)
    return state.replace(
        hidden=state.hidden.at[slots, place].set(hidden.astype(state.hidden.dtype), mode="drop"),
        hidden_at=state.hidden_at.at[slots, place].set(tokens.positions, mode="drop"),
    )


def behind(
    tokens: TokenInput, hidden: jax.Array, state: SlotState, level: Level = _MODELS
) -> tuple[TokenInput, jax.Array]:
    """Return the T tokens that a head computes in a step, and the hidden states [T, D] before them.

    Each row has as many of them as in the step.

    The token at p and the hidden state of p - 1 make position p - 1. A row whose slot does not keep the first of these
    hidden states runs at its tokens' own positions, with the tokens behind them, and with the last one twice.

    The next layer of a head computes what this returns for the tokens of the layer before it. level: of `hidden`
    """
    count, row = tokens.positions.shape[0], tokens.row_of_token
    slots = tokens.slots.at[row].get(mode="fill", fill_value=state.num_slots)
    live, index = slots < state.num_slots, jnp.arange(count, dtype=jnp.int32)
    follows = (
        live & (slots == jnp.roll(slots, 1)) & (tokens.positions == jnp.roll(tokens.positions, 1) + 1) & (index > 0)
    )
    kept, found = kept_hidden(state, slots, tokens.positions - 1, level)
    first = live & (tokens.positions == tokens.starts.at[row].get(mode="clip"))
    by_row = jnp.zeros(tokens.slots.shape[0], jnp.bool_)
    back = by_row.at[jnp.where(first, row, by_row.shape[0])].set(follows | found, mode="drop")
    of_token = back.at[row].get(mode="fill", fill_value=False)
    before = jnp.where(follows[:, None], jnp.roll(hidden, 1, axis=0), kept.astype(hidden.dtype))
    after = jnp.where(jnp.roll(follows, -1), jnp.roll(tokens.token_ids, -1), tokens.token_ids)
    moved = TokenInput(
        token_ids=jnp.where(of_token, tokens.token_ids, after),
        positions=tokens.positions - of_token.astype(jnp.int32),
        row_of_token=row,
        slots=tokens.slots,
        starts=tokens.starts - back.astype(jnp.int32),
        num_tokens=tokens.num_tokens,
    )
    return moved, jnp.where(of_token[:, None], before, hidden)


def check_draft_model(draft: ModelConfig, served: ModelConfig) -> None:
    """Raise ConfigError if `draft` cannot guess tokens of `served`."""
    fix = "set speculation.draft_model to a smaller model of the same family"
    if isinstance(draft.head, EagleHead):
        fix = "set speculation.draft_model to a head that was made for this model"
        if (width := draft.head.width) != served.hidden_size or draft.hidden_size != served.hidden_size:
            what = f"hidden states of {width} numbers and embeddings of {draft.hidden_size}"
            raise ConfigError(f"speculation.draft_model reads {what}, and the model has {served.hidden_size}", fix=fix)
        if served.mlp_layers or served.falcon_h1 is not None:  # published layers are joined, or count twice
            why = f"speculation.draft_model counts the published layers of {served.architecture}, which differ here"
            raise ConfigError(why, fix="set speculation.method to mtp or ngram")
        if draft.head.taps[0] < 1 or draft.head.taps[-1] > served.num_layers or len(set(draft.head.taps)) != 3:
            why = f"speculation.draft_model reads the layers {draft.head.taps} of a model of {served.num_layers}"
            raise ConfigError(why, fix=fix)
    if draft.bidirectional or draft.labels or any(draft.layer_states):
        raise ConfigError(f"speculation.draft_model: {draft.architecture} cannot be a draft model", fix=fix)
    if (count := draft.vocab_size) != served.vocab_size:
        raise ConfigError(
            f"speculation.draft_model has {count} tokens in its vocabulary, and the model {served.vocab_size}", fix=fix
        )
