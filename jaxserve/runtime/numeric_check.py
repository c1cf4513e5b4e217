"""Checks that this machine computes correct numbers, at every start and in `jaxserve doctor`.

A compiler can give wrong numbers without an error: jaxlib 0.10.2 on CPUs does (jax-ml/jax#39103). Small programs of the
operations that serve are compiled with the serving programs' options, and compared with numpy. The inputs are integers
so small that every dtype and every order of summation is exact, so the results must be equal. Sizes are odd, because a
compiler's mistakes are in the rows and columns that its vectors leave over.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.errors import ConfigError
from jaxserve.models.layers import GatedActivation
from jaxserve.ops.linear import Products, Rounding
from jaxserve.ops.moe import Chosen, ExpertWeights, moe
from jaxserve.ops.paged_attention import AttentionMetadata, AttentionSpec, Backend
from jaxserve.ops.quantized import BLOCK, MIDDLE, Quantized
from jaxserve.runtime.compilation.compiler import Program, ProgramStorage, compile_all, compiler_options
from jaxserve.runtime.mesh import AXES, DeviceMesh, expert_kernels
from jaxserve.runtime.runner_setup import native_products
from jaxserve.runtime.sampling.sampler import argmax, filter_probs, inverse_cdf, random_uniform
from jaxserve.types.sampling import threefry2x32

_PAGE = 16
_PAGES = ((3,), (0, 4, 2), (1,))  # of each row of the attention case
_KV_LENS = (7, 33, 5)
_Q_LENS = (3, 1, 5)
_NUM_PAGES = 6
_HEADS, _KV_HEADS, _HEAD_DIM = 4, 2, 128
_VOCAB = 1003
_CHOSEN = ((0, 3), (3, 4), (4, 0), (0, 4), (4, 3), (0, 3), (4, 0))  # experts 1 and 2 have no rows
_EXPERTS, _FFN, _MODEL = 5, 40, 72
_Form = tuple[ExpertWeights, np.ndarray, np.ndarray]  # and their numbers: gate and up [5, F, 2, D], down [5, D, F]
_TPU_FFN, _TPU_MODEL = 64, 128  # the depth that its kernel for wide pairs needs, and whole blocks of 4 bits


@dataclass(frozen=True)
class NumericCase:
    """A function, the arrays that it is called with, and the results that it must return.

    tolerance: largest difference from an expected value, relative to 1 plus that value; 0: results must be equal
    identity: see Program
    """

    name: str
    function: Callable[..., tuple[jax.Array, ...]]
    inputs: tuple[Any, ...]
    expected: tuple[np.ndarray, ...]
    tolerance: float = 0.0
    identity: str | None = None


def sums() -> NumericCase:
    """Make reductions with rows left over. The first is the program of jax-ml/jax#39103."""
    row = np.arange(32769)
    narrow = np.stack([row % 251, row % 7, row % 5], axis=1).astype(np.float32)
    wide = _whole_numbers((33, 67))

    def function(narrow: jax.Array, matrix: jax.Array, wide: jax.Array) -> tuple[jax.Array, ...]:
        """narrow: float32 [32769, 3], matrix: float32 [3, 3], wide: float32 [33, 67]"""
        squares = jax.vmap(lambda row: jnp.sum((matrix @ row) ** 2))(narrow)
        return squares, jnp.sum(wide * wide, axis=1), jnp.max(wide, axis=1), jnp.sum(wide, axis=0)

    squares = (narrow**2).sum(axis=1), (wide**2).sum(axis=1)
    return NumericCase(
        "sums",
        function,
        (narrow, np.eye(3, dtype=np.float32), wide),
        (*squares, wide.max(axis=1), wide.sum(axis=0)),
        identity="sums",
    )


