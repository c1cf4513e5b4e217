"""Decides everything before a runner allocates: buckets, layer caches, products, step functions, memory plan.

RunnerSetup makes the program set that follows from them. It allocates nothing; `plan` may compile programs to measure
their memory. ExactProgramSet is for models in float32: by default XLA rounds the factors of a product, to TF32 on GPUs
and to bfloat16 on TPUs.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from jaxserve.errors import ConfigError
from jaxserve.models.adapters import adapt
from jaxserve.models.checkpoint.loader import LoadedModel
from jaxserve.models.draft_head import taps_of
from jaxserve.models.weights import ParamSpec
from jaxserve.ops import native
from jaxserve.ops.linear import FewBits, Products, Rounding, TpuExperts, TritonExperts
from jaxserve.ops.linear.rounded import Device, rounds_form
from jaxserve.ops.paged_attention import Backend
from jaxserve.ops.quantized import BLOCK
from jaxserve.ops.state import get_state_backend
from jaxserve.runtime import kv_cache, memory
from jaxserve.runtime.adapters import AdapterArrays
from jaxserve.runtime.compilation.attention_sizes import compute_capability, serving_backend
from jaxserve.runtime.compilation.buckets import Buckets, make_buckets
from jaxserve.runtime.compilation.compiler import Program, compile_all, compiler_options
from jaxserve.runtime.draft_model import (
    DraftHeadModel,
    DraftModel,
    Guesser,
    check_draft_model,
    head_levels,
    kept_positions,
)
from jaxserve.runtime.fingerprint import describe
from jaxserve.runtime.kv_cache import AnyCache, LayerCache
from jaxserve.runtime.memory import MemoryPlan
from jaxserve.runtime.mesh import DeviceMesh, expert_kernels
from jaxserve.runtime.program_set import ProgramSet, Shapes
from jaxserve.runtime.programs import StepPrograms
from jaxserve.runtime.runner_config import RunnerConfig
from jaxserve.runtime.sampling import slots
from jaxserve.runtime.sampling.vocab import Vocab
from jaxserve.runtime.towers import TowerPrograms, tower_limits
from jaxserve.types.scheduling import STATE_COLUMNS, Reach, Span

logger = logging.getLogger(__name__)

Function = Callable[..., Any]
Model = TypeVar("Model")


def is_rounded(platform: str, activations: jnp.dtype) -> bool:
    """Return whether XLA would round the activations of a product."""
    return platform != "cpu" and activations == jnp.float32


def exact(function: Function) -> Function:
    """Return the function, whose products without a `precision` are exact when it is traced."""

    @functools.wraps(function)
    def traced(*args: Any) -> Any:
        with jax.default_matmul_precision("highest"):
            return function(*args)

    return traced


@dataclass(frozen=True)
class ExactProgramSet(ProgramSet):
    """The programs of a model in float32 on an accelerator."""

    def _program(self, name: str, function: Function, *rest: Any, **named: Any) -> Program:
        return super()._program(name, exact(function), *rest, **named)


_FIX = "leave runtime.activations out"
_FP8_SINCE, _HOPPER = (8, 9), (9, 0)  # compute capability
_PROBED = 3  # on a TPU a cache of this part of the memory is tried; a copy of it may be as large
_BOUND = ("bind", "mesh", "layers", "guesses")  # fields of StepPrograms whose text differs between processes


@dataclass(frozen=True)
class RunnerSetup:
    """The fixed parts of a runner, made by `of`.

    layers   geometry of each layer's KV cache or recurrent states, the layers of a draft model or head last
    groups   reach of each layer group from 1 on
    steps    the step functions, not jitted
    draft    a draft model or head; None: there is none
    tower    the programs of the model's tower; None: it takes no pictures
    adapters arrays for the adapters of the section `lora`; None: there is no room for any
    """

    loaded: LoadedModel
    config: RunnerConfig
    mesh: DeviceMesh
    backend: Backend
    buckets: Buckets
    layers: tuple[AnyCache, ...]
    groups: tuple[Reach, ...]
    steps: StepPrograms
    draft: LoadedModel | None = None
    tower: TowerPrograms | None = None
    adapters: AdapterArrays | None = None

    @classmethod
    def of(
        cls, loaded: LoadedModel, config: RunnerConfig, mesh: DeviceMesh, draft: LoadedModel | None = None
    ) -> RunnerSetup:
        """Choose backend, buckets and layer groups. draft: a draft model or head; each of its layers keeps all pages

        Raises ConfigError if the attention backend cannot run here, if a kernel does not reach all of a weight, or if
        the draft model does not fit the served one.
        """
        attention = loaded.config.attention_layers
        dtype = loaded.structure.activation_dtype
        of_draft = () if draft is None else draft.config.attention_layers
        backend = serving_backend(config.attention, mesh.devices[0], (*attention, *of_draft), dtype, mesh.tensor)
        groups = kv_cache.layer_groups(attention, config.max_model_len)
        kept = kv_cache.layer_caches(attention, backend, config.page_size, config.cache_dtype, mesh, groups=groups)
        layers = kv_cache.with_states(kept, loaded.config.layer_states, dtype, mesh, config.max_drafts)
        draft_layers = kv_cache.layer_caches(of_draft, backend, config.page_size, config.cache_dtype, mesh)
        buckets = make_buckets(
            config.max_num_seqs,
            config.max_num_batched_tokens,
            platform=mesh.platform,
            num_parameters=loaded.structure.num_parameters,
            deterministic=config.deterministic,
            max_drafts=config.max_drafts,
            draft_model=draft is not None,
        )
        if config.deterministic:
            buckets = dataclasses.replace(buckets, extend=_with_two_rows(buckets.extend))
        linear = chosen_products(config, loaded, mesh, backend)
        check_reach(loaded, linear)
        guesses = adapters = None
        bind = loaded.bind
        if config.lora is not None:
            adapters = AdapterArrays(adapt(loaded.structure, config.lora), config.max_num_seqs, mesh)
            bind = adapters.adapted.bind
        if draft is not None:
            own, others = len(loaded.leaves), len(draft.leaves)  # the arrays of adapters come behind both
            bind = functools.partial(_bind_some, bind, (slice(own), slice(own + others, None)))
            check_draft_model(draft.config, loaded.config)
            linear_of_draft = chosen_products(config, draft, mesh, backend)
            check_reach(draft, linear_of_draft)
            guesses = _make_guesses(draft, own, len(layers), config.max_drafts, linear_of_draft, of_model=linear)
        layers = (*layers, *draft_layers)
        steps = StepPrograms(
            bind=bind,
            backend=backend,
            layers=layers,
            page_size=config.page_size,
            linear=linear,
            mesh=mesh.mesh,
            normalize_embeddings=config.normalize_embeddings,
            per_token=config.deterministic,
            guesses=guesses,
            max_drafts=config.max_drafts,
            states=get_state_backend(mesh.platform) if loaded.config.layer_states else None,
            lora=config.lora,
        )
        tower = None
        if loaded.config.vision is not None:
            budget = config.max_num_batched_tokens
            limits = tower_limits(loaded.config.vision, mesh.platform, budget, deterministic=config.deterministic)
            tower = TowerPrograms(loaded.structure, limits)
        return cls(loaded, config, mesh, backend, buckets, layers, groups, steps, draft, tower, adapters)

    @property
    def leaves(self) -> tuple[jax.Array | jax.ShapeDtypeStruct, ...]:
        """Return the weights, one array [shape] per parameter: the model's, a draft model's, the adapters' arrays."""
        draft = () if self.draft is None else self.draft.leaves
        adapters = () if self.adapters is None else self.adapters.structs
        return (*self.loaded.leaves, *draft, *adapters)

    def plan(self, device_bytes: int | None = None) -> MemoryPlan:
        """Plan the memory. Raises ConfigError if the model does not fit.

        device_bytes: memory of all devices; None: the devices are asked
        """
        config, num_devices = self.config, len(self.mesh.devices)
        vocab_size = self.loaded.config.vocab_size
        parts = Vocab.of(vocab_size, self.mesh.mesh).parts
        width = self._table_width(config.max_model_len)
        state = slots.state_bytes(config.max_num_seqs, vocab_size, width, parts=parts, hidden=self._kept_hidden())
        hidden = (
            self.buckets.max_tokens * self.loaded.config.hidden_size * self.loaded.structure.activation_dtype.itemsize
        )
        if self.tower is not None:
            hidden += self.tower.num_bytes
        weight_bytes = sum(map(_bytes, self.leaves))
        fills = config.num_pages is None or (self.steps.states is not None and config.num_state_pages is None)
        probe = fills and self.mesh.platform != "cpu" and device_bytes is None
        device_bytes = memory.device_memory(self.mesh.devices) if device_bytes is None else device_bytes
        scratch, of_page = self._probe_scratch(device_bytes - weight_bytes) if probe else (self._estimate_scratch(), 0)
        sizes = memory.Sizes(
            weight_bytes=weight_bytes,
            state_bytes=(state + hidden) * num_devices,
            scratch_bytes=scratch * num_devices,
            page_bytes=kv_cache.page_bytes(self.layers),
            page_size=config.page_size,
            max_num_seqs=config.max_num_seqs,
            groups=tuple(
                (self._span(reach), kv_cache.page_bytes(self.layers, group))
                for group, reach in enumerate(self.groups, start=1)
            ),
            state_page_bytes=kv_cache.page_bytes(self.layers, self.steps.num_groups) if self.steps.states else 0,
            reached=tuple(map(self._reached, range(self.steps.num_groups))),
            scratch_page_bytes=of_page * num_devices,
        )
        plan = memory.plan_memory(sizes, config, platform=self.mesh.platform, device_bytes=device_bytes)
        if config.host_memory is None:
            return plan
        pages = list(map(self._host_page, range(self.steps.num_groups)))
        return memory.plan_host_pages(plan, pages, config.host_memory)

    def _reached(self, group: int) -> int:
        """Return the bytes of a page in a layer of a group on a device; 0 if the backend reads any number of pages."""
        if self.backend.name != "triton" or self.config.cache_dtype.itemsize > 1:
            return 0
        own = (layer for layer in self.layers if isinstance(layer, LayerCache) and layer.group == group)
        return max((math.prod(layer.sharding.shard_shape((1, *layer.page_shape))) for layer in own), default=0)

    def _host_page(self, group: int) -> int:
        """Return the bytes of one page of all layers of a group in the memory of the host."""
        ones = (1,) * self.steps.num_pools
        pages = self.program_set(ones, self.config.max_model_len).exported_pages(1, group)
        return sum(math.prod(page.shape) * page.dtype.itemsize for page in jax.tree.leaves(pages))

    def program_set(self, num_pages: Sequence[int], max_model_len: int) -> ProgramSet:
        """Make the programs for a KV cache of `num_pages` per layer group."""
        model = self.loaded.config
        width, pool = self._table_width(max_model_len), None
        state = slots.state_shapes(
            self.config.max_num_seqs,
            model.vocab_size,
            width,
            pictures=self.tower is not None,
            hidden=self._kept_hidden(),
        )
        if self.tower is not None:
            pool = jax.ShapeDtypeStruct(self.tower.pool_shape, self.tower.dtype, sharding=self.mesh.replicated)
        hidden = jax.ShapeDtypeStruct(
            (self.buckets.max_tokens, model.hidden_size),
            self.loaded.structure.activation_dtype,
            sharding=self.mesh.replicated,
        )
        shapes = Shapes.of(
            self.leaves, self.layers, self.mesh, num_pages=num_pages, state=state, hidden=hidden, pool=pool
        )
        options = compiler_options(
            self.mesh.platform, deterministic=self.config.deterministic, several=jax.process_count() > 1
        )
        rounded = is_rounded(self.mesh.platform, self.loaded.structure.activation_dtype)
        return (ExactProgramSet if rounded else ProgramSet)(
            self.steps,
            shapes,
            self.buckets,
            options,
            self.config.max_drafts,
            self._identity(max_model_len),
            self.tower,
            self.adapters,
        )

    def _identity(self, max_model_len: int) -> str:
        """Return a text that names everything that the step functions depend on; see Program.identity."""
        steps = {f.name: getattr(self.steps, f.name) for f in dataclasses.fields(self.steps) if f.name not in _BOUND}
        weights = [(spec.name, spec.shape, jnp.dtype(spec.dtype).name) for spec in self.loaded.structure.specs]
        layers = [dataclasses.replace(layer, sharding=self.mesh.replicated) for layer in self.layers]
        parts = (self.loaded.config, weights, steps, layers, self.buckets, max_model_len, self.config.max_drafts)
        if self.draft is not None and self.steps.guesses is not None:
            of_draft = [(spec.name, spec.shape, jnp.dtype(spec.dtype).name) for spec in self.draft.structure.specs]
            parts = (*parts, self.draft.config, of_draft, self.steps.guesses.linear)
        return hashlib.sha256(describe(parts).encode()).hexdigest()

    def _span(self, reach: Reach) -> Span:
        config = self.config
        return Span(reach, config.page_size, config.max_num_batched_tokens, 1 + config.max_drafts)

    def _kept_hidden(self) -> jax.ShapeDtypeStruct | None:
        """Return the hidden states that each slot keeps for a head; None: there is no head."""
        if self.draft is None or self.draft.config.head is None:
            return None
        shape = kept_positions(self.draft.config, self.config.max_drafts), self.draft.config.hidden_size
        return jax.ShapeDtypeStruct(shape, self.loaded.structure.activation_dtype)

    def _table_width(self, max_model_len: int) -> int:
        """Return the columns of a slot's row of page tables, all groups together."""
        of_states = STATE_COLUMNS if self.loaded.config.layer_states else 0
        return self.steps.num_groups * -(-max_model_len // self.config.page_size) + of_states

    def _probe_scratch(self, room: int) -> tuple[int, int]:
        """Return the temporary bytes of the largest programs, and the additional bytes for each page.

        They are compiled for a small KV cache. On a TPU they are compiled for two sizes, because XLA may copy parts of
        the cache, such as the scales of 8-bit pages, and refuses a program that does not fit. If a layer's pages are
        below 64 MB, XLA keeps them in the fast memory, where copies do not show.
        room: bytes of all devices that the weights leave
        """
        pages, length = -(-self.config.max_model_len // self.config.page_size), self.config.max_model_len
        most = pages
        if self.mesh.platform == "tpu":
            whole = sum(kv_cache.page_bytes(self.layers, group) for group in range(self.steps.num_groups))
            most = max(2, room // (_PROBED * whole))
            pages = most // 2
        of_states = (2,) if self.steps.states else ()
        wanted = [
            dataclasses.replace(program, name=f"{program.name} of {count} pages")
            for count in sorted({pages, most})
            for program in self.program_set((count,) * self.steps.num_groups + of_states, length).largest()
        ]
        found = {name: memory.scratch_bytes(program) for name, program in compile_all(wanted).items()}
        fixed = each = 0
        for name in (name for name in found if name.endswith(f" of {pages} pages")):
            more = found[name.replace(f" of {pages} ", f" of {most} ")] - found[name]
            of_page = max(0, more) // max(1, most - pages)
            fixed, each = max(fixed, found[name] - of_page * pages), max(each, of_page)
        return fixed, each

    def _estimate_scratch(self) -> int:
        """Return an upper estimate in bytes: ten float32 copies of a layer's widest activations, or of the logits."""
        model, rows = self.loaded.config, max(self.config.max_num_seqs, *self.buckets.verify, 1)
        models = (model,) if self.draft is None else (model, self.draft.config)
        widest = max(2 * m.intermediate_size + 4 * m.hidden_size + 4 * m.num_heads * m.head_dim for m in models)
        return 10 * 4 * max(self.buckets.max_tokens * widest, rows * model.vocab_size)


def _make_guesses(
    draft: LoadedModel, first_leaf: int, first_layer: int, count: int, linear: Products, *, of_model: Products
) -> Guesser:
    """Make the device side of a draft model or head. The arguments: see `Guesser` and `DraftHeadModel`"""
    own = (slice(len(draft.leaves)),)  # the arrays of adapters come behind them
    if draft.config.head is None:
        bind = functools.partial(_bind_some, draft.bind, own)
        return DraftModel(first_leaf=first_leaf, first_layer=first_layer, linear=linear, count=count, bind=bind)
    return DraftHeadModel(
        first_leaf=first_leaf,
        first_layer=first_layer,
        linear=linear,
        count=count,
        taps=taps_of(draft.config),
        bind=functools.partial(_bind_some, draft.structure.bind_head, own),
        of_model=of_model,
        levels=head_levels(draft.config),
    )


def _bind_some(
    bind: Callable[[tuple[jax.Array, ...]], Model], places: tuple[slice, ...], leaves: tuple[jax.Array, ...]
) -> Model:
    """Make a model from the leaves [shape] at its places, in their order."""
    return bind(tuple(leaf for place in places for leaf in leaves[place]))


def _with_two_rows(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return these sizes of steps with 2 in place of 1, where XLA sums a router's products in another order."""
    return tuple(sorted({max(2, size) for size in sizes}))


def _bytes(leaf: jax.Array | jax.ShapeDtypeStruct) -> int:
    """Return the bytes of an array over all devices."""
    sharding = leaf.sharding
    if sharding is None:
        return math.prod(leaf.shape) * leaf.dtype.itemsize
    return math.prod(sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize * len(sharding.device_set)


def chosen_products(config: RunnerConfig, loaded: LoadedModel, mesh: DeviceMesh, backend: Backend) -> Products:
    """Return the products of the step programs. Raises ConfigError if a configured kernel cannot run here."""
    rounding = chosen_rounding(config, loaded, mesh, backend)
    if rounding == "cpu":
        logger.info("runtime.activations %s: activations are rounded", config.activations)
    elif rounding is not None:
        logger.info("runtime.activations %s: activations are rounded to 8 bits", config.activations)
    elif _made_for_8_bits(loaded):
        logger.info("%s was made for activations of 8 bits, which are not rounded here", loaded.directory)
    products = Products(
        config.deterministic,
        native_products(backend, mesh),
        few_bits_platform(backend),
        rounding,
        expert_kernels(config.experts, mesh),
        len(mesh.devices) > 1,
    )
    if loaded.config.moe is not None:
        found = _experts_in_words(products, loaded.structure.activation_dtype, gated=loaded.config.gated_mlp)
        logger.info("runtime.experts %s on %s: %s", config.experts, mesh.platform, found)
    return products


def check_reach(loaded: LoadedModel, products: Products) -> None:
    """Raise ConfigError for a weight that a Triton kernel would read only in part, see `memory.addressable`."""
    few_bits = products.few_bits == "gpu" and not products.deterministic
    for spec, leaf in zip(loaded.structure.specs, loaded.leaves, strict=True):
        read = products.experts == "triton" if "expert" in spec.axes else few_bits
        size = math.prod(leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape))
        if read and leaf.dtype.itemsize == 1:
            memory.check_weight(spec.name, size)


def _experts_in_words(products: Products, dtype: jnp.dtype, *, gated: bool) -> str:
    """Describe the kernel that multiplies rows of `dtype` by weights of experts."""
    match products.of_experts(dtype, gated=gated):
        case None:
            return "xla"
        case TritonExperts():
            return "triton"
        case TpuExperts(one_size=True):
            return "tpu"
        case TpuExperts():
            return "tpu, but xla for few rows of bfloat16 weights that it keeps with the experts last"
        case _:
            return "C kernels"


def native_products(backend: Backend, mesh: DeviceMesh) -> bool:
    """Return whether linear layers are the C kernels, which run on one device only."""
    return backend.name == "native" and len(mesh.devices) == 1


def few_bits_platform(backend: Backend) -> FewBits | None:
    """Return the platform whose kernel multiplies quantized weights; None: XLA dequantizes them."""
    if backend.name in ("triton", "mosaic_gpu"):
        return "gpu"
    return "tpu" if backend.name == "tpu" else None


def chosen_rounding(
    config: RunnerConfig, loaded: LoadedModel, mesh: DeviceMesh, backend: Backend | None
) -> Rounding | None:
    """Return the device for which activations are rounded; None: they are not. backend: None for an encoder

    Raises ConfigError if the configuration asks for it and this machine or these weights do not support it.
    """
    on_cpu = mesh.platform == "cpu"
    if config.activations == "rounded":
        return _asked_on_cpu(loaded, mesh, backend) if on_cpu else _asked(config, loaded, mesh, backend)
    if (
        config.activations == "exact"
        or on_cpu
        or backend is None
        or config.deterministic
        or not _made_for_8_bits(loaded)
    ):
        return None
    device = _device(mesh)
    return device if device and _any_rounded(loaded, device) else None


def _made_for_8_bits(loaded: LoadedModel) -> bool:
    """Return whether the checkpoint was made for 8-bit activations."""
    form = loaded.config.stored_form
    return form is not None and form.rounds_activations and loaded.config.quantization == "stored"


def _asked_on_cpu(loaded: LoadedModel, mesh: DeviceMesh, backend: Backend | None) -> Rounding:
    if backend is None or not native_products(backend, mesh):
        raise ConfigError(
            "runtime.activations 'rounded' on a CPU is for decoders on one, with native attention", fix=_FIX
        )
    specs = filter(_rounded_on_cpu, loaded.structure.specs)
    forms = {jnp.dtype(spec.dtype) for spec in specs} & set(map(jnp.dtype, native.ROUNDED_FORMS))
    if not forms:
        raise ConfigError(
            "runtime.activations 'rounded' has no effect on weights in float32, FP8, MXFP4 or NVFP4, or with a scale "
            "for 16 numbers, or of routed experts on a CPU",
            fix=f"set model.dtype: bfloat16 or model.quantization: int8 or int4, or {_FIX}",
        )
    if not any(map(native.can_round, forms)):
        narrow = forms - {jnp.dtype(jnp.bfloat16)}
        needs = "AVX2 or NEON's dot products, for weights in int8 and int4"
        if not narrow:
            needs = "AVX512_BF16 and AVX512_VNNI, for weights in bfloat16"
        fix = _FIX if narrow else f"set model.quantization: int8 or int4, which need less, or {_FIX}"
        raise ConfigError(f"runtime.activations 'rounded' needs a processor with {needs}", fix=fix)
    return "cpu"


def _rounded_on_cpu(spec: ParamSpec) -> bool:
    """Return whether the activations of a weight's products may be rounded, if its dtype is one of ROUNDED_FORMS."""
    packing = spec.packing
    if "expert" in spec.axes:
        return False
    return packing is None or (packing.group % BLOCK == 0 and packing.kind not in ("mxfp4", "nvfp4"))


def _asked(config: RunnerConfig, loaded: LoadedModel, mesh: DeviceMesh, backend: Backend | None) -> Rounding:
    if backend is None:
        raise ConfigError("runtime.activations 'rounded' is for decoders", fix=_FIX)
    if config.deterministic:
        raise ConfigError(
            "runtime.activations 'rounded' and runtime.deterministic work together on a CPU only", fix=_FIX
        )
    device = _device(mesh)
    if device is None:
        raise ConfigError("runtime.activations 'rounded' needs a GPU of compute capability 8.9 or more", fix=_FIX)
    if not _any_rounded(loaded, device):
        forms = "int8" if device == "tpu" else "int8 or FP8"
        groups = ", or one for each multiple of 128 numbers" if device == "hopper" else ""
        raise ConfigError(
            f"runtime.activations 'rounded' has an effect here only on linear layers in {forms} without zeros, with "
            f"one scale for a row{groups}, but not on routed experts",
            fix=_FIX,
        )
    return device


def _any_rounded(loaded: LoadedModel, device: Device) -> bool:
    """Return whether the activations of some weight's products are rounded on a device."""

    def rounds(spec: ParamSpec) -> bool:
        packing = spec.packing
        if packing is None or packing.role != "values" or "expert" in spec.axes or packing.kind == "mxfp8":
            return False
        return rounds_form(spec.dtype, packing.group, packing.wide[-1], device, zeros=packing.zeros)

    return any(map(rounds, loaded.structure.specs))


def _device(mesh: DeviceMesh) -> Device | None:
    """Return the name of a mesh's devices in `ops.linear.rounded`; None: it does not serve them."""
    if mesh.platform == "tpu":
        return "tpu"
    capability = compute_capability(mesh.devices[0])
    if mesh.platform != "gpu" or capability < _FP8_SINCE:
        return None
    return "hopper" if capability == _HOPPER and _has_mosaic() else "gpu"


def _has_mosaic() -> bool:
    """Return whether this jax has Mosaic GPU, in which the kernel for groups is written."""
    try:
        importlib.import_module("jaxserve.ops.linear.rounded_groups")
    except ImportError as error:
        logger.warning("groups of 8-bit weights stay exact, because this jax cannot load their kernel: %s", error)
        return False
    return True
