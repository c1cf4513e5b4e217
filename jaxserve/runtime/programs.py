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

Common arguments: `leaves`, the model's flat parameters; `caches`, one array per layer; `state`, the slots;
`packed`, the int32 array of step_input. The runner donates caches, state and hidden; the programs return the new ones.
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

from jaxserve.models.decoder import CausalLM
from jaxserve.models.moe import take_choices
from jaxserve.models.pooling import normalized
from jaxserve.ops.linear import Products
from jaxserve.ops.paged_attention import AttentionMetadata, Backend, Heads
from jaxserve.ops.paged_attention.scaled_pages import Pages
from jaxserve.ops.paged_attention.sharded import MeshAttention
from jaxserve.runtime.kv_cache import LayerCache
from jaxserve.runtime.sampling.logprobs import pack_logprobs_with_ids
from jaxserve.runtime.sampling.sampler import ExtraInputs, RowsToSample, Sampled, sample
from jaxserve.runtime.sampling.slots import SlotState, append_tokens, state_partition
from jaxserve.runtime.sampling.verify import Verified, verify
from jaxserve.runtime.sampling.vocab import Vocab
from jaxserve.runtime.step_input import (
    HeadInput,
    TokenInput,
    unpack_decode,
    unpack_extend,
    unpack_head,
    unpack_hidden,
    unpack_verify,
)

Leaves = tuple[jax.Array, ...]
Caches = tuple[Pages, ...]


@dataclass(frozen=True)
class StepPrograms:
    """The step functions of one model on one backend. bind: makes the model from its leaves while tracing.

    per_token: batch-invariant mode. Each token attends alone, so that the split into chunks cannot change its sums.
    """

    bind: Callable[[Leaves], CausalLM]
    backend: Backend
    layers: tuple[LayerCache, ...]
    page_size: int
    linear: Products
    mesh: Mesh | None = None
    normalize_embeddings: bool = True
    per_token: bool = False

    @property
    def num_groups(self) -> int:
        """Return the number of layer groups. Each has its own page tables, see `kv_cache`."""
        return 1 + max((layer.group for layer in self.layers), default=0)

    def decode(
        self, leaves: Leaves, caches: Caches, state: SlotState, packed: jax.Array
    ) -> tuple[Caches, SlotState, Sampled]:
        """Run a decode step: packed int32 [decode_size(B)] -> one sampled token per row."""
        state, tokens, head = unpack_decode(packed, state, self.num_groups)
        model = self.bind(leaves)
        hidden, caches = self._forward(model, caches, state, tokens, decode_only=True)
        bitmask = jnp.zeros((1, state.allow_mask.shape[1]), jnp.int32)
        state, sampled = self._sample(model, hidden, state, head, bitmask)
        return caches, state, sampled

    def decode_hidden(
        self, leaves: Leaves, caches: Caches, state: SlotState, hidden: jax.Array, packed: jax.Array
    ) -> tuple[Caches, SlotState, jax.Array, jax.Array | None]:
        """Run the forward pass of a decode step: packed int32 [hidden_size(B)], its flags are not read.

        hidden: [max T, D]; its first B rows get the hidden states. The last result is the routed experts, int32
        [B, L, K] for L sparse layers, or None for a dense model.
        """
        state, tokens = unpack_hidden(packed, state, self.num_groups)
        model = self.bind(leaves)
        new, caches = self._forward(model, caches, state, tokens, decode_only=True)
        return caches, state, jax.lax.dynamic_update_slice(hidden, new, (0, 0)), take_choices(model)

    def decode_slots(
        self, leaves: Leaves, caches: Caches, state: SlotState, slots: jax.Array
    ) -> tuple[Caches, SlotState, Sampled]:
        """Run `decode` on slots int32 [B] whose pages are in the page table already. Needs no packing on the host."""
        packed = jnp.concatenate([jnp.ones(1, jnp.int32), jnp.zeros(1, jnp.int32), slots])
        no_updates = jnp.full(3 * self.num_groups * slots.shape[0], state.num_slots, jnp.int32)
        return self.decode(leaves, caches, state, jnp.concatenate([packed, no_updates]))

    def extend(
        self,
        leaves: Leaves,
        caches: Caches,
        state: SlotState,
        hidden: jax.Array,
        packed: jax.Array,
        *,
        size: tuple[int, int],
    ) -> tuple[Caches, SlotState, jax.Array, jax.Array, jax.Array | None]:
        """Run the forward pass of ragged rows, size (T tokens, R rows): packed int32 [extend_size(T, R, U)].

        hidden: [max T, D]; its first T rows get the hidden states. The last results are `finite_rows`, bool [R], and
        the routed experts, int32 [T, L, K] for L sparse layers, or None for a dense model.
        """
        num_tokens, num_rows = size
        state, tokens = unpack_extend(packed, state, num_tokens, num_rows)
        model = self.bind(leaves)
        new, caches = self._forward(model, caches, state, tokens, decode_only=False)
        # Sampling adds 1. A row that is not sampled keeps this position and computes its last token again.
        last = tokens.starts + tokens.num_tokens - 1
        state = state.replace(position=state.position.at[tokens.slots].set(last, mode="drop"))
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

    def export_pages(self, caches: Caches, page_ids: jax.Array, *, group: int = 0) -> Caches:
        """Return pages page_ids int32 [n] of each layer of a group, in the form common to all backends.

        That is [n, page_size, 2 * KH, H], see `Backend.export_pages`.
        """
        layers = [pair for pair in zip(caches, self.layers, strict=True) if pair[1].group == group]
        return tuple(self.backend.export_pages(cache, page_ids, layer.num_kv_heads) for cache, layer in layers)

    def import_pages(self, caches: Caches, page_ids: jax.Array, pages: Caches, *, group: int = 0) -> Caches:
        """Return the caches with `pages`, from `export_pages`, at page_ids int32 [n].

        Ids that are not below the number of pages are dropped.
        """
        new = iter(pages)
        return tuple(
            self.backend.import_pages(cache, page_ids, next(new)) if layer.group == group else cache
            for cache, layer in zip(caches, self.layers, strict=True)
        )

    def _forward(
        self, model: CausalLM, caches: Caches, state: SlotState, tokens: TokenInput, *, decode_only: bool
    ) -> tuple[jax.Array, Caches]:
        rows = each_token(tokens) if self.per_token else tokens
        decode_only = decode_only or self.per_token
        pools = {layer.group: cache.shape[0] for layer, cache in zip(self.layers, caches, strict=True)}
        tables = jnp.split(state.page_table.at[rows.slots].get(mode="clip"), self.num_groups, axis=1)
        metadata = {
            group: dataclasses.replace(
                attention_metadata(rows, tables[group], num_pages, self.page_size, decode_only), alone=self.per_token
            )
            for group, num_pages in pools.items()
        }
        write_and_attend = MeshAttention(self.backend, self.mesh)

        def attend(
            layer_index: int, heads: Heads, cache: Pages | None, sinks: jax.Array | None = None
        ) -> tuple[jax.Array, Pages | None]:
            """Write and attend the heads of T tokens in a layer -> (out [T, N, H], cache)."""
            assert cache is not None
            layer = self.layers[layer_index]
            where = metadata[layer.group]
            return write_and_attend(heads, cache, where, layer.attention, sinks)

        hidden, new_caches = model(tokens.token_ids, tokens.positions, caches, attend, self.linear)
        return hidden, tuple(c for c in new_caches if c is not None)

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
