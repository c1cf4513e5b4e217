"""The device programs as plain functions over pytrees: what the runner compiles, and what a researcher may jit himself.

Owns how a step is put together from model, attention backend, sampler and slot state. No state of its own, no host
work, no shapes: those are the runner's.

    decode          B rows of one token: forward, sampling and state update fused in one dispatch
    decode_hidden   B rows of one token: forward alone; `head_sample` follows, when the host knows what is allowed
    extend          T ragged tokens: forward; the hidden states stay on the device in `hidden`
    head_sample     head and sampler for R tokens of the last extend or decode_hidden
    prompt_logprobs head for C tokens of the last extend, of which the next token is known
    pool            embeddings or hidden states of R tokens of the last extend or decode_hidden

Arguments everywhere: `leaves`, the model's flat parameters; `caches`, one array a layer; `state`, the slots;
`packed`, the int32 array of step_input. Caches, state and hidden are donated by the runner and returned anew.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxserve.models.choices import take_choices
from jaxserve.models.decoder import CausalLM
from jaxserve.models.layers import LinearFn
from jaxserve.models.pooling import normalized
from jaxserve.ops.paged_attention import AttentionMetadata, Backend
from jaxserve.ops.paged_attention.sharded import write_and_attend
from jaxserve.runtime.kv_cache import LayerCache
from jaxserve.runtime.sampling.sampler import Details, Sampled, pack_watching, sample
from jaxserve.runtime.sampling.slots import SlotState, append_tokens, state_partition
from jaxserve.runtime.sampling.vocab import Vocab
from jaxserve.runtime.step_input import (
    HeadInput,
    TokenInput,
    unpack_decode,
    unpack_extend,
    unpack_head,
)

Leaves = tuple[jax.Array, ...]
Caches = tuple[jax.Array, ...]


@dataclass(frozen=True)
class StepPrograms:
    """The step functions of one model on one backend. bind: leaves -> model, called while tracing."""

    bind: Callable[[Leaves], CausalLM]
    backend: Backend
    layers: tuple[LayerCache, ...]
    page_size: int
    linear: LinearFn
    mesh: Mesh | None = None
    normalize_embeddings: bool = True
    per_token: bool = False  # deterministic: each token attends alone, so that chunking cannot change its sums

    @property
    def num_groups(self) -> int:
        """Groups of layers, each with page tables of its own."""
        return 1 + max((layer.group for layer in self.layers), default=0)

    def decode(
        self, leaves: Leaves, caches: Caches, state: SlotState, packed: jax.Array
    ) -> tuple[Caches, SlotState, Sampled]:
        """packed: int32 [decode_size(B)] -> one sampled token a row."""
        state, tokens, head = unpack_decode(packed, state, self.num_groups)
        model = self.bind(leaves)
        hidden, caches, state = self._forward(model, caches, state, tokens, decode_only=True)
        bitmask = jnp.zeros((1, state.allow_mask.shape[1]), jnp.int32)
        state, sampled = self._sample(model, hidden, state, head, bitmask)
        return caches, state, sampled

    def decode_hidden(
        self, leaves: Leaves, caches: Caches, state: SlotState, hidden: jax.Array, packed: jax.Array
    ) -> tuple[Caches, SlotState, jax.Array, jax.Array | None]:
        """packed: as `decode` takes it, flags unread; hidden [max T, D] gets the hidden states in its first B rows.

        Last come the experts that each token was given to, int32 [B, L, K]; None without."""
        state, tokens, _ = unpack_decode(packed, state, self.num_groups)
        model = self.bind(leaves)
        new, caches, state = self._forward(model, caches, state, tokens, decode_only=True)
        return caches, state, jax.lax.dynamic_update_slice(hidden, new, (0, 0)), take_choices(model)

    def decode_slots(
        self, leaves: Leaves, caches: Caches, state: SlotState, slots: jax.Array
    ) -> tuple[Caches, SlotState, Sampled]:
        """`decode` of int32 [B] slots whose pages are in the page table already: a step without a host."""
        packed = jnp.concatenate([jnp.ones(1, jnp.int32), jnp.zeros(1, jnp.int32), slots])
        nobody = jnp.full(3 * self.num_groups * slots.shape[0], state.num_slots, jnp.int32)
        return self.decode(leaves, caches, state, jnp.concatenate([packed, nobody]))

    def extend(
        self,
        leaves: Leaves,
        caches: Caches,
        state: SlotState,
        hidden: jax.Array,
        packed: jax.Array,
        *,
        num_tokens: int,
        num_rows: int,
    ) -> tuple[Caches, SlotState, jax.Array, jax.Array, jax.Array | None]:
        """packed: int32 [extend_size(T, R, U)]; hidden [max T, D] gets the step's hidden states in its first T rows.

        Then come `finite_rows`, bool [R], and the experts that each token was given to, int32 [T, L, K] of the L sparse
        layers; None without."""
        state, tokens = unpack_extend(packed, state, num_tokens, num_rows)
        model = self.bind(leaves)
        new, caches, state = self._forward(model, caches, state, tokens, decode_only=False)
        finite = finite_rows(new, tokens.row_of_token, num_rows)
        return caches, state, jax.lax.dynamic_update_slice(hidden, new, (0, 0)), finite, take_choices(model)

    def head_sample(
        self,
        leaves: Leaves,
        state: SlotState,
        hidden: jax.Array,
        packed: jax.Array,
        bitmask: jax.Array,
        watched_ids: jax.Array,
    ) -> tuple[SlotState, Sampled]:
        """packed: int32 [head_size(R)]; bitmask: int32 [R, W], read only if the packed flag says so; watched_ids:
        int32 [R, N], whose log-probabilities come with the token's own."""
        head = unpack_head(packed)
        rows = hidden.at[head.token_indices].get(mode="clip")
        details = Details(head.want_details, watched_ids)
        return self._sample(self.bind(leaves), rows, state, head, bitmask, details)

    def pool(self, hidden: jax.Array, packed: jax.Array) -> jax.Array:
        """packed: int32 [1 + R], a flag and the place of R tokens in the step -> float32 [R, D], their embeddings or,
        with the flag, their hidden states."""
        rows = hidden.at[packed[1:]].get(mode="clip").astype(jnp.float32)
        return jnp.where(packed[0] > 0, rows, normalized(rows)) if self.normalize_embeddings else rows

    def prompt_logprobs(
        self, leaves: Leaves, hidden: jax.Array, packed: jax.Array, watched_ids: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """packed: int32 [2, C] of token index in the step and the token that follows -> int32 [C, 2 + 2K], and of
        watched_ids int32 [N] the bits of the log-probabilities, int32 [C, N]."""
        indices, targets = packed
        logits = self.bind(leaves).logits(hidden.at[indices].get(mode="clip"), self.linear)
        watch = jnp.broadcast_to(watched_ids, (targets.shape[0], watched_ids.shape[0]))
        vocab = Vocab.of(logits.shape[1], self.mesh)
        pack = functools.partial(pack_watching, vocab=vocab)
        return vocab.call(pack, (vocab.columns, P(), P()), logits, targets, watch)

    def export_pages(self, caches: Caches, page_ids: jax.Array) -> Caches:
        """Pages [n] of every layer in the form common to all backends, [n, page_size, 2 * KH, H] each."""
        layers = zip(caches, self.layers, strict=True)
        return tuple(self.backend.export_pages(cache, page_ids, layer.num_kv_heads) for cache, layer in layers)

    def import_pages(self, caches: Caches, page_ids: jax.Array, pages: Caches) -> Caches:
        """The caches with `pages`, as exported, at page_ids [n]; ids of num_pages and above are dropped."""
        pairs = zip(caches, pages, strict=True)
        return tuple(self.backend.import_pages(cache, page_ids, page) for cache, page in pairs)

    def _forward(
        self, model: CausalLM, caches: Caches, state: SlotState, tokens: TokenInput, *, decode_only: bool
    ) -> tuple[jax.Array, Caches, SlotState]:
        rows = each_token(tokens) if self.per_token else tokens
        decode_only = decode_only or self.per_token
        pools = {layer.group: cache.shape[0] for layer, cache in zip(self.layers, caches, strict=True)}
        metadata = {
            group: dataclasses.replace(
                attention_metadata(
                    rows, state, num_pages, self.page_size, decode_only, group=group, num_groups=self.num_groups
                ),
                alone=self.per_token,
            )
            for group, num_pages in pools.items()
        }

        def attend(
            layer_index: int,
            q: jax.Array,
            k: jax.Array,
            v: jax.Array,
            cache: jax.Array | None,
            sinks: jax.Array | None = None,
        ) -> tuple[jax.Array, jax.Array | None]:
            assert cache is not None
            layer = self.layers[layer_index]
            where = metadata[layer.group]
            return write_and_attend(self.backend, self.mesh, q, k, v, cache, where, layer.attention, sinks)

        hidden, new_caches = model(tokens.token_ids, tokens.positions, caches, attend, self.linear)
        last = tokens.starts + tokens.num_tokens - 1  # until a token is sampled: a row that is not is computed again
        state = state.replace(position=state.position.at[tokens.slots].set(last, mode="drop"))
        return hidden, tuple(c for c in new_caches if c is not None), state

    def _sample(
        self,
        model: CausalLM,
        hidden: jax.Array,
        state: SlotState,
        head: HeadInput,
        bitmask: jax.Array,
        details: Details | None = None,
    ) -> tuple[SlotState, Sampled]:
        logits = model.logits(hidden, self.linear)
        vocab = Vocab.of(state.vocab_size, self.mesh)
        cuts = (vocab.columns, P(), state_partition(state, vocab.columns), P(), P(), P(), P())
        after = state.replace(position=state.position + 1)  # the place of the new token
        args = (logits, head.slots, after, bitmask, head.masked, head.want_logprobs, details)
        sampled = vocab.call(functools.partial(sample, vocab=vocab), cuts, *args)
        return append_tokens(state, head.slots, sampled.tokens[:, 0]), sampled


def finite_rows(hidden: jax.Array, row_of_token: jax.Array, num_rows: int) -> jax.Array:
    """Whether all hidden states of a row are finite, bool [R]. hidden: [T, D]; row_of_token: int32 [T], R and above
    for padding."""
    finite = jnp.isfinite(hidden).all(axis=-1)
    return jnp.ones(num_rows, bool).at[row_of_token].min(finite, mode="drop")


def each_token(tokens: TokenInput) -> TokenInput:
    """The same tokens as rows of one token each."""
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


def attention_metadata(
    tokens: TokenInput,
    state: SlotState,
    num_pages: int,
    page_size: int,
    decode_only: bool,
    *,
    group: int = 0,
    num_groups: int = 1,
) -> AttentionMetadata:
    """Page table of a group of layers, lengths and the place of each token's K and V. Padding tokens get a place past
    the cache."""
    num_rows = tokens.slots.shape[0]
    page_table = state.page_table.at[tokens.slots].get(mode="clip")
    if num_groups > 1:
        page_table = jnp.split(page_table, num_groups, axis=1)[group]
    row = jnp.minimum(tokens.row_of_token, num_rows - 1)
    page = page_table.at[row, tokens.positions // page_size].get(mode="clip")
    place = page * page_size + tokens.positions % page_size
    one_each = jnp.arange(num_rows + 1, dtype=jnp.int32)
    return AttentionMetadata(
        page_table=page_table,
        cu_q_lens=one_each if decode_only else jnp.pad(jnp.cumsum(tokens.num_tokens), (1, 0)),
        kv_lens=jnp.where(tokens.num_tokens > 0, tokens.starts + tokens.num_tokens, 0),
        positions=tokens.positions,
        slot_mapping=jnp.where(tokens.row_of_token < num_rows, place, num_pages * page_size),
        decode_only=decode_only,
    )


def copy_pages(caches: Caches, packed: jax.Array) -> Caches:
    """Copy whole pages in every layer. packed: int32 [2, n] of source and destination; a destination of num_pages
    or more copies nothing."""
    source, destination = packed
    return tuple(cache.at[destination].set(cache.at[source].get(mode="clip"), mode="drop") for cache in caches)
