"""Computes the bytes of weights and KV pages that a model needs on a mesh, from shapes and without any device.

Nothing is allocated, so a model of 671 billion parameters can be planned on a laptop. It uses the server's own code:
parameter shardings of models.sharding, page shapes of the attention backend, the arithmetic of runtime.memory.

    ShapePlan, ShapePlanner     the sizes of a model on one mesh
    DeviceSize, SplitSearch     the best of the meshes of some devices: for `jaxserve plan`, and for mesh.tensor auto
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import jax.numpy as jnp
from jax.sharding import AbstractMesh

from jaxserve.errors import ConfigError
from jaxserve.models.adapters import AdapterShape, adapt
from jaxserve.models.checkpoint.structure import ModelStructure, build
from jaxserve.models.config import ModelConfig
from jaxserve.models.sharding import for_mesh, param_sharding
from jaxserve.ops.paged_attention import get_backend
from jaxserve.ops.paged_attention.scaled_pages import is_scaled
from jaxserve.ops.state import StateSpec, ring_length, state_shapes
from jaxserve.runtime.kv_cache import layer_reach
from jaxserve.runtime.memory import Sizes, addressable, check_weight, plan_states, split_pool
from jaxserve.runtime.mesh import AXES
from jaxserve.types.scheduling import Reach, Span

PAGE_SIZE = 16  # tokens
_CHUNK = 8192  # tokens per step on an accelerator
_DOUBLINGS = 11  # numbers of devices that `SplitSearch.fewest` tries: 1, 2, 4, ... 1024

Mesh = tuple[int, int]  # tensor, expert


@dataclass(frozen=True)
class ShapePlan:
    """The sizes of a model on a mesh. Bytes are per device."""

    tensor: int
    expert: int
    num_parameters: int  # of the published model, without copies of kv heads
    weight_bytes: int
    whole_bytes: int  # part of weight_bytes: replicated parameters
    largest_whole: tuple[str, int]  # name and bytes of the largest replicated parameter
    # by what a token sees, None is all: bytes of one token in these layers, and the largest of an 8-bit page in one of
    # them, 0 for pages of 16 or 32 bits
    token_bytes: Mapping[Reach | None, tuple[int, int]]
    state_bytes: int = 0  # of a request's recurrent state in all layers that have one

    @property
    def num_devices(self) -> int:
        return self.tensor * self.expert

    @property
    def kv_token_bytes(self) -> int:
        """Bytes of one token in all layers."""
        return sum(size for size, _ in self.token_bytes.values())

    @property
    def reaches(self) -> list[Reach]:
        """The reaches of the layers in which a token does not see all tokens, the farthest first."""
        return sorted((reach for reach in self.token_bytes if reach), key=lambda reach: -reach.tokens)

    def request_bytes(self, length: int) -> int:
        """Return the bytes of K and V, and of states, of a decoding request of `length` tokens.

        Each layer keeps what a token sees.
        """
        sizes = (self.token_bytes[reach][0] * count for reach, count in self._request_pages(length).items())
        return sum(sizes) * PAGE_SIZE + self.state_bytes

    def _request_pages(self, length: int) -> dict[Reach | None, int]:
        """Return the pages of a decoding request in a layer of each reach."""
        pages = -(-length // PAGE_SIZE)
        return {
            reach: pages if reach is None else Span(reach, PAGE_SIZE, _CHUNK).most(length) for reach in self.token_bytes
        }

    def largest_batch(self, device_bytes: int, length: int, memory_fraction: float = 0.9) -> int:
        """Return the number of requests of `length` tokens that fit at once, beside the weights."""
        batch = self._left(device_bytes, memory_fraction) // self.request_bytes(length)
        each = self._request_pages(length).items()
        return min(addressable(batch * pages, self.token_bytes[reach][1]) // pages for reach, pages in each)

    def kv_tokens(self, device_bytes: int, memory_fraction: float = 0.9) -> int:
        """Return the number of tokens that fit beside the weights if every layer keeps all of them; 0 if none do."""
        pages = self._left(device_bytes, memory_fraction) // (self.kv_token_bytes * PAGE_SIZE)
        return addressable(pages, max(reached for _, reached in self.token_bytes.values())) * PAGE_SIZE

    def _left(self, device_bytes: int, memory_fraction: float) -> int:
        return max(0, int(device_bytes * memory_fraction) - self.weight_bytes)

    def room(
        self, device_bytes: int, context: int, max_num_seqs: int = 512, memory_fraction: float = 0.9
    ) -> tuple[int, float]:
        """Return (tokens, requests of full context) that fit next to the weights if each layer keeps what a token sees.

        It plans as the server does, for `max_num_seqs` requests and sequences of at most `context` tokens.
        """
        groups = [reach for reach in self.reaches if reach.tokens < context]
        whole = [sizes for reach, sizes in self.token_bytes.items() if reach not in groups]
        spans = [Span(reach, PAGE_SIZE, _CHUNK) for reach in groups]
        sizes = Sizes(
            weight_bytes=self.weight_bytes,
            state_bytes=0,
            scratch_bytes=0,
            page_bytes=sum(size for size, _ in whole) * PAGE_SIZE,
            page_size=PAGE_SIZE,
            max_num_seqs=max_num_seqs,
            state_page_bytes=self.state_bytes,
            groups=tuple((span, self.token_bytes[span.reach][0] * PAGE_SIZE) for span in spans),
        )
        left = self._left(device_bytes, memory_fraction)
        num_states = plan_states(left, sizes)
        left = max(0, left - num_states * self.state_bytes)
        pages, of_groups = split_pool(left, sizes, context)
        tokens = addressable(pages, max((reached for _, reached in whole), default=0)) * PAGE_SIZE
        if not tokens:
            return 0, 0.0
        fitting = [tokens / context]
        for count, span in zip(of_groups, spans, strict=True):
            fitting.append(addressable(count, self.token_bytes[span.reach][1]) / span.most(context))
        if num_states:
            fitting.append(num_states)
        return tokens, min(fitting)


def splits(config: ModelConfig, num_devices: int) -> list[tuple[int, int]]:
    """Return every (tensor, expert) of `num_devices`. The first is the one to start with.

    It splits over heads alone, and for a mixture of experts over a divisor of the kv heads: copies of kv heads save
    nothing, and the remaining devices can split the experts.
    """
    first = num_devices
    if config.moe is not None and config.latent is None:
        first = math.gcd(num_devices, config.num_kv_heads)
    others = (tensor for tensor in range(num_devices, 0, -1) if num_devices % tensor == 0 and tensor != first)
    return [(tensor, num_devices // tensor) for tensor in (first, *others)]


class ShapePlanner:
    """Plans a model on meshes whose kernels are Triton's: see `memory.addressable`.

    cache_dtype: None is `dtype`. lora: room for adapters, which counts as weights; None: there is none. Raises
    ModelLoadError if the model cannot have this form on any mesh.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: jnp.dtype,
        *,
        cache_dtype: jnp.dtype | None = None,
        lora: AdapterShape | None = None,
    ) -> None:
        self.config = config
        self._lora = lora
        self.published = build(config, dtype)
        self._dtype = dtype
        self._cache_dtype = cache_dtype or dtype
        # A structure takes seconds for a mixture of experts, and most meshes have the published one.
        self._structures = {config: self.published}

    def plan(self, tensor: int, expert: int) -> ShapePlan:
        """Plan the model on tensor * expert devices.

        Raises ModelLoadError if it cannot be split so, and ConfigError if the kernels would read only a part of a
        weight.
        """
        mesh = AbstractMesh((1, tensor, expert), AXES)
        split = for_mesh(self.config, mesh)
        if split not in self._structures:
            self._structures[split] = build(split, self._dtype)
        weights, whole, largest = _weights(self._structures[split], mesh, self._lora)
        return ShapePlan(
            tensor=tensor,
            expert=expert,
            num_parameters=self.published.num_parameters,
            weight_bytes=weights,
            whole_bytes=whole,
            largest_whole=largest,
            token_bytes=_token_bytes(split, self._cache_dtype, tensor),
            state_bytes=_state_bytes(split, self._dtype, tensor),
        )