def products(linear: Callable[..., jax.Array], dtype: jnp.dtype) -> NumericCase:
    """Make linear layers of x [1, 131], [7, 131] and [65, 131], for which `linear` has different formulations.

    dtype: of activations and weight [37, 131]
    """
    weight = _whole_numbers((37, 131))
    rows = [_whole_numbers((count, 131), seed=count) for count in (1, 7, 65)]

    def function(weight: jax.Array, *rows: jax.Array) -> tuple[jax.Array, ...]:
        """weight: [37, 131], rows: [1, 131], [7, 131] and [65, 131]"""
        return tuple(linear(x, weight, out_dtype=jnp.float32) for x in rows)

    inputs = tuple(x.astype(dtype) for x in (weight, *rows))
    expected = tuple(x @ weight.T for x in rows)
    identity = repr(linear) if isinstance(linear, Products) else None
    return NumericCase("matrix products", function, inputs, expected, identity=identity)


def experts(products: Products, dtype: jnp.dtype, tolerance: float) -> NumericCase:
    """Make a layer of experts: seven tokens, each with two of five experts, of which two have no rows.

    Weights and rows are drawn so that results are near 1. dtype: of activations and weights
    """
    rng = np.random.default_rng(11)
    ffn, model = (_TPU_FFN, _TPU_MODEL) if products.experts == "tpu" else (_FFN, _MODEL)
    gate_up = (rng.standard_normal((_EXPERTS, ffn, 2, model)) * model**-0.5).astype(dtype)
    down = (rng.standard_normal((_EXPERTS, model, ffn)) * ffn**-0.5).astype(dtype)
    wide = gate_up.astype(np.float64), down.astype(np.float64)
    return _of_experts("experts", products, dtype, [(ExpertWeights(gate_up, down), *wide)], tolerance)


def experts_of_few_bits(products: Products, tolerance: float) -> NumericCase:
    """Make the layer of `experts` in bfloat16 with weights in int8 and in 4 bits.

    Rows of int8 have one scale each, and 4 bits have one for each group of 32.
    """
    rng = np.random.default_rng(13)
    forms = []
    for packed in (False, True):
        gate_up = _few_bits(rng, (_EXPERTS, _TPU_FFN, 2, _TPU_MODEL), packed=packed)
        down = _few_bits(rng, (_EXPERTS, _TPU_MODEL, _TPU_FFN), packed=packed)
        forms.append((ExpertWeights(gate_up[0], down[0]), gate_up[1], down[1]))
    return _of_experts("experts of few bits", products, jnp.dtype("bfloat16"), forms, tolerance)


def _of_experts(
    name: str, products: Products, dtype: jnp.dtype, forms: Sequence[_Form], tolerance: float
) -> NumericCase:
    """Make layers of experts of drawn rows [7, D] in `dtype`, one for each form."""
    rng = np.random.default_rng(12)
    x = rng.standard_normal((len(_CHOSEN), forms[0][0].down.shape[1])).astype(dtype)
    shares = rng.random((len(_CHOSEN), 2)).astype(np.float32)

    def function(x: jax.Array, chosen: Chosen, *forms: ExpertWeights) -> tuple[jax.Array, ...]:
        """x: [7, D], chosen: ids and weights [7, 2], forms: weights of five experts"""
        activation = GatedActivation("silu", 0.0)
        return tuple(
            moe(x, chosen, form, activation, products.of_experts(x.dtype, form.gate_up, form.down)) for form in forms
        )

    expected = tuple(_through_experts(x.astype(np.float64), shares, *numbers) for _, *numbers in forms)
    chosen = Chosen(np.array(_CHOSEN, np.int32), shares)  # type: ignore[arg-type]
    inputs = (x, chosen, *(weights for weights, *_ in forms))
    return NumericCase(name, function, inputs, expected, tolerance, repr(products))


