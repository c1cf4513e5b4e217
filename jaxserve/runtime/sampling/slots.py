"""Slot state: the state of every running request on the device, one row per slot, so that a step transfers little.

The fields of SlotState declare its layout: dtype, shape, and for values that come from a request their source. The
rest is the small programs that admit a request to a slot. The host side packs a SlotInit into fixed-size int32 groups;
the device side unpacks and scatters them. A slot index of `max_num_seqs` or above is padding: writes to it are dropped.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxserve.types.sampling import MAX_LOGIT_BIAS, SamplingParams
from jaxserve.types.step import SlotInit

ADMIT_GROUP = 8  # slots per dispatch of `admit`
TOKEN_CHUNK = 1024  # tokens per dispatch of `admit_tokens`
MAX_COUNT = np.iinfo(np.int16).max  # token counts saturate here, where a penalty has long taken full effect

_INT_MAX = np.iinfo(np.int32).max
_NO_TOKEN = np.int32(_INT_MAX)  # outside every vocabulary, so scatters drop it
RECENT = 4  # preceding tokens that a token's watermark depends on

Source = Callable[[SlotInit], float]


def _array(dtype: jax.typing.DTypeLike, *trailing: int | str) -> dict[str, Any]:
    """Declare an array [S, *trailing] of the state. A str is a size of `state_shapes`."""
    return {"dtype": dtype, "trailing": trailing}


def _scalar(dtype: jax.typing.DTypeLike, source: Source | None = None) -> dict[str, Any]:
    """Declare one value per slot, which `admit` writes.

    source: returns the value; None: the field of SamplingParams with the same name, whose default the slot has
    """
    return {"dtype": dtype, "trailing": (), "scalar": True, "source": source}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SlotState:
    """The state of S = max_num_seqs slots. V = vocabulary, W = ceil(V / 32) mask words.

    M = pages of the longest sequence, summed over the groups of layers: a row of `page_table` has one table per group.

    position        of `last_token`, the next input token
    recent          the last tokens, oldest first
    num_outputs     tokens sampled so far
    seed            64 bits, low word first; seed and position determine the random number of a draw
    bias_ids        the first num_bias entries are valid
    allow_mask      bit 1: the token may be sampled. Used if `has_allow`
    early_mask      bit 1: the token may be sampled before there are `min_tokens` output tokens
    token_counts    occurrences in the output, saturating
    in_prompt       whether the token occurs in the prompt
    watermark       64 bits of a key, low word first. Used if `has_watermark`
    position_delta  see `picture.position_delta`; None: the model takes no pictures
    hidden          the hidden states that a head needs of the last positions, position p at p mod "kept" or of several
                    kinds mod their share of it, in the activations' dtype; None: there is no head, see
                    `draft_model.DraftHeadModel`
    hidden_at       the position of each; -1: none
    """

    position: jax.Array = field(metadata=_array(jnp.int32))
    num_outputs: jax.Array = field(metadata=_scalar(jnp.int32, lambda init: init.num_outputs))
    page_table: jax.Array = field(metadata=_array(jnp.int32, "pages"))
    seed: jax.Array = field(metadata=_array(jnp.uint32, 2))
    temperature: jax.Array = field(metadata=_scalar(jnp.float32))  # 0: greedy
    top_k: jax.Array = field(metadata=_scalar(jnp.int32))  # 0: off
    top_p: jax.Array = field(metadata=_scalar(jnp.float32))
    min_p: jax.Array = field(metadata=_scalar(jnp.float32))
    repetition_penalty: jax.Array = field(metadata=_scalar(jnp.float32))
    frequency_penalty: jax.Array = field(metadata=_scalar(jnp.float32))
    presence_penalty: jax.Array = field(metadata=_scalar(jnp.float32))
    min_tokens: jax.Array = field(metadata=_scalar(jnp.int32))
    num_bias: jax.Array = field(metadata=_scalar(jnp.int32, lambda init: len(init.params.logit_bias)))
    bias_ids: jax.Array = field(metadata=_array(jnp.int32, MAX_LOGIT_BIAS))
    bias_values: jax.Array = field(metadata=_array(jnp.float32, MAX_LOGIT_BIAS))
    has_allow: jax.Array = field(metadata=_scalar(jnp.int32, lambda init: _allow_mask_needed(init.params)))
    allow_mask: jax.Array = field(metadata=_array(jnp.int32, "words"))
    early_mask: jax.Array = field(metadata=_array(jnp.int32, "words"))
    token_counts: jax.Array = field(metadata=_array(jnp.int16, "vocab"))
    in_prompt: jax.Array = field(metadata=_array(jnp.bool_, "vocab"))
    has_watermark: jax.Array = field(metadata=_scalar(jnp.int32, lambda init: init.params.watermark_key is not None))
    watermark: jax.Array = field(metadata=_array(jnp.uint32, 2))
    recent: jax.Array = field(metadata=_array(jnp.int32, RECENT))
    position_delta: jax.Array | None = field(default=None, metadata=_array(jnp.int32))
    hidden: jax.Array | None = field(default=None, metadata=_array(jnp.float32, "kept", "hidden"))
    hidden_at: jax.Array | None = field(default=None, metadata=_array(jnp.int32, "kept"))

    @property
    def num_slots(self) -> int:
        return self.position.shape[0]

    @property
    def vocab_size(self) -> int:
        return self.token_counts.shape[1]

    def replace(self, **changes: jax.Array) -> SlotState:
        return dataclasses.replace(self, **changes)


def _scalars(dtype: jax.typing.DTypeLike) -> dict[str, Source]:
    """Return the values of a dtype that `admit` writes, each with its source."""
    found = [each for each in fields(SlotState) if "scalar" in each.metadata and each.metadata["dtype"] is dtype]
    return {each.name: each.metadata["source"] or _parameter(each.name) for each in found}


def _parameter(name: str) -> Source:
    return lambda init: getattr(init.params, name)


_INTS, _FLOATS = _scalars(jnp.int32), _scalars(jnp.float32)
# a row of `admit`: slot, seed, _INTS, _FLOATS, watermark, recent; the first column of the last three
_FIRST_FLOAT = 3 + len(_INTS)
_WATERMARK = _FIRST_FLOAT + len(_FLOATS)
_RECENT = _WATERMARK + 2
ADMIT_WIDTH = _RECENT + RECENT
_BY_TOKEN = tuple(each.name for each in fields(SlotState) if each.metadata["trailing"] == ("vocab",))  # [S, V]


def mask_words(vocab_size: int) -> int:
    """Return the number of 32-bit words of a token bitmask."""
    return -(-vocab_size // 32)


def state_shapes(
    num_slots: int,
    vocab_size: int,
    max_pages: int,
    *,
    pictures: bool = False,
    hidden: jax.ShapeDtypeStruct | None = None,
) -> SlotState:
    """Return the state as ShapeDtypeStructs, to compute its size and to compile for it.

    pictures: whether the model takes pictures. hidden: [kept, D], the hidden states that a head needs of a slot
    """
    sizes: dict[int | str, int] = {"pages": max_pages, "words": mask_words(vocab_size), "vocab": vocab_size}
    optional = {"position_delta": pictures, "hidden": hidden is not None, "hidden_at": hidden is not None}
    dtypes: dict[str, Any] = {}
    if hidden is not None:
        sizes |= {"kept": hidden.shape[0], "hidden": hidden.shape[1]}
        dtypes["hidden"] = hidden.dtype

    def array(dtype: jax.typing.DTypeLike, trailing: tuple[int | str, ...]) -> jax.ShapeDtypeStruct:
        """Return [S, *trailing] with the sizes that names stand for."""
        return jax.ShapeDtypeStruct((num_slots, *(sizes.get(size, size) for size in trailing)), dtype)

    arrays = {
        each.name: array(dtypes.get(each.name, each.metadata["dtype"]), each.metadata["trailing"])
        for each in fields(SlotState)
        if optional.get(each.name, True)
    }
    return SlotState(**arrays)  # type: ignore[arg-type]  # used in place of arrays


def state_partition(state: SlotState, columns: P) -> SlotState:
    """Return the PartitionSpec of each array: `columns` for the [S, V] arrays, replicated for the others."""
    cuts = {name: columns if name in _BY_TOKEN else P() for name, array in vars(state).items() if array is not None}
    return SlotState(**cuts)  # type: ignore[arg-type]  # used in place of arrays


def state_bytes(
    num_slots: int,
    vocab_size: int,
    max_pages: int,
    *,
    parts: int = 1,
    hidden: jax.ShapeDtypeStruct | None = None,
) -> int:
    """Return the bytes of the state on one device if `parts` devices split the [S, V] arrays. hidden: as above"""
    shapes = vars(state_shapes(num_slots, vocab_size, max_pages, hidden=hidden))
    sizes = {name: x.size * x.dtype.itemsize for name, x in shapes.items() if x is not None}
    return sum(size // (parts if name in _BY_TOKEN else 1) for name, size in sizes.items())


# --- host: SlotInit -> packed int32 groups


def pack_bits(token_ids: Iterable[int], vocab_size: int, *, allow: bool) -> np.ndarray:
    """Pack ids into a bitmask, int32 [W]: bit 1 for the given ids if `allow`, else for all others.

    Ids outside the vocabulary are ignored.
    """
    bits = np.full(mask_words(vocab_size) * 32, not allow, bool)
    ids = np.fromiter(token_ids, np.int64)
    bits[ids[(ids >= 0) & (ids < vocab_size)]] = allow
    return np.packbits(bits, bitorder="little").view("<u4").view(np.int32)


def pack_admit(inits: list[SlotInit], num_slots: int) -> Iterator[np.ndarray]:
    """Yield int32 [ADMIT_GROUP, ADMIT_WIDTH] groups for `admit`. Unused rows have slot `num_slots`."""
    for first in range(0, len(inits), ADMIT_GROUP):
        group = np.zeros((ADMIT_GROUP, ADMIT_WIDTH), np.int32)
        group[:, 0] = num_slots
        for row, init in zip(group, inits[first : first + ADMIT_GROUP], strict=False):
            _pack_admit_row(row, init)
        yield group


def _pack_admit_row(row: np.ndarray, init: SlotInit) -> None:
    row[0] = init.slot
    row[1:3] = _words(init.seed & (2**64 - 1))
    row[3:_FIRST_FLOAT] = [min(int(source(init)), _INT_MAX) for source in _INTS.values()]
    floats = np.array([source(init) for source in _FLOATS.values()], np.float32)
    row[_FIRST_FLOAT:_WATERMARK] = floats.view(np.int32)
    row[_WATERMARK:_RECENT] = _words(init.params.watermark_key or 0)
    recent = init.token_ids[-RECENT:]
    row[ADMIT_WIDTH - len(recent) :] = recent


def _words(value: int) -> np.ndarray:
    """Return 64 bits as int32 [2], the low word first."""
    return np.array([value & 0xFFFFFFFF, value >> 32], np.uint32).view(np.int32)


def _single_bad_words(params: SamplingParams) -> set[int]:
    return {word[0] for word in params.bad_words_token_ids if len(word) == 1}


def _allow_mask_needed(params: SamplingParams) -> bool:
    return params.allowed_token_ids is not None or bool(_single_bad_words(params))


def pack_masks(init: SlotInit, vocab_size: int) -> np.ndarray | None:
    """Pack (slot, allow words, early words), int32 [1 + 2W], for `admit_masks`. None if the request needs no mask.

    The allow mask has allowed_token_ids without bad words of one token. Bad words of several tokens depend on the
    output and are in the step's bitmask.
    """
    params = init.params
    if not (_allow_mask_needed(params) or params.min_tokens):
        return None
    allow = pack_bits(_single_bad_words(params), vocab_size, allow=False)
    if params.allowed_token_ids is not None:
        allow &= pack_bits(params.allowed_token_ids, vocab_size, allow=True)
    early = pack_bits((*init.eos_token_ids, *params.stop_token_ids), vocab_size, allow=False)
    return np.concatenate([np.array([init.slot], np.int32), allow, early])


def pack_bias(init: SlotInit) -> np.ndarray | None:
    """Pack (slot, ids, values), int32 [1 + 2 * MAX_LOGIT_BIAS], for `admit_bias`. None if there is no logit_bias."""
    bias = init.params.logit_bias
    if not bias:
        return None
    packed = np.zeros(1 + 2 * MAX_LOGIT_BIAS, np.int32)
    packed[0] = init.slot
    packed[1 : 1 + len(bias)] = list(bias)
    values = np.array(list(bias.values()), np.float32).view(np.int32)
    packed[1 + MAX_LOGIT_BIAS : 1 + MAX_LOGIT_BIAS + len(bias)] = values
    return packed


def pack_tokens(init: SlotInit) -> Iterator[np.ndarray]:
    """Yield (slot, prompt tokens in the chunk, ids), int32 [2 + TOKEN_CHUNK], for `admit_tokens`.

    Yields nothing if the request has no penalties.
    """
    if not has_penalties(init.params):
        return
    for first in range(0, len(init.token_ids), TOKEN_CHUNK):
        chunk = init.token_ids[first : first + TOKEN_CHUNK]
        packed = np.full(2 + TOKEN_CHUNK, _NO_TOKEN, np.int32)
        packed[0] = init.slot
        packed[1] = max(0, init.num_prompt_tokens - first)
        packed[2 : 2 + len(chunk)] = chunk
        yield packed


def has_penalties(params: SamplingParams) -> bool:
    neutral = (1.0, 0.0, 0.0)
    return (params.repetition_penalty, params.frequency_penalty, params.presence_penalty) != neutral


# --- device: packed groups -> slot state


def admit(state: SlotState, packed: jax.Array) -> SlotState:
    """Apply a group of SlotInits. packed: int32 [ADMIT_GROUP, ADMIT_WIDTH] from `pack_admit`."""
    slots = packed[:, 0]
    values = {
        "seed": jax.lax.bitcast_convert_type(packed[:, 1:3], jnp.uint32),
        "token_counts": jnp.int16(0),
        "in_prompt": jnp.bool_(False),
        "watermark": jax.lax.bitcast_convert_type(packed[:, _WATERMARK:_RECENT], jnp.uint32),
        "recent": packed[:, _RECENT:],
    }
    values |= {name: packed[:, 3 + i] for i, name in enumerate(_INTS)}
    floats = jax.lax.bitcast_convert_type(packed[:, _FIRST_FLOAT:_WATERMARK], jnp.float32)
    values |= {name: floats[:, i] for i, name in enumerate(_FLOATS)}
    if state.hidden_at is not None:
        values["hidden_at"] = jnp.int32(-1)
    return state.replace(
        **{name: getattr(state, name).at[slots].set(value, mode="drop") for name, value in values.items()}
    )


def admit_masks(state: SlotState, packed: jax.Array) -> SlotState:
    """Set one slot's allow and early masks. packed: int32 [1 + 2W] from `pack_masks`."""
    slot, words = packed[0], state.allow_mask.shape[1]
    return state.replace(
        allow_mask=state.allow_mask.at[slot].set(packed[1 : 1 + words], mode="drop"),
        early_mask=state.early_mask.at[slot].set(packed[1 + words :], mode="drop"),
    )


