"""Linear layers: x @ W.T, in the formulation that is fastest on the platform.

It is an XLA dot, or on a CPU the C kernel of `ops.native`. For quantized weights it is `few_bits` on a GPU and
`few_bits_tpu` on a TPU, and on both `rounded` if activations are quantized. Weights keep the checkpoint's layout,
[out, in].
docs/experiments/rejected.md has the measurements behind the choice.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from jaxserve.ops import native as kernels
from jaxserve.ops.linear import rounded, sharded_few_bits
from jaxserve.ops.native import Weight
from jaxserve.ops.quantized import Quantized
from jaxserve.ops.sums import on_each, sum_in_order

FewBits = Literal["gpu", "tpu"]
Rounding = Literal["cpu"] | rounded.Device
GroupedProduct = Callable[[jax.Array, Weight, jax.Array], jax.Array]  # rows [T, in], w [E, out, in], sizes [E]


@dataclass(frozen=True)
class TritonExperts:
    """The choice of the Triton kernels of `ops.moe`.

    one_size: the same blocks for any number of rows, so that a row's sums do not depend on it. interpret: in Pallas'
    interpreter, slowly, on any device.
    """

    one_size: bool = False
    interpret: bool = False


@dataclass(frozen=True)
class TpuExperts:
    """The choice of the TPU kernel of `ops.moe`. Options as for `TritonExperts`."""

    one_size: bool = False
    interpret: bool = False


@dataclass(frozen=True)
class AdapterRows:
    """The adapters of the T rows of a program, see `models.low_rank`.

    columns: bool [T, K], whether a column belongs to the row's adapter. used: bool [T], whether the row has one
    any_used: bool, whether a row has one
    """

    columns: jax.Array
    used: jax.Array
    any_used: jax.Array


ExpertKernels = TritonExperts | TpuExperts  # each runs over several devices too
WEIGHT_FIRST_ROWS = 64  # up to this many rows W @ x.T is faster on a CPU: x @ W.T repacks W at every call


@dataclass(frozen=True)
class Products:
    """Multiplies the activations of a program by weights. These options hold for all of its products.

    deterministic: a row's result depends on that row only. One formulation serves every T, and XLA's kernel for a
      single row is avoided because it sums in another order. Needs the options of runtime.compilation.compiler.
    native: use the C kernels for float32 activations. The caller has loaded `ops.native`, and the program runs on one
      CPU. A bfloat16 or quantized weight gives the bits of the same values in float32.
    few_bits: the platform whose kernel multiplies a quantized weight and few rows of 16-bit activations, unless
      deterministic. The program runs there.
    rounded: the device for which activations are quantized, which is faster. cpu: with native, for weights that
      `native.rounds` accepts. Others: for weights that `rounded.takes` accepts, unless deterministic.
    experts: the kernels that multiply the weights of experts; auto: the C kernel if `native`, else XLA. tpu: the kernel
      for bfloat16 activations, with weights in bfloat16 or quantized.
    sharded: the program runs over several devices.
    adapters: of the rows, in a program that is being traced; None: no layer has adapters.
    XLA's formulations convert a weight of another form to x's dtype first.
    """

    deterministic: bool = False
    native: bool = False
    few_bits: FewBits | None = None
    rounded: Rounding | None = None
    experts: Literal["auto", "xla", "triton", "tpu"] = "auto"
    sharded: bool = False
    adapters: AdapterRows | None = field(default=None, compare=False)

    @property
    def in_order(self) -> bool:
        """Return whether sums over devices must be in the order of the devices."""
        return self.deterministic and self.sharded

    def __call__(
        self,
        x: jax.Array,
        w: Weight,
        bias: jax.Array | None = None,
        *,
        out_dtype: DTypeLike | None = None,
        split: tuple[str, ...] = (),
    ) -> jax.Array:
        """Multiply x [T, in] by w [*out, in] transposed and add bias [*out].

        Returns [T, *out] in `out_dtype`, by default x's dtype. The formulation depends on the platform that the
        program is lowered for and on T, which is static.
        split: the mesh axes that split `in`. The compiler knows them too, and adds over them unless `in_order`.
        """
        out_dtype = x.dtype if out_dtype is None else out_dtype
        if isinstance(w, Quantized):
            x, w = w.meet(x)
            if w.tensor_scale is not None:
                y = self(x, w.unscaled(), out_dtype=jnp.float32, split=split) * w.tensor_scale[None, ..., 0]
                return (y if bias is None else y + bias.astype(jnp.float32)[None]).astype(out_dtype)
        y = _added_in_order(x, w, out_dtype, split) if self.in_order and split else self._multiply(x, w, out_dtype)
        return y if bias is None else y + bias.astype(out_dtype)[None]

    def _multiply(self, x: jax.Array, w: Weight, out_dtype: DTypeLike) -> jax.Array:
        if self.native and x.dtype == out_dtype == jnp.float32 and kernels.takes(w):
            y = _native(x, _matrix(w), few=not self.deterministic, rounded=self.rounded == "cpu")
            return y.reshape(x.shape[0], *w.shape[:-1])
        if self.deterministic:
            return _at_least_two_rows(x, w, out_dtype)
        if isinstance(w, Quantized) and self._rounds(w):
            few = x.shape[0] <= rounded.FEW_ROWS
            return self._few_rounded(x, w, out_dtype) if few else self._rounded(x, w, out_dtype)
        return self._widened(x, w, out_dtype)

    def _widened(self, x: jax.Array, w: Weight, out_dtype: DTypeLike) -> jax.Array:
        """Multiply unrounded x by w, dequantized to x's dtype."""
        if self.few_bits and isinstance(w, Quantized) and (kernel := _kernel(self.few_bits)).takes(x):
            product = partial(sharded_few_bits.matmul, kernel.matmul) if self.sharded else kernel.matmul
            return product(x, w, out_dtype)
        if x.shape[0] > WEIGHT_FIRST_ROWS:
            return _plain(x, w, out_dtype)
        on_cpu, elsewhere = partial(_weight_first, out_dtype=out_dtype), partial(_plain, out_dtype=out_dtype)
        return lax.platform_dependent(x, w, cpu=on_cpu, default=elsewhere)

    def _rounds(self, w: Quantized) -> bool:
        return self.rounded is not None and self.rounded != "cpu" and rounded.takes(w, self.rounded)

    def _rounded(self, x: jax.Array, w: Quantized, out_dtype: DTypeLike) -> jax.Array:
        """Multiply quantized rows. Their scales are the same on any number of devices: the maxima are over all of K."""
        if self.sharded:
            return sharded_few_bits.matmul(rounded.multiply, rounded.rounded(x, w), w, out_dtype)
        product = rounded.matmul_on_tpu if self.rounded == "tpu" else rounded.matmul
        return product(x, w, out_dtype)

    def _few_rounded(self, x: jax.Array, w: Quantized, out_dtype: DTypeLike) -> jax.Array:
        """Multiply few quantized rows. A scale for a whole row multiplies the sums, as it does for many rows."""
        rows = rounded.rounded(x, w)
        if rows.scales.shape[1] > 1:
            return self._widened(rows.astype(x.dtype), w, out_dtype)
        product = partial(
            rounded.multiply_wide, dataclasses.replace(self, sharded=False, adapters=None)._widened, x.dtype
        )
        return sharded_few_bits.matmul(product, rows, w, out_dtype) if self.sharded else product(rows, w, out_dtype)

    def whole(self, x: jax.Array, function: Callable[[jax.Array], jax.Array] = lambda x: x) -> jax.Array:
        """Return function(x) for x [...]; if `in_order`, every device computes it from all of x.

        Use it for a function that sums over an axis that may be split.
        """
        return on_each(function, x) if self.in_order else function(x)

    def of_experts(
        self, dtype: DTypeLike, *weights: Weight, gated: bool = True
    ) -> GroupedProduct | ExpertKernels | None:
        """Return the kernel that multiplies rows by these weights of experts, for activations of `dtype`. None: XLA.

        The C kernel does not accept all weights; Triton's kernels do. gated: whether the experts have a gate, as
        the kernel for a TPU needs
        """
        if self.experts == "triton":
            return TritonExperts(one_size=self.deterministic)
        if self.experts == "tpu" and gated and dtype == jnp.bfloat16 and all(map(_for_tpu, weights)):
            return TpuExperts(one_size=self.deterministic)
        if not self.native or self.experts == "xla" or dtype != jnp.float32 or not all(map(kernels.takes, weights)):
            return None
        return partial(kernels.matmul_grouped, few=not self.deterministic)