def _few_bits(rng: np.random.Generator, shape: tuple[int, ...], *, packed: bool) -> tuple[Quantized, np.ndarray]:
    """Draw a weight [..., K] in 4 bits or int8 of about K ** -0.5, and return it also dequantized, in float64."""
    *rows, depth = shape
    codes = rng.integers(-MIDDLE, MIDDLE, shape)
    scales = (rng.uniform(0.5, 1.5, (*rows, depth // BLOCK if packed else 1)) * depth**-0.5 / 5).astype(np.float32)
    numbers = codes * np.repeat(scales.astype(np.float64), depth // scales.shape[-1], axis=-1)
    return Quantized(_packed(codes) if packed else codes.astype(np.int8), scales), numbers  # type: ignore[arg-type]


def _packed(codes: np.ndarray) -> np.ndarray:
    """Return whole numbers [..., K] from -8 to 7 in the form of `Quantized.values`, uint8 [..., K / 2]."""
    halves = (codes + MIDDLE).astype(np.uint8).reshape(*codes.shape[:-1], -1, 2, BLOCK // 2)
    return (halves[..., 0, :] | halves[..., 1, :] << 4).reshape(*codes.shape[:-1], -1)


def rounded_products(linear: Products) -> NumericCase:
    """Make products of x [1, 160], [7, 160] and [65, 160] whose activations rounding does not change.

    The weights are bfloat16, int8 and 4 bits [37, 160]. The largest value of a row's group is 127, so its scale is 1.
    """
    weight = _whole_numbers((37, 160))
    rows = [_whole_numbers((count, 160), seed=count) for count in (1, 7, 65)]
    for x in rows:
        x[:, ::32] = 127
    packed = _packed(weight)

    def function(weight: jax.Array, packed: jax.Array, *rows: jax.Array) -> tuple[jax.Array, ...]:
        """weight: float32 [37, 160], packed: of it, rows: float32 [1, 160], [7, 160] and [65, 160]"""
        ones = jnp.ones((37, 5), jnp.float32)
        forms = weight.astype(jnp.bfloat16), Quantized(weight.astype(jnp.int8), ones), Quantized(packed, ones)
        return tuple(linear(x, w) for w in forms for x in rows)

    expected = tuple(x @ weight.T for x in rows) * 3
    return NumericCase("rounded products", function, (weight, packed, *rows), expected, identity=repr(linear))


def rounded_rows(linear: Products, tolerance: float) -> NumericCase:
    """Make products of x bfloat16 [130, 256], whose values quantization to 8 bits does not change.

    The weights [128, 256] are int8 on a TPU, and int8 and E4M3 elsewhere. They have one scale for a row; on Hopper
    also one for a group. The largest value of a group of x is 127, or 448 for E4M3, so its scale is 1.
    """
    weight, x = _whole_numbers((128, 256)), _whole_numbers((130, 256), seed=1)
    groups = (1, 2) if linear.rounded == "hopper" else (1,)
    largest = {"int8": 127} if linear.rounded == "tpu" else {"int8": 127, "float8_e4m3fn": 448}

    def function(weight: jax.Array, x: jax.Array) -> tuple[jax.Array, ...]:
        """weight: float32 [128, 256], x: float32 [130, 256]"""
        scales = [jnp.ones((128, count), jnp.float32) for count in groups]
        return tuple(
            linear(x.at[:, ::128].set(most).astype(jnp.bfloat16), Quantized(weight.astype(form), scale))
            for form, most in largest.items()
            for scale in scales
        )

    def expected(most: int) -> np.ndarray:
        """Return the product [130, 128] if the largest value of a group is `most`."""
        rows = x.copy()
        rows[:, ::128] = most
        return rows @ weight.T

    wanted = tuple(expected(most) for most in largest.values() for _ in groups)
    return NumericCase("rounded products", function, (weight, x), wanted, tolerance, repr(linear))


def attention(backend: Backend, dtype: jnp.dtype, tolerance: float) -> NumericCase:
    """Make a step of three rows, prompts among them, and a decode step of the same rows, over scattered pages."""
    rng = np.random.default_rng(7)
    context = rng.standard_normal((2, sum(_KV_LENS), _KV_HEADS, _HEAD_DIM), np.float32).astype(dtype)
    query = rng.standard_normal((sum(_Q_LENS), _HEADS, _HEAD_DIM), np.float32).astype(dtype)
    spec = AttentionSpec(_HEAD_DIM**-0.5, _KV_HEADS)
    slots = np.concatenate([_slots(row) for row in range(len(_KV_LENS))])
    last = np.cumsum(_Q_LENS) - 1

    def function(
        query: jax.Array, context: jax.Array, slots: jax.Array, step: AttentionMetadata, decode: AttentionMetadata
    ) -> tuple[jax.Array, ...]:
        """query: [9, heads, head_dim], context: [2, 45, kv_heads, head_dim], slots: int32 [45]"""
        shape = backend.cache_shape(_NUM_PAGES, _PAGE, _KV_HEADS, _HEAD_DIM)
        cache = backend.write(jnp.zeros(shape, dtype), context[0], context[1], slots)
        return backend.attend(query, cache, step, spec), backend.attend(query[last], cache, decode, spec)

    expected = _attended(query.astype(np.float64), context.astype(np.float64))
    return NumericCase(
        f"attention {backend.name}",
        function,
        (query, context, slots, _metadata(_Q_LENS), _metadata((1, 1, 1), decode_only=True)),
        (expected, expected[last]),
        tolerance,
        repr(backend),
    )


def sampler() -> NumericCase:
    """Make the sampler's parts: likeliest token, filters, draw and random numbers."""
    weights = np.random.default_rng(3).integers(0, 64, (3, _VOCAB)).astype(np.float32)
    weights[:, 17] = 256  # the largest of a row is 1
    shares = weights / 256
    top_k, top_p = np.array([0, 5, 0], np.int32), np.array([0.5, 1.0, 1.0], np.float32)
    least = np.array([0, 0, 0.125], np.float32)
    seed = np.array([[1, 2], [3, 4], [2**32 - 1, 5]], np.uint32)
    position = np.array([0, 77, 2**31 - 1], np.int32)
    # halves of a weight between two tokens, over a power of two, so that no rounding decides
    whole = shares * 256
    whole[:, 0] += 2**16 - whole.sum(axis=1)
    uniform = np.array([0.5, 20001.5, 65535.5], np.float32) / np.float32(2**16)

    def function(
        shares: jax.Array, limits: tuple[jax.Array, ...], draws: tuple[jax.Array, ...], keys: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, ...]:
        """shares: float32 [3, V], limits: of `filter_probs`, draws: of `inverse_cdf`, keys: of `random_uniform`"""
        (top_k, top_p, least), (weights, uniform), (seed, position) = limits, draws, keys
        kept = filter_probs(shares, top_k, top_p, least, jnp.ones(3, bool))
        return *argmax(shares), kept, inverse_cdf(weights, uniform), random_uniform(seed, position)

    bits, _ = threefry2x32(seed[:, 0], seed[:, 1], position.astype(np.uint32), np.zeros(3, np.uint32))
    random = ((bits >> 8).astype(np.float32) + 0.5) * np.float32(2**-24)
    expected = (np.full(3, 17), np.ones(3), _filtered(shares), _drawn(whole, uniform), random)
    inputs = (shares, (top_k, top_p, least), (whole, uniform), (seed, position))
    return NumericCase("sampler", function, inputs, expected, identity="sampler")


def _whole_numbers(shape: tuple[int, int], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(-4, 5, shape).astype(np.float32)


def _slots(row: int) -> np.ndarray:
    """Return the slot of each token of a row's context, int32 [kv_len]."""
    pages = np.array(_PAGES[row], np.int32)
    return (pages[:, None] * _PAGE + np.arange(_PAGE, dtype=np.int32)).reshape(-1)[: _KV_LENS[row]]


def _metadata(q_lens: tuple[int, ...], *, decode_only: bool = False) -> AttentionMetadata:
    table = np.zeros((len(_PAGES), max(map(len, _PAGES))), np.int32)
    for row, pages in enumerate(_PAGES):
        table[row, : len(pages)] = pages
    own = [np.arange(kv_len - q_len, kv_len) for q_len, kv_len in zip(q_lens, _KV_LENS, strict=True)]
    arrays = (
        table,
        np.concatenate([[0], np.cumsum(q_lens)]).astype(np.int32),
        np.array(_KV_LENS, np.int32),
        np.concatenate(own).astype(np.int32),
        np.concatenate([_slots(row)[positions] for row, positions in enumerate(own)]),
    )
    return AttentionMetadata(*arrays, decode_only=decode_only)  # type: ignore[arg-type]


def _attended(query: np.ndarray, context: np.ndarray) -> np.ndarray:
    """Attend query [9, N, D] to context [2, 45, KH, D], all float64, one token at a time."""
    out, token, start = np.empty_like(query), 0, 0
    for q_len, kv_len in zip(_Q_LENS, _KV_LENS, strict=True):
        for seen in range(kv_len - q_len + 1, kv_len + 1):
            for head in range(_HEADS):
                keys, values = context[:, start : start + seen, head * _KV_HEADS // _HEADS]
                scores = keys @ query[token, head] * _HEAD_DIM**-0.5
                weights = np.exp(scores - scores.max())
                out[token, head] = weights @ values / weights.sum()
            token += 1
        start += kv_len
    return out


def _through_experts(x: np.ndarray, shares: np.ndarray, gate_up: np.ndarray, down: np.ndarray) -> np.ndarray:
    """Run x [7, D] through the experts of _CHOSEN, all float64, one choice at a time."""
    out = np.zeros_like(x)
    for token, chosen in enumerate(_CHOSEN):
        for expert, share in zip(chosen, shares[token], strict=True):
            gate, up = (gate_up[expert, :, half] @ x[token] for half in (0, 1))
            out[token] += share * (down[expert] @ (gate / (1 + np.exp(-gate)) * up))
    return out


def _filtered(shares: np.ndarray) -> np.ndarray:
    """Filter shares [3, V]: row 0 by top_p 0.5, row 1 by top_k 5, row 2 by min_p 0.125."""
    descending = -np.sort(-shares, axis=1)
    mass = np.searchsorted(np.cumsum(descending[0]), 0.5 * shares[0].sum())
    borders = np.array([descending[0, mass], descending[1, 4], 0.125], np.float32)
    return np.where(shares >= borders[:, None], shares, 0)


def _drawn(weights: np.ndarray, uniform: np.ndarray) -> np.ndarray:
    """Return the token whose share of weights [3, V] contains uniform [3]. Tokens have the order of `inverse_cdf`."""
    order = np.argsort(np.arange(_VOCAB) % 128, kind="stable")
    ends = np.cumsum(weights[:, order], axis=1)
    pairs = zip(ends, uniform, strict=True)
    return np.array([order[np.searchsorted(row, u * row[-1], side="right")] for row, u in pairs])


# Differences of sums in another order, and, elsewhere than in float32 on a CPU, of products in fewer bits.
_ROUNDING, _FEW_BITS = 1e-4, 3e-2


def serving_cases(
    backend: Backend | None,
    mesh: DeviceMesh,
    dtype: jnp.dtype,
    *,
    deterministic: bool,
    of_experts: str | None = None,
    rounded: Rounding | None = None,
) -> list[NumericCase]:
    """Return the cases of the kernels that serve.

    backend: None for an encoder, which has neither paged attention nor a sampler. dtype: of activations
    of_experts: `runtime.experts` for a model with routed experts; None: the model has none
    rounded: see `Products`
    """
    native = backend is not None and native_products(backend, mesh)
    product = Products(deterministic=deterministic, native=native)
    cases = [sums(), products(product, dtype)]
    if of_experts is not None:
        chosen = dataclasses.replace(product, experts=expert_kernels(of_experts, mesh))
        cases.append(experts(chosen, dtype, _tolerance(mesh, dtype)))
        if chosen.experts == "tpu" and dtype == jnp.bfloat16:
            cases.append(experts_of_few_bits(chosen, _tolerance(mesh, dtype)))
    if rounded is not None:
        rounding = dataclasses.replace(product, rounded=rounded)
        on_cpu = rounded == "cpu"
        cases.append(rounded_products(rounding) if on_cpu else rounded_rows(rounding, _tolerance(mesh, dtype)))
    return cases if backend is None else [*cases, attention_case(backend, mesh, dtype), sampler()]


def attention_case(backend: Backend, mesh: DeviceMesh, dtype: jnp.dtype) -> NumericCase:
    """Return the case of an attention backend with the tolerance of this platform."""
    return attention(backend, dtype, _tolerance(mesh, dtype))


def _tolerance(mesh: DeviceMesh, dtype: jnp.dtype) -> float:
    return _ROUNDING if mesh.platform == "cpu" and dtype == jnp.float32 else _FEW_BITS


def check_numbers(
    cases: Sequence[NumericCase], mesh: DeviceMesh, *, deterministic: bool, store: ProgramStorage | None = None
) -> None:
    """Raise ConfigError if the kernels that serve compute wrong numbers on this machine. cases: `serving_cases`

    store: of the compiled cases. They run at every start even if they are stored.
    """
    options = compiler_options(mesh.platform, deterministic=deterministic)
    wrong = wrong_numbers(cases, mesh.local_devices[0], options, store=store)
    if wrong:
        raise ConfigError(
            f"this machine computes wrong numbers with jax {jax.__version__}: {'; '.join(wrong)}",
            fix="run jaxserve doctor; other versions of jax, of the driver or of the C compiler may be right",
        )


def wrong_numbers(
    cases: Sequence[NumericCase],
    device: Any,
    options: Mapping[str, bool | str],
    *,
    workers: int | None = None,
    store: ProgramStorage | None = None,
) -> list[str]:
    """Compile and run the cases on a device, and describe each case whose result is wrong."""
    place = check_place(device)
    compiled = compile_all(numeric_programs(cases, place, options), workers=workers, store=store)
    return [
        f"{case.name}: {problem}"
        for case in cases
        if (problem := _difference(case, compiled[case.name](*jax.device_put(case.inputs, place))))
    ]


def check_place(device: Any) -> NamedSharding:
    """Return the sharding of the cases' arguments and results."""
    return NamedSharding(Mesh(np.array([device]).reshape(1, 1, 1), AXES), PartitionSpec())


def numeric_programs(
    cases: Sequence[NumericCase], place: jax.sharding.Sharding, options: Mapping[str, bool | str]
) -> list[Program]:
    """Return the programs of the cases. place: of all arguments and results"""

    def struct(x: np.ndarray) -> jax.ShapeDtypeStruct:
        """Return the shape [...], dtype and place of an input."""
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)

    def program(case: NumericCase) -> Program:
        args = jax.tree.map(struct, case.inputs)
        return Program(case.name, case.function, args, (), place, options=options, identity=case.identity)

    return [program(case) for case in cases]


def _difference(case: NumericCase, results: tuple[jax.Array, ...]) -> str:
    """Describe the first wrong value; empty: all are right."""
    for result, right in zip(results, case.expected, strict=True):
        got, wanted = np.asarray(result, np.float64), np.asarray(right, np.float64)
        near = np.abs(got - wanted) <= case.tolerance * (1 + np.abs(wanted))  # false for NaN
        if not near.all():
            first = tuple(int(index) for index in np.argwhere(~near)[0])
            return f"{(~near).sum()} of {near.size} differ, {got[first]:.9g} is {wanted[first]:.9g}"
    return ""