def admit_bias(state: SlotState, packed: jax.Array) -> SlotState:
    """Set one slot's logit bias. packed: int32 [1 + 2 * MAX_LOGIT_BIAS] from `pack_bias`."""
    slot = packed[0]
    ids, values = packed[1 : 1 + MAX_LOGIT_BIAS], packed[1 + MAX_LOGIT_BIAS :]
    return state.replace(
        bias_ids=state.bias_ids.at[slot].set(ids, mode="drop"),
        bias_values=state.bias_values.at[slot].set(jax.lax.bitcast_convert_type(values, jnp.float32), mode="drop"),
    )


def admit_tokens(state: SlotState, packed: jax.Array) -> SlotState:
    """Count a chunk of a slot's prompt, and of the output it had before preemption.

    packed: int32 [2 + TOKEN_CHUNK] from `pack_tokens`.
    """
    slot, num_prompt, tokens = packed[0], packed[1], packed[2:]
    is_prompt = jnp.arange(TOKEN_CHUNK, dtype=jnp.int32) < num_prompt
    prompt_tokens = jnp.where(is_prompt, tokens, _NO_TOKEN)
    output_tokens = jnp.where(is_prompt, _NO_TOKEN, tokens)
    row = state.token_counts[slot].astype(jnp.int32).at[output_tokens].add(1, mode="drop")
    return state.replace(
        in_prompt=state.in_prompt.at[slot, prompt_tokens].set(True, mode="drop"),
        token_counts=state.token_counts.at[slot].set(jnp.minimum(row, MAX_COUNT).astype(jnp.int16), mode="drop"),
    )