def _weights(
    structure: ModelStructure, mesh: AbstractMesh, lora: AdapterShape | None
) -> tuple[int, int, tuple[str, int]]:
    total, whole, largest = 0, 0, ("", 0)
    stacks = () if lora is None else adapt(structure, lora).stacks
    for spec in (*structure.specs, *stacks):
        sharding = param_sharding(spec, mesh)
        size = math.prod(sharding.shard_shape(spec.shape)) * spec.dtype.itemsize
        if spec.dtype.itemsize == 1:
            check_weight(spec.name, size)
        total += size
        if mesh.size > 1 and sharding.is_fully_replicated:
            whole += size
            largest = max(largest, (spec.name, size), key=lambda pair: pair[1])
    return total, whole, largest


def _state_bytes(config: ModelConfig, dtype: jnp.dtype, tensor: int) -> int:
    """Return `ShapePlan.state_bytes`."""
    total = 0
    for spec in config.layer_states:
        if spec is not None:
            state, ring = state_shapes(spec, 1, ring_length(spec, max_drafts=0))
            total += (4 * math.prod(state) if state else 0) + dtype.itemsize * math.prod(ring)
    return total // tensor


def _token_bytes(config: ModelConfig, dtype: jnp.dtype, tensor: int) -> dict[Reach | None, tuple[int, int]]:
    """Return `ShapePlan.token_bytes`."""
    backend = get_backend("triton", "gpu")  # by shape: all are alike
    found: dict[Reach | None, tuple[int, int]] = {}
    for layer in config.mixers:
        if isinstance(layer, StateSpec) or layer.reads is not None:
            continue
        heads = layer.num_kv_heads // tensor if layer.num_kv_heads % tensor == 0 else layer.num_kv_heads
        shape = backend.cache_shape(1, PAGE_SIZE, heads, layer.head_dim, latent=layer.latent)
        reached, size = 0, math.prod(shape) * dtype.itemsize
        if is_scaled(dtype):
            reached = size
            size += math.prod(backend.scale_shape(1, PAGE_SIZE, heads, latent=layer.latent)) * 4
        reach = layer_reach(layer)
        before, largest = found.get(reach, (0, 0))
        found[reach] = before + size, max(largest, reached)
    return {reach: (size // PAGE_SIZE, reached) for reach, (size, reached) in found.items()}


@dataclass(frozen=True)
class DeviceSize:
    """What a model is to fit: bytes of memory of each device, tokens of a full context, requests that run at once."""

    num_bytes: int
    context: int
    max_num_seqs: int
    memory_fraction: float = 0.9

    def room(self, plan: ShapePlan) -> tuple[int, float]:
        """Return (tokens, full contexts) that fit, see `ShapePlan.room`."""
        return plan.room(self.num_bytes, self.context, self.max_num_seqs, self.memory_fraction)

    def holds(self, plan: ShapePlan | ConfigError) -> bool:
        """Return whether a full context fits."""
        return isinstance(plan, ShapePlan) and self.room(plan)[1] >= 1


class SplitSearch:
    """Plans meshes, and finds the best mesh of a number of devices.

    show: called with each mesh before it is planned, which takes seconds for a mixture of experts
    tensor, expert: what each split of a number of devices has of them; None: any number
    """

    def __init__(
        self,
        planner: ShapePlanner,
        device: DeviceSize,
        show: Callable[[Mesh], None] = lambda _: None,
        *,
        tensor: int | None = None,
        expert: int | None = None,
    ) -> None:
        self._planner = planner
        self._device = device
        self._show = show
        self._tensor, self._expert = tensor, expert
        self._planned: dict[Mesh, ShapePlan | ConfigError] = {}

    def rows(self, asked: int | Mesh) -> Sequence[tuple[Mesh, ShapePlan | ConfigError]]:
        """Return the plan of a mesh, or of each split of a number of devices that the model allows, most tokens first.

        If the model allows no split, the only row has the reason. There is no row if no split has the numbers that
        each must have. A dense model is split only over tensor if it can be.
        """
        if isinstance(asked, tuple):
            return [self._row(asked)]
        meshes = [mesh for mesh in splits(self._planner.config, asked) if self._is_wanted(mesh)]
        rows = [self._row(mesh) for mesh in meshes[:1]]
        if self._planner.config.moe is not None or any(isinstance(plan, ConfigError) for _, plan in rows):
            rows += map(self._row, meshes[1:])
        return sorted(((mesh, plan) for mesh, plan in rows if isinstance(plan, ShapePlan)), key=self._rank) or rows[:1]

    def best(self, num_devices: int) -> ShapePlan | ConfigError:
        """Return the best plan of at most `num_devices` devices: of most tokens, then of the fewest bytes of weights.

        It is of all devices, unless no split of so many is allowed or one of fewer has more room: heads that cannot be
        split are whole on each device, and so is their KV cache. If the model allows no split, it is the reason.
        num_devices: at least the numbers that each split must have
        """
        rows = [row for count in range(num_devices, 0, -1) for row in self.rows(count)]
        plans = [(mesh, plan) for mesh, plan in rows if isinstance(plan, ShapePlan)]
        return min(plans, key=self._rank)[1] if plans else rows[0][1]

    def fewest(self) -> ShapePlan | None:
        """Return the best plan of the fewest devices that have room for a full context; None: none have.

        1, 2, 4, ... 1024 devices are tried, times the numbers that each split must have.
        """
        least = self._planner.published.num_bytes / self._device.num_bytes
        for count in ((self._tensor or 1) * (self._expert or 1) * 2**n for n in range(_DOUBLINGS)):
            if count >= least:
                _, plan = self.rows(count)[0]
                if isinstance(plan, ShapePlan) and self._device.holds(plan):
                    return plan
        return None

    def _is_wanted(self, mesh: Mesh) -> bool:
        return all(asked in (None, number) for asked, number in zip((self._tensor, self._expert), mesh, strict=True))

    def _row(self, mesh: Mesh) -> tuple[Mesh, ShapePlan | ConfigError]:
        if mesh not in self._planned:
            self._show(mesh)
            try:
                self._planned[mesh] = self._planner.plan(*mesh)
            except ConfigError as error:
                self._planned[mesh] = error
        return mesh, self._planned[mesh]

    def _rank(self, row: tuple[Mesh, ShapePlan]) -> tuple[int, int, int]:
        (tensor, _), plan = row
        return -self._device.room(plan)[0], plan.weight_bytes, -tensor
