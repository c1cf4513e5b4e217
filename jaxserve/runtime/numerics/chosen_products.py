"""Which products multiply activations by weights: by platform, `runtime.products` and what the checkpoint is for.

Activations are rounded only for weights of the forms that the products take; others stay exact.
"""

from __future__ import annotations

import importlib
import logging

import jax.numpy as jnp

from jaxserve.errors import ConfigError
from jaxserve.models.loading.structure import LoadedModel
from jaxserve.models.weights import ParamSpec
from jaxserve.ops import native
from jaxserve.ops.linear import FewBits, Products, Rounding
from jaxserve.ops.linear.rounded import FEW_ROWS, Device, rounds_form
from jaxserve.ops.moe.choices import kernels_of
from jaxserve.ops.paged_attention import Backend
from jaxserve.ops.quantized import BLOCK
from jaxserve.runtime.mesh import DeviceMesh
from jaxserve.runtime.runner_config import RunnerConfig

logger = logging.getLogger(__name__)
_FIX = "leave runtime.products out"
_FP8_SINCE, _HOPPER = (8, 9), (9, 0)  # compute capability


def chosen_products(config: RunnerConfig, loaded: LoadedModel, mesh: DeviceMesh, backend: Backend) -> Products:
    """Return the products of the step programs. Raises ConfigError if what is named cannot run here."""
    experts = kernels_of(config.experts, mesh.platform)
    if loaded.config.moe is not None:
        logger.info("runtime.experts %s on %s: %s", config.experts, mesh.platform, experts)
    rounding = chosen_rounding(config, loaded, mesh, backend)
    if rounding == "cpu":
        logger.info("runtime.products %s: activations are rounded", config.products)
    elif rounding is not None:
        logger.info(
            "runtime.products %s: activations of more than %d rows are rounded to 8 bits", config.products, FEW_ROWS
        )
    elif _made_for_8_bits(loaded):
        logger.info("%s was made for activations of 8 bits, which are not rounded here", loaded.directory)
    return Products(
        config.deterministic,
        native_products(backend, mesh),
        few_bits_platform(backend),
        rounding,
        experts,
        len(mesh.devices) > 1,
    )


def native_products(backend: Backend, mesh: DeviceMesh) -> bool:
    """Return whether linear layers are the C kernels, which run on one device only."""
    return backend.name == "native" and len(mesh.devices) == 1


def few_bits_platform(backend: Backend) -> FewBits | None:
    """Return the platform whose kernel multiplies quantised weights; None: XLA widens them."""
    if backend.name in ("triton", "mosaic_gpu"):
        return "gpu"
    return "tpu" if backend.name == "tpu" else None


def chosen_rounding(
    config: RunnerConfig, loaded: LoadedModel, mesh: DeviceMesh, backend: Backend | None
) -> Rounding | None:
    """Return for what device activations are rounded; None: they are not. backend: None for an encoder.

    Raises ConfigError if the configuration asks for it and this machine or these weights cannot have it.
    """
    on_cpu = mesh.platform == "cpu"
    if config.products == "rounded":
        return _asked_on_cpu(loaded, mesh, backend) if on_cpu else _asked(config, loaded, mesh, backend)
    if config.products == "exact" or on_cpu or backend is None or config.deterministic or not _made_for_8_bits(loaded):
        return None
    device = _device(mesh)
    return device if device and _any_rounded(loaded, device) else None


def _made_for_8_bits(loaded: LoadedModel) -> bool:
    """Return whether the weights are those of a checkpoint for activations of 8 bits."""
    form = loaded.config.stored_form
    return form is not None and form.rounds_activations and loaded.config.quantization == "stored"


def _asked_on_cpu(loaded: LoadedModel, mesh: DeviceMesh, backend: Backend | None) -> Rounding:
    if backend is None or not native_products(backend, mesh):
        raise ConfigError("runtime.products 'rounded' on a CPU is for decoders on one, with native attention", fix=_FIX)
    specs = filter(_rounded_on_cpu, loaded.structure.specs)
    forms = {jnp.dtype(spec.dtype) for spec in specs} & set(map(jnp.dtype, native.ROUNDED_FORMS))
    if not forms:
        raise ConfigError(
            "runtime.products 'rounded' has no effect on weights in float32, FP8 or MXFP4, or with a scale for 16 "
            "numbers, or of routed experts on a CPU",
            fix=f"set model.dtype: bfloat16 or model.quantization: int8 or int4, or {_FIX}",
        )
    if not any(map(native.can_round, forms)):
        narrow = forms - {jnp.dtype(jnp.bfloat16)}
        needs = "AVX2, for weights in int8 and int4"
        if not narrow:
            needs = "AVX512_BF16 and AVX512_VNNI, for weights in bfloat16"
        fix = _FIX if narrow else f"set model.quantization: int8 or int4, which need AVX2, or {_FIX}"
        raise ConfigError(f"runtime.products 'rounded' needs a processor with {needs}", fix=fix)
    return "cpu"


def _rounded_on_cpu(spec: ParamSpec) -> bool:
    """Return whether the activations that a weight meets may be rounded, if its dtype is one of ROUNDED_FORMS."""
    packing = spec.packing
    if "expert" in spec.axes:
        return False
    return packing is None or (packing.group % BLOCK == 0 and packing.kind != "mxfp4")


def _asked(config: RunnerConfig, loaded: LoadedModel, mesh: DeviceMesh, backend: Backend | None) -> Rounding:
    if backend is None:
        raise ConfigError("runtime.products 'rounded' is for decoders", fix=_FIX)
    if config.deterministic:
        raise ConfigError("runtime.products 'rounded' and runtime.deterministic work together on a CPU only", fix=_FIX)
    device = _device(mesh)
    if device is None:
        raise ConfigError("runtime.products 'rounded' needs a GPU of compute capability 8.9 or more", fix=_FIX)
    if not _any_rounded(loaded, device):
        groups = ", or one for each multiple of 128 numbers" if device == "hopper" else ""
        raise ConfigError(
            "runtime.products 'rounded' has an effect here only on linear layers in int8 or FP8 without zeros, with "
            f"one scale for a row{groups}, but not on routed experts",
            fix=_FIX,
        )
    return device


def _any_rounded(loaded: LoadedModel, device: Device) -> bool:
    """Return whether the activations that some weight meets are rounded on a device."""

    def rounds(spec: ParamSpec) -> bool:
        packing = spec.packing
        if packing is None or packing.role != "values" or "expert" in spec.axes:
            return False
        return rounds_form(spec.dtype, packing.group, packing.wide[-1], device, zeros=packing.zeros)

    return any(map(rounds, loaded.structure.specs))


def _device(mesh: DeviceMesh) -> Device | None:
    """Return what `ops.linear.rounded` calls the devices of a mesh; None: it is not for them."""
    if mesh.platform == "tpu":
        return "tpu"
    found = getattr(mesh.devices[0], "compute_capability", None)
    capability = tuple(map(int, found.split("."))) if isinstance(found, str) else (0, 0)
    if mesh.platform != "gpu" or capability < _FP8_SINCE:
        return None
    return "hopper" if capability == _HOPPER and _has_mosaic() else "gpu"


def _has_mosaic() -> bool:
    """Return whether this jax has what the kernel for groups is written in."""
    try:
        importlib.import_module("jaxserve.ops.linear.rounded_groups")
    except ImportError as error:
        logger.warning("groups of 8-bit weights stay exact, because this jax cannot load their kernel: %s", error)
        return False
    return True
