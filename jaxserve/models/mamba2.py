"""The Mamba-2 layer (https://arxiv.org/abs/2405.21060) of models that also have attention: Bamba, Granite 4, Falcon-H1.

In the terms of `ops.state`, B is the key, C the query and x the value, and the heads with one B and C are a key head.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxserve.models.config import ModelConfig
from jaxserve.models.layers import AttendFn, Cache, HeadRows, Linear, RopeTable, StateInputs, over_rms
from jaxserve.models.weights import Part, param
from jaxserve.ops.linear import Products
from jaxserve.ops.state import StateSpec, StateWeights

_FLOAT32 = jnp.dtype(jnp.float32)


class _Piece(NamedTuple):
    """Rows of a checkpoint's tensor, which are shared out evenly over the key heads.

    first, rows: the rows of the tensor. copies: of each row over the key heads that share it. place: row of a key head
    at which its share begins
    """

    first: int
    rows: int
    copies: int
    place: int


class Mamba2Taps(nnx.Module):
    """A causal convolution of each channel: weight [Hk, channels, W], and maybe a bias [Hk, channels].

    The checkpoint has the weight as [x | B | C, 1, W].
    """

    def __init__(self, spec: StateSpec, dtype: jnp.dtype, *, bias: bool) -> None:
        pieces = _convolved(spec)
        shape, rest = (spec.key_heads, spec.channels), (1, spec.conv_width)
        self.weight = param(
            (*shape, spec.conv_width),
            ("kv_heads", None, None),
            dtype,
            parts=_parts("conv1d.weight", spec, pieces, rest, rest[1:]),
        )
        self.bias = (
            param(shape, ("kv_heads", None), dtype, "zeros", _parts("conv1d.bias", spec, pieces)) if bias else None
        )


class GroupNorm(nnx.Module):
    """weight * y / rms(y) over the heads of each group, in float32, of y = x * silu(gate); or the gate comes last.

    A group that is split over devices is summed over them.
    """

    def __init__(self, spec: StateSpec, eps: float, *, before_gate: bool) -> None:
        self.weight = param((spec.heads * spec.v_dim,), ("q_heads",), _FLOAT32, init="ones")
        self.groups, self.is_split = spec.key_heads // spec.copies, spec.copies > 1
        self.eps, self.before_gate = eps, before_gate

    def __call__(self, x: jax.Array, gate: jax.Array, linear: Products) -> jax.Array:
        """Norm x [T, H V] by gate [T, H V] -> [T, H V] in gate's dtype."""
        y = x.astype(jnp.float32) if self.before_gate else gated(x, gate)
        y = linear.whole(y, self._over_rms) if self.is_split else self._over_rms(y)
        y = y * self.weight[...][None, :]
        return (gated(y, gate) if self.before_gate else y).astype(gate.dtype)

    def _over_rms(self, x: jax.Array) -> jax.Array:
        return over_rms(x.reshape(x.shape[0], self.groups, -1), self.eps).reshape(x.shape)


def gated(x: jax.Array, gate: jax.Array) -> jax.Array:
    """Return x * silu(gate), both [T, n], in float32."""
    return x.astype(jnp.float32) * jax.nn.silu(gate.astype(jnp.float32))


class Mamba2(nnx.Module):
    """A projection, the recurrence of `ops.state`, a norm of the gated result, and another projection.

    in_proj [Hk, 2 r V + 2 K + r, D] has the rows of z, C, B, x and dt of each key head, so a split over key heads
    splits all of it. Where a group's heads are on several devices, each has a copy of its B and C.
    """

    def __init__(self, config: ModelConfig, spec: StateSpec, dtype: jnp.dtype) -> None:
        assert config.mamba2 is not None
        self.spec, own, model = spec, config.mamba2, config.hidden_size
        inner, self.values = spec.heads * spec.v_dim, spec.group * spec.v_dim
        convolved = [piece._replace(first=inner + piece.first, place=self.values + piece.place)
                     for piece in _convolved(spec)]  # fmt: skip
        dt = _Piece(convolved[-1].first + convolved[-1].rows, spec.heads, 1, self.values + spec.channels)
        pieces = (_Piece(0, inner, 1, 0), *convolved, dt)
        self.in_proj = HeadRows(
            (spec.key_heads, self.values + spec.width, model),
            dtype,
            _parts("in_proj.weight", spec, pieces, (model,), (model,)),
            _parts("in_proj.bias", spec, pieces) if own.proj_bias else (),
        )
        self.conv1d = Mamba2Taps(spec, dtype, bias=own.conv_bias)
        self.A_log, self.D, self.dt_bias = (param((spec.heads,), ("q_heads",), _FLOAT32) for _ in range(3))
        before_gate = own.norm == "before_gate"
        self.norm = None if own.norm == "none" else GroupNorm(spec, config.norm_eps, before_gate=before_gate)
        self.scales = own.scales
        self.out_proj = Linear((model, inner), ("embed", "q_heads"), dtype, bias=own.proj_bias)

    def __call__(
        self, x: jax.Array, rope: RopeTable | None, cache: Cache, attend: AttendFn, linear: Products
    ) -> tuple[jax.Array, Cache]:
        """Run the layer on x [T, D], which needs no rotation -> (out [T, D], cache)."""
        y = self._scaled(self.in_proj(x, linear))
        z, raw = y[:, :, : self.values], y[:, :, self.values :]
        bias = self.conv1d.bias
        weights = StateWeights(
            self.conv1d.weight[...].transpose(2, 0, 1),
            None if bias is None else bias[...],
            self.A_log[...],
            self.dt_bias[...],
            self.D[...],
        )
        out, cache = attend(StateInputs(raw, weights), cache)
        out, z = out.reshape(x.shape[0], -1), z.reshape(x.shape[0], -1)
        out = gated(out, z).astype(z.dtype) if self.norm is None else self.norm(out, z, linear)
        return self.out_proj(out, linear), cache

    def _scaled(self, rows: jax.Array) -> jax.Array:
        """Return rows [T, Hk, rows] times the scale of each kind, in their dtype."""
        if not self.scales:
            return rows
        z, x, b, c, dt = self.scales
        keys, values, group = self.spec.k_dim, self.values, self.spec.group
        each = np.repeat(np.array([z, c, b, x, dt], np.float32), [values, keys, keys, values, group])
        return (rows.astype(jnp.float32) * each[None, None, :]).astype(rows.dtype)


def _convolved(spec: StateSpec) -> tuple[_Piece, ...]:
    """Return the pieces x, B and C of the convolution's channels, which a key head has as C, B and x."""
    inner, keys = spec.heads * spec.v_dim, spec.key_heads // spec.copies * spec.k_dim
    return (
        _Piece(0, inner, 1, 2 * spec.k_dim),
        _Piece(inner, keys, spec.copies, spec.k_dim),
        _Piece(inner + keys, keys, spec.copies, 0),
    )


def _parts(
    name: str, spec: StateSpec, pieces: tuple[_Piece, ...], rest: tuple[int, ...] = (), tail: tuple[int, ...] = ()
) -> tuple[Part, ...]:
    """Return the parts of a parameter [Hk, rows, *tail] whose tensor has the rows of all pieces: [rows, *rest]."""
    total, heads = sum(piece.rows for piece in pieces), spec.key_heads
    return tuple(
        Part(
            name,
            (total, *rest),
            (heads, piece.rows * piece.copies // heads, *tail),
            (0, piece.place, *(0 for _ in tail)),
            (piece.first, piece.first + piece.rows),
            repeat=piece.copies,
        )
        for piece in pieces
    )