def _added_in_order(x: jax.Array, w: Weight, out_dtype: DTypeLike, split: tuple[str, ...]) -> jax.Array:
    """Multiply x [T, in] by w [out, in], `in` split over mesh axes, and add in the order of the devices.

    The parts are float32 and rounded once. Returns [T, out] in `out_dtype`, on every device.
    """
    mesh = jax.typeof(jax.tree.leaves(w)[0]).sharding.mesh
    cut = PartitionSpec(None, split)
    cut_of_w = jax.tree.map(lambda leaf: cut if leaf.shape[-1] > 1 else PartitionSpec(), w)  # not a row's only scale

    def local(x: jax.Array, w: Weight) -> jax.Array:
        """Multiply one device's x [T, its in] by its w [out, its in], and add over the devices -> [T, out]."""
        return sum_in_order(_at_least_two_rows(x, w, jnp.float32), split)

    y = jax.shard_map(local, mesh=mesh, in_specs=(cut, cut_of_w), out_specs=PartitionSpec(), check_vma=False)(x, w)
    return y.astype(out_dtype)


def _native(x: jax.Array, w: Weight, *, few: bool, rounded: bool) -> jax.Array:
    """Multiply by a C kernel. few: by the kernels for few rows, if there are so few and they are not short."""
    few = few and x.shape[0] <= kernels.FEW and x.shape[1] >= kernels.FEW_DEPTH
    if rounded and kernels.rounds(w):
        return kernels.matmul_rounded(x, w, few=few)
    return kernels.matmul_few(x, w) if few else kernels.matmul(x, w)


