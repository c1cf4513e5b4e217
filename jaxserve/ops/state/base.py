"""The interface of recurrent-state layers: the arrays that a layer keeps, the rows of a step, and `recur`.

Such a layer keeps, instead of K and V of every token, one matrix per head that summarises all tokens so far. A page of
its arrays holds the whole of that for one sequence:

    state [N, H, K, V] float32        the matrix after the first `folded` tokens
    ring  [N, L, Hk, C]               the layer's inputs at the last L positions; position p is at index p mod L

The state lags behind: it holds only the tokens that are sure. A sampled row's last token may be computed again, and
drafts may be rejected, so their inputs stay in the ring. The next row folds the tokens that became part of the
sequence. Nothing is ever rolled back, and a state has the same bits as if it had been advanced token by token.

    tokens of row r    0 ........ folded ............ start ........... sure ......... end
                       | in state | from ring, folded | this step's, folded | this step's, to the ring only

Kinds, with S [K, V] of a value head, and q, k, v, gates of its token after the convolution (`prepare`):

    delta          gated delta net (https://arxiv.org/abs/2412.06464): Qwen3-Next and Qwen3.5
                   S = exp(g) S;  u = beta (v - S^T k);  S = S + k u^T;  o = S^T q
    channel_delta  the same with a decay g per key channel (Kimi Delta Attention, https://arxiv.org/abs/2510.26692)
    mamba2         https://arxiv.org/abs/2405.21060: S = exp(g) S + k (dt v)^T;  o = S^T q + D v
    convolution    no matrix: the output is the convolution itself (LFM2). Only the ring is kept

Axes: T packed tokens, R rows, N pages, L positions of a ring, Hk key heads, H value heads (H = Hk r; value head h reads
key head h // r), K and V sizes of a key and of a value, W width of the causal convolution, C numbers of a token and key
head. Everything is laid out by key head, so a split over key heads splits all of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp

CHUNK = 64  # tokens that the chunked forms take at once: they cut a row at the multiples of this position
Kind = Literal["delta", "channel_delta", "mamba2", "convolution"]


@dataclass(frozen=True)
class StateSpec:
    """The static description of a recurrent-state layer. Hashable.

    groups of numbers of a token, by key head:

        convolved  [q K | k K | v r V]                    the inputs of the convolution
        gates      delta [b r | a r], channel_delta [b r | f r K], mamba2 [dt r], convolution none

    decay_floor: of channel_delta, see `_log_decay`; None: softplus decides alone.
    dt_limits: smallest and largest dt of mamba2.
    copies: of each of the checkpoint's key heads, if there are more devices than heads; key_heads counts the copies.
    """

    kind: Kind
    key_heads: int
    heads: int
    k_dim: int
    v_dim: int
    conv_width: int
    decay_floor: float | None = None
    dt_limits: tuple[float, float] = (0.0, math.inf)
    copies: int = 1

    @property
    def group(self) -> int:
        """Return r, the number of value heads of a key head."""
        return self.heads // self.key_heads

    @property
    def channels(self) -> int:
        """Return the number of convolved channels of a key head."""
        return 2 * self.k_dim + self.group * self.v_dim

    @property
    def num_gates(self) -> int:
        """Return the number of gates of a key head and token."""
        per_head = {"delta": 2, "channel_delta": 1 + self.k_dim, "mamba2": 1, "convolution": 0}
        return per_head[self.kind] * self.group

    @property
    def width(self) -> int:
        """Return C, the numbers that a ring keeps of a key head and token."""
        return self.channels + self.num_gates


class StateArrays(NamedTuple):
    """The arrays that a layer keeps. A page may hold anything before it is first written, NaN included.

    state: float32 [N, H, K, V], None for a convolution. ring: [N, L, Hk, C], in the dtype of the layer's inputs.
    """

    state: jax.Array | None
    ring: jax.Array


def state_shapes(spec: StateSpec, num_pages: int, ring: int) -> tuple[tuple[int, ...] | None, tuple[int, ...]]:
    """Return the shapes of `StateArrays` for N pages and rings of L positions, L at least `ring_length(spec, 0)`."""
    state = None if spec.kind == "convolution" else (num_pages, spec.heads, spec.k_dim, spec.v_dim)
    return state, (num_pages, ring, spec.key_heads, spec.width)


def ring_length(spec: StateSpec, max_drafts: int) -> int:
    """Return L: the inputs that the convolution of a state's last token reads, and the inputs of drafts."""
    return spec.conv_width + max_drafts


