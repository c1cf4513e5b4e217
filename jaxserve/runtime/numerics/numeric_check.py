"""The check that this machine computes right numbers, made at every start and by `jaxserve doctor`.

A compiler that gives wrong numbers without an error is real: jaxlib 0.10.2 on CPUs does so (jax-ml/jax#39103). The
programs of numeric_cases.py are compiled with the options of the programs that serve, and compared with numpy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.errors import ConfigError
from jaxserve.ops.linear import Products, Rounding
from jaxserve.ops.paged_attention import Backend
from jaxserve.runtime.compilation.compiler import Program, ProgramStorage, compile_all, compiler_options
from jaxserve.runtime.mesh import AXES, DeviceMesh, expert_kernels
from jaxserve.runtime.numerics.numeric_cases import (
    NumericCase,
    attention,
    experts,
    experts_of_few_bits,
    products,
    rounded_products,
    rounded_rows,
    sampler,
    sums,
)
from jaxserve.runtime.runner_setup import native_products

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

    store: of the compiled cases. They run at every start all the same.
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
    """Compile and run the cases on a device and describe each that differs from what is expected."""
    place = check_place(device)
    compiled = compile_all(numeric_programs(cases, place, options), workers=workers, store=store)
    return [
        f"{case.name}: {problem}"
        for case in cases
        if (problem := _difference(case, compiled[case.name](*jax.device_put(case.inputs, place))))
    ]


def check_place(device: Any) -> NamedSharding:
    """Return where the arguments and results of the cases are."""
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
    """Describe the first number that is wrong; empty: none is."""
    for result, right in zip(results, case.expected, strict=True):
        got, wanted = np.asarray(result, np.float64), np.asarray(right, np.float64)
        near = np.abs(got - wanted) <= case.tolerance * (1 + np.abs(wanted))  # false for NaN
        if not near.all():
            first = tuple(int(index) for index in np.argwhere(~near)[0])
            return f"{(~near).sum()} of {near.size} differ, {got[first]:.9g} is {wanted[first]:.9g}"
    return ""