def _kernel(platform: FewBits) -> ModuleType:
    """Import the kernel only where it is used: not every build of jax has Pallas' Triton modules."""
    name = "few_bits" if platform == "gpu" else "few_bits_tpu"
    return importlib.import_module(f"jaxserve.ops.linear.{name}")


def _for_tpu(w: Weight) -> bool:
    """Return whether the TPU's kernel accepts the weights of experts."""
    return isinstance(w, Quantized) or w.dtype == jnp.bfloat16


def _matrix(w: Weight) -> Weight:
    return w.matrix() if isinstance(w, Quantized) else w.reshape(-1, w.shape[-1])


def _plain(x: jax.Array, w: Weight, out_dtype: DTypeLike) -> jax.Array:
    # Two dimensions only: with more, XLA on a CPU first writes a transposed copy of the weight at every call.
    flat = w.astype(x.dtype).reshape(-1, w.shape[-1])
    y = lax.dot_general(x, flat, (((1,), (1,)), ((), ())), preferred_element_type=out_dtype)
    return y.reshape(x.shape[0], *w.shape[:-1])


def _weight_first(x: jax.Array, w: Weight, out_dtype: DTypeLike) -> jax.Array:
    contract = (((w.ndim - 1,), (1,)), ((), ()))
    y = lax.dot_general(w.astype(x.dtype), x, contract, preferred_element_type=out_dtype)
    return jnp.moveaxis(lax.optimization_barrier(y), -1, 0)  # without the barrier XLA rewrites it to x @ W.T


def _at_least_two_rows(x: jax.Array, w: Weight, out_dtype: DTypeLike) -> jax.Array:
    padded = jnp.pad(x, ((0, max(0, 2 - x.shape[0])), (0, 0)))
    return _plain(padded, w, out_dtype)[: x.shape[0]]