class StateWeights(NamedTuple):
    """The parameters of a layer that its recurrence uses.

    conv: [W, Hk, channels], tap W - 1 is the current token's. conv_bias: [Hk, channels].
    log_a: float32 [H], A_log of the published models. dt_bias: float32 [H], of channel_delta [H, K].
    skip: float32 [H], D of mamba2.
    """

    conv: jax.Array
    conv_bias: jax.Array | None = None
    log_a: jax.Array | None = None
    dt_bias: jax.Array | None = None
    skip: jax.Array | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StateRows:
    """The rows of one step. A pytree; all arrays are int32.

    Row r has the tokens [cu_q_lens[r], cu_q_lens[r + 1]) of the step, at positions from starts[r] on. Its state is on
    page read[r] and holds folded[r] tokens; start - folded is at most L - W + 1. The tokens before sure[r] are folded,
    and the state after them goes to page write[r], with the ring of the last L positions before the row's end.
    A row without tokens changes nothing. Tokens after cu_q_lens[-1] are padding and give zeros.
    No two rows write the same page, and no row writes a page that another reads.
    """

    cu_q_lens: jax.Array  # [R + 1]
    starts: jax.Array  # [R]  position of the row's first token
    read: jax.Array  # [R]  N and above: nothing is folded, the state is zero
    write: jax.Array  # [R]  may be `read`; N and above: nowhere
    folded: jax.Array  # [R]
    sure: jax.Array  # [R]  at least folded, at most start + q_len
    # [R, E, 2]  (position, page): the state and ring after `position` tokens go to that page too, if folded < position
    # <= sure. Any order. N and above: nowhere. A position is a multiple of CHUNK, of a convolution any.
    emits: jax.Array
    decode_only: bool = field(default=False, metadata={"static": True})  # T == R, and token r is row r's only token
    # Batch invariance: a row's bits must not depend on how its tokens were cut into steps.
    per_token: bool = field(default=False, metadata={"static": True})


class StateBackend(Protocol):
    """The kernels that advance a layer. Stateless and hashable."""

    @property
    def name(self) -> str:
        """Return the backend's name."""
        ...

    def recur(
        self, spec: StateSpec, arrays: StateArrays, raw: jax.Array, weights: StateWeights, rows: StateRows
    ) -> tuple[jax.Array, StateArrays]:
        """Advance a layer by raw [T, Hk, C], the inputs of the step's tokens -> (out [T, H, V], arrays).

        raw has the ring's dtype, out too. Sums and states are float32. The arrays are updated in place if donated.
        """
        ...


