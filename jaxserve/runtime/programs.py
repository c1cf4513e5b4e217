"""The device programs, as pure functions over pytrees. The runner compiles them; they can also be jitted directly.

A step is composed here of model, attention backend, sampler and slot state. The runner chooses the shapes.

    decode          B rows of one token: forward pass, sampling and state update in one dispatch
    decode_hidden   B rows of one token: forward pass only. `head_sample` or `verify` follows once the token mask is
                    known
    extend          T ragged tokens: forward pass. The hidden states stay on the device in `hidden`
    head_sample     head and sampler for R tokens of the last extend or decode_hidden
    verify          head and sampler for R rows of the last decode_hidden, T tokens with drafts
    prompt_logprobs head for C tokens of the last extend whose next token is known
    pool            embeddings or hidden states of R tokens of the last extend or decode_hidden
    draft           guesses of the next tokens of R rows, by a draft model or head

Common arguments: `leaves`, the flat parameters of the model, then those of a draft model or head, then the arrays of
adapters; `caches`, one array per layer; `state`, the slots; `packed`, the int32 array of step_input. The runner donates
caches, state and hidden; the programs return the new ones.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeGuard, cast

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxserve.models.adapters import AdapterShape
from jaxserve.models.decoder import AttendLayer, CausalLM, PictureRows, Taps
from jaxserve.models.layers import Cache, StateInputs
from jaxserve.models.moe import take_choices
from jaxserve.models.pooling import normalized
from jaxserve.ops.linear import Products
from jaxserve.ops.paged_attention import AttentionMetadata, Backend, Heads
from jaxserve.ops.paged_attention.scaled_pages import Pages
from jaxserve.ops.paged_attention.sharded import MeshAttention
from jaxserve.ops.state import StateArrays, StateBackend, StateRows
from jaxserve.ops.state.sharded import MeshStates
from jaxserve.runtime.draft_model import Guesser, ServedTokens
from jaxserve.runtime.kv_cache import AnyCache, LayerCache, StateCache
from jaxserve.runtime.sampling.logprobs import pack_logprobs_with_ids
from jaxserve.runtime.sampling.sampler import ExtraInputs, RowsToSample, Sampled, sample
from jaxserve.runtime.sampling.slots import SlotState, append_tokens, state_partition
from jaxserve.runtime.sampling.verify import Verified, verify
from jaxserve.runtime.sampling.vocab import Vocab
from jaxserve.runtime.step_input import (
    HeadInput,
    TokenInput,
    unpack_decode,
    unpack_draft,
    unpack_extend,
    unpack_head,
    unpack_hidden,
    unpack_rests,
    unpack_verify,
)
from jaxserve.types.scheduling import STATE_COLUMNS

Leaves = tuple[jax.Array, ...]
# None: the layer reads another layer's cache. Layers with a recurrent state have `StateArrays`, which the type leaves
# out, because only this module looks into such a cache.
Caches = tuple[Pages | None, ...]
Kept = tuple[jax.Array | None, jax.Array | None]  # SlotState.hidden and hidden_at; None without a head


class PictureInput(NamedTuple):
    """The further inputs of `extend` for a model that takes pictures."""

    packed: jax.Array  # int32 [4, T]  a token's row in `pool`, or -1, and its `picture.position_shifts`
    pool: jax.Array  # [parts, E, D]


@dataclass(frozen=True)
class StepPrograms:
    """The step functions of one model on one backend.

    bind: makes the model from its leaves while tracing.
    per_token: batch-invariant mode. Each token attends alone, so that the split into chunks cannot change its sums.
    guesses: the draft model or head, whose layers are the last of `layers`. It computes what every forward pass does,
    unless the flag of the step says that it rests.
    lora: the room for adapters; None: there is none
    """

    bind: Callable[[Leaves], CausalLM]
    backend: Backend
    layers: tuple[AnyCache, ...]
    page_size: int
    linear: Products
    mesh: Mesh | None = None
    normalize_embeddings: bool = True
    per_token: bool = False
    guesses: Guesser | None = None
    max_drafts: int = 0  # of a row of decode_hidden
    states: StateBackend | None = None  # of layers with a recurrent state
    lora: AdapterShape | None = None

    @property
    def num_groups(self) -> int:
        """Return the number of groups of attention layers. Each has its own page tables, see `kv_cache`."""
        return 1 + max((layer.group for layer in self.layers if isinstance(layer, LayerCache)), default=0)

    @property
    def num_pools(self) -> int:
        """Return the number of layer groups, including the group of recurrent states."""
        return self.num_groups + (self.states is not None)

    @property
    def state_columns(self) -> int:
        """Return the number of columns for recurrent states, behind the page tables in a slot's row of `page_table`."""
        return 0 if self.states is None else STATE_COLUMNS

    def decode(
        self, leaves: Leaves, caches: Caches, state: SlotState, packed: jax.Array
    ) -> tuple[Caches, SlotState, Sampled]:
        """Run a decode step: packed int32 [decode_size(B)] -> one sampled token per row."""
        packed, rests = self._unpack_rests(packed)
        state, tokens, head = unpack_decode(packed, state, self.num_groups)
        model = self.bind(leaves)
        hidden, caches, state = self._forward(leaves, model, caches, state, tokens, decode_only=True, rests=rests)
        bitmask = jnp.zeros((1, state.allow_mask.shape[1]), jnp.int32)
        state = self._advance_states(state, tokens)
        state, sampled = self._sample(model, hidden, state, head, bitmask)
        return caches, state, sampled

    def decode_hidden(
        self, leaves: Leaves, caches: Caches, state: SlotState, hidden: jax.Array, packed: jax.Array
    ) -> tuple[Caches, SlotState, jax.Array, jax.Array | None]:
        """Run the forward pass of a decode step: packed int32 [hidden_size(B)], its flags are not read.

        hidden: [max T, D]; its first B rows get the hidden states. The last result is the routed experts, int32
        [B, L, K] for L sparse layers, or None for a dense model.
        """
        packed, rests = self._unpack_rests(packed)
        state, tokens = unpack_hidden(packed, state, self.num_groups)
        model = self.bind(leaves)
        drafts = self.states is not None and self.max_drafts > 0
        new, caches, state = self._forward(
            leaves, model, caches, state, tokens, decode_only=True, drafts=drafts, rests=rests
        )
        state = self._advance_states(state, runs(tokens) if drafts else tokens, drafts=drafts)
        return caches, state, jax.lax.dynamic_update_slice(hidden, new, (0, 0)), take_choices(model)

    def decode_slots(
        self, leaves: Leaves, caches: Caches, state: SlotState, slots: jax.Array
    ) -> tuple[Caches, SlotState, Sampled]:
        """Run `decode` on slots int32 [B] whose pages are in the page table already. Needs no packing on the host."""
        packed = jnp.concatenate([jnp.ones(1, jnp.int32), jnp.zeros(1, jnp.int32), slots])
        no_updates = jnp.full(3 * self.num_groups * slots.shape[0], state.num_slots, jnp.int32)
        rests = jnp.zeros(int(self.guesses is not None), jnp.int32)
        return self.decode(leaves, caches, state, jnp.concatenate([packed, no_updates, rests]))

    def extend(
        self,
        leaves: Leaves,
        caches: Caches,
        state: SlotState,
        hidden: jax.Array,
        packed: jax.Array,
        pictures: jax.Array | None = None,
        pool: jax.Array | None = None,
        *,
        size: tuple[int, int],
    ) -> tuple[Caches, SlotState, jax.Array, jax.Array, jax.Array | None]:
        """Run the forward pass of ragged rows, size (T tokens, R rows): packed int32 [extend_size(T, R, U)].

        hidden: [max T, D]; its first T rows get the hidden states. The last results are `finite_rows`, bool [R], and
        the routed experts, int32 [T, L, K] for L sparse layers, or None for a dense model.

        pictures: for a model that takes pictures, int32 [4, T]: a token's row in `pool`, or -1, and its
        `picture.position_shifts`. pool: [parts, E, D]
        """
        num_tokens, num_rows = size
        packed, rests = self._unpack_rests(packed)
        state, tokens = unpack_extend(packed, state, num_tokens, num_rows)
        model = self.bind(leaves)
        rows = None if pictures is None or pool is None else PictureInput(pictures, pool)
        new, caches, state = self._forward(
            leaves, model, caches, state, tokens, decode_only=False, pictures=rows, rests=rests
        )
        # Sampling adds 1. A row that is not sampled keeps this position and computes its last token again.
        last = tokens.starts + tokens.num_tokens - 1
        state = state.replace(position=state.position.at[tokens.slots].set(last, mode="drop"))
        state = self._advance_states(state, tokens)
        finite = finite_rows(new, tokens.row_of_token, num_rows)
        return caches, state, jax.lax.dynamic_update_slice(hidden, new, (0, 0)), finite, take_choices(model)

    def head_sample(
        self,
        leaves: Leaves,
        state: SlotState,
        hidden: jax.Array,
        packed: jax.Array,
        bitmask: jax.Array,
        logprob_ids: jax.Array,
    ) -> tuple[SlotState, Sampled]:
        """Run head and sampler for R tokens: packed int32 [head_size(R)].

        bitmask: int32 [R, W], allowed tokens, read only if the packed flag is set. logprob_ids: int32 [R, N], tokens
        whose log-probabilities are returned with the sampled token's.
        """
        head = unpack_head(packed)
        rows = hidden.at[head.token_indices].get(mode="clip")
        extras = ExtraInputs(head.want_candidates, logprob_ids)
        return self._sample(self.bind(leaves), rows, state, head, bitmask, extras)

    def verify(
        self,
        leaves: Leaves,
        state: SlotState,
        hidden: jax.Array,
        packed: jax.Array,
        bitmask: jax.Array,
        *,
        size: tuple[int, int, int],
    ) -> tuple[SlotState, Verified]:
        """Run head and sampler for size (T tokens, R rows, at most Q drafts of a row): packed [verify_size(T, R)].

        bitmask: int32 [T, W], allowed tokens after each token, read only if the packed flag is set.
        """
        num_tokens, num_rows, most = size
        rows = unpack_verify(packed, num_rows)
        logits = self.bind(leaves).logits(hidden[:num_tokens], self.linear)

        def draw(logits: jax.Array, slots: jax.Array, state: SlotState, bitmask: jax.Array) -> Sampled:
            """Draw from logits [R, V] for slots [R]; bitmask [R, W]."""
            return self._draw(logits, state, bitmask, RowsToSample(slots, rows.masked, rows.want_logprobs), None)

        return verify(logits, rows, state, bitmask, draw, most)

    def draft(self, leaves: Leaves, caches: Caches, state: SlotState, packed: jax.Array) -> tuple[Caches, jax.Array]:
        """Guess the tokens after the last one of R rows: packed int32 [draft_size(R)] -> drafts int32 [R, Q].

        -1: no guess, because the row's pages end.
        """
        assert self.guesses is not None
        tokens, room = unpack_draft(packed, state)
        own, of_guesses = self._split(caches)

        def attend_to(tokens: TokenInput) -> AttendLayer:
            """Return the attention of rows of one token each."""
            return self._attention(caches, state, tokens, decode_only=True)

        last = ServedTokens(self.bind(leaves), tokens, ())
        drafts, new = self.guesses.propose(leaves, last, room, of_guesses, state, attend_to)
        return cast(Caches, (*own, *new)), drafts

    def pool(self, leaves: Leaves, hidden: jax.Array, packed: jax.Array) -> jax.Array:
        """Return embeddings, or if the flag is set hidden states, of R tokens: float32 [R, D].

        With a classification head, return its scores: float32 [R, labels].
        hidden: [max T, D]. packed: int32 [1 + R], the flag and the indices of the tokens in the step.
        """
        rows = hidden.at[packed[1:]].get(mode="clip")
        model = self.bind(leaves)
        if model.score is not None:
            return model.scores(rows, self.linear)
        rows = rows.astype(jnp.float32)
        return jnp.where(packed[0] > 0, rows, normalized(rows)) if self.normalize_embeddings else rows

    def prompt_logprobs(
        self, leaves: Leaves, hidden: jax.Array, packed: jax.Array, logprob_ids: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Compute the log-probabilities of C known next tokens: int32 [C, 2 + 2K], see `pack_logprobs`.

        hidden: [max T, D]. packed: int32 [2, C], index of a token in the step and the token that follows it.
        logprob_ids: int32 [N]; the bits of their log-probabilities are returned too, int32 [C, N].
        """
        indices, targets = packed
        logits = self.bind(leaves).logits(hidden.at[indices].get(mode="clip"), self.linear)
        ids = jnp.broadcast_to(logprob_ids, (targets.shape[0], logprob_ids.shape[0]))
        vocab = Vocab.of(logits.shape[1], self.mesh)
        pack = functools.partial(pack_logprobs_with_ids, vocab=vocab)
        return vocab.call(pack, (vocab.columns, P(), P()), logits, targets, ids)

    def export_pages(self, caches: Caches, page_ids: jax.Array, *, group: int = 0) -> tuple[Pages, ...]:
        """Return pages page_ids int32 [n] of each layer of a group, in the form common to all backends.

        That is [n, page_size, 2 * KH, H], see `Backend.export_pages`.
        """
        return tuple(
            self.backend.export_pages(cache, page_ids, layer.num_kv_heads)
            for cache, layer in zip(caches, self.layers, strict=True)
            if isinstance(layer, LayerCache) and is_pages(cache) and layer.group == group
        )

    def import_pages(self, caches: Caches, page_ids: jax.Array, pages: tuple[Pages, ...], *, group: int = 0) -> Caches:
        """Return the caches with `pages`, from `export_pages`, at page_ids int32 [n].

        Ids that are not below the number of pages are dropped.
        """
        new = iter(pages)
        return tuple(
            self.backend.import_pages(cache, page_ids, next(new))
            if isinstance(layer, LayerCache) and is_pages(cache) and layer.group == group
            else cache
            for cache, layer in zip(caches, self.layers, strict=True)
        )

    def _products(self, leaves: Leaves, tokens: TokenInput) -> Products:
        """Return the products of the forward pass, with the adapters of the tokens' rows if there are some."""
        if self.lora is None:
            return self.linear
        slots = tokens.slots.at[tokens.row_of_token].get(mode="clip")
        adapters = leaves[-1].at[slots].get(mode="fill", fill_value=-1)
        return dataclasses.replace(self.linear, adapters=self.lora.rows(adapters))

    def _forward(
        self,
        leaves: Leaves,
        model: CausalLM,
        caches: Caches,
        state: SlotState,
        tokens: TokenInput,
        *,
        decode_only: bool,
        pictures: PictureInput | None = None,
        drafts: bool = False,
        rests: jax.Array | None = None,
    ) -> tuple[jax.Array, Caches, SlotState]:
        """Run the model, and the draft model or head behind it, on T tokens -> (hidden [T, D], caches, state).

        drafts: as in `_attention`
        """
        attend = self._attention(caches, state, tokens, decode_only=decode_only, drafts=drafts)
        positions = self._rotary(state, tokens, pictures)
        rows: dict[str, Any] = {} if pictures is None else {"pictures": PictureRows(pictures.packed[0], pictures.pool)}
        linear = self._products(leaves, tokens)
        if self.guesses is None:
            hidden, new_caches = model(tokens.token_ids, positions, caches, attend, linear, **rows)
            return hidden, cast(Caches, new_caches), state
        own, of_guesses = self._split(caches)
        taps = Taps(self.guesses.taps)
        hidden, new_caches = model(tokens.token_ids, positions, own, attend, linear, taps=taps, **rows)

        def attend_to(others: TokenInput) -> AttendLayer:
            """Return the attention of tokens in the same rows."""
            return attend if others is tokens else self._attention(caches, state, others, decode_only=decode_only)

        step, guesses = ServedTokens(model, tokens, tuple(taps.states) or (hidden,)), self.guesses

        def follow(of_guesses: Caches, kept: Kept) -> tuple[Caches, Kept]:
            """Let the draft model compute the tokens too -> (its caches, what slots keep for a head)."""
            now = state.replace(hidden=kept[0], hidden_at=kept[1])  # pyright: ignore[reportArgumentType]  # None: no head
            new_of_guesses, after = guesses.follow(leaves, step, of_guesses, now, attend_to)
            return cast(Caches, new_of_guesses), (after.hidden, after.hidden_at)

        def rest(of_guesses: Caches, kept: Kept) -> tuple[Caches, Kept]:
            """Leave the tokens out."""
            return of_guesses, kept

        of_guesses, (kept, kept_at) = jax.lax.cond(rests, rest, follow, of_guesses, (state.hidden, state.hidden_at))
        return hidden, cast(Caches, (*new_caches, *of_guesses)), state.replace(hidden=kept, hidden_at=kept_at)

    def _unpack_rests(self, packed: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """Split a packed input of a step from its flag, bool: the draft model rests. None: there is no draft model"""
        return (packed, None) if self.guesses is None else unpack_rests(packed)

    def _split(self, caches: Caches) -> tuple[Caches, Caches]:
        """Return the caches of the served model, and of the draft model or head."""
        assert self.guesses is not None
        return caches[: self.guesses.first_layer], caches[self.guesses.first_layer :]

    def _attention(
        self, caches: Caches, state: SlotState, tokens: TokenInput, *, decode_only: bool, drafts: bool = False
    ) -> AttendLayer:
        """Return the attention of T tokens in all layers.

        drafts: each token is a row of its own. The tokens of a slot follow each other, and a recurrent state takes them
        as one row
        """
        rows = each_token(tokens) if self.per_token else tokens
        decode_only = decode_only or self.per_token
        pools = {
            layer.group: cache.shape[0] for layer, cache in zip(self.layers, caches, strict=True) if is_pages(cache)
        }
        table = state.page_table.at[rows.slots].get(mode="clip")
        if self.states is not None:
            table = table[:, : -self.state_columns]
        tables = jnp.split(table, self.num_groups, axis=1)
        metadata = {
            group: dataclasses.replace(
                attention_metadata(rows, tables[group], num_pages, self.page_size, decode_only), alone=self.per_token
            )
            for group, num_pages in pools.items()
        }
        write_and_attend = MeshAttention(self.backend, self.mesh)
        recur, of_states = None, None
        if self.states is not None:
            recur = MeshStates(self.states, self.mesh)
            one_each = decode_only and not self.per_token and not drafts
            of_states = self._state_rows(state, runs(tokens) if drafts else tokens, decode_only=one_each, drafts=drafts)

        def attend(
            layer_index: int, heads: Heads | StateInputs, cache: Cache, sinks: jax.Array | None = None
        ) -> tuple[jax.Array, Cache]:
            """Write and attend the heads of T tokens in a layer -> (out [T, N, H], cache)."""
            layer = self.layers[layer_index]
            if isinstance(heads, StateInputs):
                assert isinstance(layer, StateCache) and isinstance(cache, StateArrays)
                assert recur is not None and of_states is not None
                return recur(layer.spec, cache, *heads, of_states)
            assert isinstance(layer, LayerCache)
            assert is_pages(cache)
            where = metadata[layer.group]
            return write_and_attend(heads, cache, where, layer.attention, sinks)

        return attend

    def _rotary(self, state: SlotState, tokens: TokenInput, pictures: PictureInput | None) -> jax.Array:
        """Return the rotary positions of T tokens, int32 [T], or [3, T] by frame, row and column."""
        positions = tokens.positions
        if state.position_delta is not None:
            of_row = state.position_delta.at[tokens.slots].get(mode="clip")
            positions = positions + of_row.at[tokens.row_of_token].get(mode="clip")
        return positions if pictures is None else positions[None, :] + pictures.packed[1:]

    def _state_rows(self, state: SlotState, tokens: TokenInput, *, decode_only: bool, drafts: bool) -> StateRows:
        """Return the rows of a step for layers with a recurrent state.

        A row's last token is not sure, because it may be computed again. With `drafts` only its first one is before
        them, so no token of the row is sure. decode_only: each row has one token
        """
        table = state.page_table.at[tokens.slots].get(mode="clip")[:, -self.state_columns :]
        starts, ends = tokens.starts, tokens.starts + tokens.num_tokens
        emits = table[:, 3:].reshape(table.shape[0], -1, 2)
        return StateRows(
            cu_q_lens=jnp.pad(jnp.cumsum(tokens.num_tokens), (1, 0)),
            starts=starts,
            read=table[:, 0],
            write=table[:, 1],
            # The table is outside of these bounds only in a first run on zeros.
            folded=jnp.clip(table[:, 2], starts - (1 + self.max_drafts), starts),
            sure=starts if drafts else ends - 1,
            emits=emits[:, :1] if decode_only else emits,  # the host lists at most one for a decode row
            decode_only=decode_only,
            per_token=self.per_token,
        )

    def _advance_states(self, state: SlotState, tokens: TokenInput, *, drafts: bool = False) -> SlotState:
        """Let the next step read the states that this one wrote. drafts: as in `_state_rows`"""
        if self.states is None:
            return state
        table, first = state.page_table, state.page_table.shape[1] - self.state_columns
        slots = jnp.where(tokens.num_tokens > 0, tokens.slots, state.num_slots)
        table = table.at[slots, first].set(table.at[slots, first + 1].get(mode="clip"), mode="drop")
        sure = tokens.starts if drafts else tokens.starts + tokens.num_tokens - 1
        return state.replace(page_table=table.at[slots, first + 2].set(sure, mode="drop"))

    def _sample(
        self,
        model: CausalLM,
        hidden: jax.Array,
        state: SlotState,
        head: HeadInput,
        bitmask: jax.Array,
        extras: ExtraInputs | None = None,
    ) -> tuple[SlotState, Sampled]:
        rows = RowsToSample(head.slots, head.masked, head.want_logprobs)
        sampled = self._draw(model.logits(hidden, self.linear), state, bitmask, rows, extras)
        return append_tokens(state, head.slots, sampled.tokens[:, 0]), sampled

    def _draw(
        self,
        logits: jax.Array,
        state: SlotState,
        bitmask: jax.Array,
        rows: RowsToSample,
        extras: ExtraInputs | None,
    ) -> Sampled:
        """Run the sampler on logits [R, V]."""
        vocab = Vocab.of(state.vocab_size, self.mesh)
        cuts = (vocab.columns, P(), state_partition(state, vocab.columns), P(), P())
        after = state.replace(position=state.position + 1)  # the position of the new token
        args = (logits, rows, after, bitmask, extras)
        return vocab.call(functools.partial(sample, vocab=vocab), cuts, *args)


def is_pages(cache: Cache) -> TypeGuard[Pages]:
    """Return whether a layer's cache is pages of K and V."""
    return cache is not None and not isinstance(cache, StateArrays)


def finite_rows(hidden: jax.Array, row_of_token: jax.Array, num_rows: int) -> jax.Array:
    """Return whether all hidden states of each row are finite, bool [R].

    hidden: [T, D]. row_of_token: int32 [T], R and above for padding.
    """
    finite = jnp.isfinite(hidden).all(axis=-1)
    return jnp.ones(num_rows, bool).at[row_of_token].min(finite, mode="drop")


def each_token(tokens: TokenInput) -> TokenInput:
    """Return the same tokens as rows of one token each."""
    count, num_rows = tokens.token_ids.shape[0], tokens.slots.shape[0]
    live = tokens.row_of_token < num_rows
    index = jnp.arange(count, dtype=jnp.int32)
    return TokenInput(
        token_ids=tokens.token_ids,
        positions=tokens.positions,
        row_of_token=jnp.where(live, index, count),
        slots=tokens.slots.at[tokens.row_of_token].get(mode="clip"),
        starts=tokens.positions,
        num_tokens=live.astype(jnp.int32),
    )


def runs(tokens: TokenInput) -> TokenInput:
    """Join T rows of one token each to one row for each slot, whose tokens follow each other."""
    count, live = tokens.slots.shape[0], tokens.num_tokens > 0
    index = jnp.arange(count, dtype=jnp.int32)
    first = live & ((tokens.slots != jnp.roll(tokens.slots, 1)) | (index == 0))
    run = jnp.cumsum(first, dtype=jnp.int32) - 1
    begins = jnp.where(first, run, count)
    return TokenInput(
        token_ids=tokens.token_ids,
        positions=tokens.positions,
        row_of_token=jnp.where(live, run, count),
        slots=jnp.full_like(tokens.slots, jnp.iinfo(jnp.int32).max).at[begins].set(tokens.slots, mode="drop"),
        starts=jnp.zeros_like(tokens.starts).at[begins].set(tokens.starts, mode="drop"),
        num_tokens=jnp.zeros_like(tokens.num_tokens).at[jnp.where(live, run, count)].add(1, mode="drop"),
    )


def attention_metadata(
    tokens: TokenInput, page_table: jax.Array, num_pages: int, page_size: int, decode_only: bool
) -> AttentionMetadata:
    """Make the attention metadata of one group of layers, page_table int32 [R, max_pages].

    A padding token's slot is past the end of the cache, so that its K and V are dropped.
    """
    num_rows = tokens.slots.shape[0]
    row = jnp.minimum(tokens.row_of_token, num_rows - 1)
    page = page_table.at[row, tokens.positions // page_size].get(mode="clip")
    slot = page * page_size + tokens.positions % page_size
    one_each = jnp.arange(num_rows + 1, dtype=jnp.int32)
    return AttentionMetadata(
        page_table=page_table,
        cu_q_lens=one_each if decode_only else jnp.pad(jnp.cumsum(tokens.num_tokens), (1, 0)),
        kv_lens=jnp.where(tokens.num_tokens > 0, tokens.starts + tokens.num_tokens, 0),
        positions=tokens.positions,
        slot_mapping=jnp.where(tokens.row_of_token < num_rows, slot, num_pages * page_size),
        decode_only=decode_only,
    )