def pack_deltas(inits: list[SlotInit], num_slots: int) -> Iterator[np.ndarray]:
    """Yield int32 [2, ADMIT_GROUP] groups of slots and position deltas for `admit_deltas`."""
    for first in range(0, len(inits), ADMIT_GROUP):
        some = inits[first : first + ADMIT_GROUP]
        packed = np.full((2, ADMIT_GROUP), num_slots, np.int32)
        packed[:, : len(some)] = [init.slot for init in some], [init.position_delta for init in some]
        yield packed


def admit_deltas(state: SlotState, packed: jax.Array) -> SlotState:
    """Set the position deltas of slots. packed: int32 [2, ADMIT_GROUP] from `pack_deltas`."""
    assert state.position_delta is not None
    slots, deltas = packed
    return state.replace(position_delta=state.position_delta.at[slots].set(deltas, mode="drop"))


APPENDED = ("position", "recent", "num_outputs", "token_counts")  # the arrays that `append_tokens` changes


def append_tokens(state: SlotState, slots: jax.Array, tokens: jax.Array) -> SlotState:
    """Record one sampled token per row. slots, tokens: int32 [R]. Padding rows write nothing."""
    room = state.token_counts.at[slots, tokens].get(mode="clip") < MAX_COUNT
    before = state.recent.at[slots].get(mode="clip")
    recent = jnp.concatenate([before[:, 1:], tokens[:, None]], axis=1)
    return state.replace(
        position=state.position.at[slots].add(1, mode="drop"),
        recent=state.recent.at[slots].set(recent, mode="drop"),
        num_outputs=state.num_outputs.at[slots].add(1, mode="drop"),
        token_counts=state.token_counts.at[slots, tokens].add(room.astype(jnp.int16), mode="drop"),
    )