class Prepared(NamedTuple):
    """The operands of the recurrence for tokens [...], all float32.

    q, k: [..., Hk, K]. v: [..., H, V]. decay: log decay, at most 0, [..., H], of channel_delta [..., H, K].
    rate: beta or dt, [..., H]. After a convolution alone, only v.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    decay: jax.Array
    rate: jax.Array


def convolve(spec: StateSpec, taps: jax.Array, weights: StateWeights) -> jax.Array:
    """Return the convolution of taps [..., W, Hk, channels], oldest first -> float32 [..., Hk, channels].

    All kinds but the plain convolution pass the result through silu.
    """
    kernel = weights.conv.astype(jnp.float32)
    lead = taps.ndim - 3
    total = taps[..., 0, :, :].astype(jnp.float32) * behind(lead, kernel[0])
    for j in range(1, spec.conv_width):
        total = total + taps[..., j, :, :].astype(jnp.float32) * behind(lead, kernel[j])
    if weights.conv_bias is not None:
        total = total + behind(lead, weights.conv_bias.astype(jnp.float32))
    return total if spec.kind == "convolution" else jax.nn.silu(total)


def prepare(spec: StateSpec, convolved: jax.Array, gates: jax.Array, weights: StateWeights) -> Prepared:
    """Make the recurrence's operands of convolved [..., Hk, channels] and gates [..., Hk, num_gates].

    q and k of the delta kinds are divided by their length, with 1e-6 added to its square, and q by sqrt(K).
    """
    lead, r, k_dim = convolved.shape[:-2], spec.group, spec.k_dim
    q, k, v = jnp.split(convolved, [k_dim, 2 * k_dim], axis=-1)
    v = v.reshape(*lead, spec.heads, spec.v_dim)
    if spec.kind == "convolution":
        none = jnp.zeros((*lead, spec.heads), jnp.float32)
        return Prepared(q, k, v, none, none)
    assert weights.log_a is not None
    assert weights.dt_bias is not None
    gates = gates.astype(jnp.float32)
    a, dt_bias = behind(len(lead), jnp.exp(weights.log_a)), behind(len(lead), weights.dt_bias)
    if spec.kind == "mamba2":
        rate = jnp.clip(jax.nn.softplus(gates.reshape(*lead, spec.heads) + dt_bias), *spec.dt_limits)
        return Prepared(q, k, v, -a * rate, rate)
    q = q * jax.lax.rsqrt(jnp.sum(q * q, axis=-1, keepdims=True) + 1e-6) * k_dim**-0.5
    k = k * jax.lax.rsqrt(jnp.sum(k * k, axis=-1, keepdims=True) + 1e-6)
    rate = jax.nn.sigmoid(gates[..., :r]).reshape(*lead, spec.heads)
    return Prepared(q, k, v, _log_decay(spec, gates[..., r:], a, dt_bias), rate)


def _log_decay(spec: StateSpec, gates: jax.Array, a: jax.Array, dt_bias: jax.Array) -> jax.Array:
    """Return the log decay of the delta kinds from gates [..., Hk, r] or [..., Hk, r K].

    With a floor it lies between that and 0, as Kimi-K3's do.
    """
    lead = gates.shape[:-2]
    if spec.kind == "delta":
        return -a * jax.nn.softplus(gates.reshape(*lead, spec.heads) + dt_bias)
    shifted = gates.reshape(*lead, spec.heads, spec.k_dim) + dt_bias
    if spec.decay_floor is not None:
        return spec.decay_floor * jax.nn.sigmoid(a[..., None] * shifted)
    return -a[..., None] * jax.nn.softplus(shifted)


def behind(lead: int, weight: jax.Array) -> jax.Array:
    """Return weight [...] with `lead` axes of 1 before it."""
    return weight.reshape((1,) * lead + weight.shape)


def row_inputs(ring: jax.Array, raw: jax.Array, rows: StateRows, row: jax.Array, position: jax.Array) -> jax.Array:
    """Return the inputs [..., Hk, C] of positions int32 [...] of rows int32 [...]: of the ring, or of this step.

    Positions below 0 give zeros. Positions that the ring has lost give anything, and so do those after the row's end.
    """
    length, pages = ring.shape[1], ring.shape[0]
    start, page = rows.starts[row], rows.read[row]
    old = ring.at[page, position % length].get(mode="clip")
    new = raw.at[rows.cu_q_lens[row] + position - start].get(mode="clip")
    inputs = jnp.where((position < start)[..., None, None], old, new)
    known = (position >= 0) & ((position >= start) | (page < pages))
    return jnp.where(known[..., None, None], inputs, jnp.zeros((), raw.dtype))


def store_rings(ring: jax.Array, raw: jax.Array, rows: StateRows) -> jax.Array:
    """Return the ring with the last L inputs of each row at its write page, and at the pages of its emits."""
    pages, length = ring.shape[:2]
    row = jnp.arange(rows.starts.shape[0], dtype=jnp.int32)
    count = rows.cu_q_lens[1:] - rows.cu_q_lens[:-1]
    target = jnp.where(count > 0, rows.write, pages)
    ends = jnp.concatenate([(rows.starts + count)[:, None], rows.emits[:, :, 0]], axis=1)  # [R, 1 + E]
    targets = jnp.concatenate([target[:, None], emit_pages(rows, pages)], axis=1)
    index = jnp.arange(length, dtype=jnp.int32)
    last = ends[..., None] - 1  # the position at `index`: the last one that is equal to it modulo L
    position = last - (last - behind(2, index)) % length  # [R, 1 + E, L]
    inputs = row_inputs(ring, raw, rows, jnp.broadcast_to(row[:, None, None], position.shape), position)
    return ring.at[targets].set(inputs, mode="drop")


def emit_pages(rows: StateRows, num_pages: int) -> jax.Array:
    """Return the pages of the emits that this step reaches, int32 [R, E]; num_pages and above: nowhere."""
    position, page = rows.emits[:, :, 0], rows.emits[:, :, 1]
    some = (rows.cu_q_lens[1:] > rows.cu_q_lens[:-1])[:, None]
    reached = some & (rows.folded[:, None] < position) & (position <= rows.sure[:, None])
    return jnp.where(reached, page, num_pages)
