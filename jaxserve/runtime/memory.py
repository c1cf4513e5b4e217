"""The memory plan: bytes for weights, slot state and programs, and the number of KV pages that fit in the rest.

The plan is made before the pages are allocated, because their number is part of every program's shape. On an
accelerator `scratch_bytes` is the compiler's analysis of the largest program. On a CPU it is an upper estimate, which
is enough because the pages are capped far below the memory.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jaxserve.errors import ConfigError
from jaxserve.runtime.runner_config import RunnerConfig
from jaxserve.system import machine_memory
from jaxserve.types.scheduling import GroupSizes, Reach, Span

logger = logging.getLogger(__name__)

MIB = 2**20
CPU_POOL_FLOOR = 512 * MIB  # on a CPU the pages take this or as much as the weights, whichever is more
_ADDRESSABLE = 2**31  # array elements that a signed 32-bit offset reaches


@dataclass(frozen=True)
class GroupPlan:
    """The pages of one of the layer groups from 1 on, see `kv_cache`. Bytes are of one page in all its layers."""

    reach: Reach
    page_bytes: int
    num_pages: int
    host_page_bytes: int = 0
    num_host_pages: int = 0  # copies of evicted pages in the memory of the host

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | self.reach._asdict()


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes over all devices of the engine, and numbers of pages. Those outside of `groups` are of group 0."""

    device_bytes: int  # memory of the devices
    budget_bytes: int  # memory_fraction of it
    weight_bytes: int
    state_bytes: int  # slot state, and the hidden states between extend and head_sample
    scratch_bytes: int  # temporary memory of the largest program
    page_bytes: int  # of one page in all layers of group 0
    num_pages: int
    page_size: int  # tokens
    max_model_len: int
    num_host_pages: int = 0  # copies of evicted pages in the memory of the host
    host_page_bytes: int = 0
    groups: tuple[GroupPlan, ...] = ()  # the layer groups from 1 on
    num_state_pages: int = 0  # recurrent states, each of all layers that have one; 0: no layer has one
    state_page_bytes: int = 0  # of one of these

    @property
    def pages_by_group(self) -> tuple[int, ...]:
        """Number of pages of each layer group, recurrent states last."""
        states = (self.num_state_pages,) if self.num_state_pages else ()
        return self.num_pages, *(group.num_pages for group in self.groups), *states

    @property
    def host_pages_by_group(self) -> tuple[int, ...]:
        """Number of copies in the memory of the host of each layer group."""
        return self.num_host_pages, *(group.num_host_pages for group in self.groups)

    @property
    def group_sizes(self) -> tuple[GroupSizes, ...]:
        """The pools of the layer groups from 1 on."""
        return tuple(GroupSizes(group.reach, group.num_pages, group.num_host_pages) for group in self.groups)

    @property
    def kv_bytes(self) -> int:
        pools = [(group.num_pages, group.page_bytes) for group in self.groups]
        pools += [(self.num_pages, self.page_bytes), (self.num_state_pages, self.state_page_bytes)]
        return sum(count * size for count, size in pools)

    @property
    def kv_tokens(self) -> int:
        return self.num_pages * self.page_size

    @property
    def max_concurrency(self) -> float:
        """Return the number of requests of the full context length that fit at once."""
        fitting = [self.kv_tokens / self.max_model_len]
        for group in self.groups:
            span = Span(group.reach, self.page_size, prompt_tokens=1)
            fitting.append(group.num_pages / span.most(self.max_model_len))
        if self.num_state_pages:
            fitting.append(self.num_state_pages)
        return min(fitting)

    def as_dict(self) -> dict[str, Any]:
        derived = {name: getattr(self, name) for name in ("kv_bytes", "kv_tokens", "max_concurrency")}
        return dataclasses.asdict(self) | derived | {"groups": [group.as_dict() for group in self.groups]}

    def with_pages(self, num_pages: int, of_groups: Sequence[int]) -> MemoryPlan:
        """Return the plan with other numbers of pages, in group 0 and in `groups`."""
        pairs = zip(self.groups, of_groups, strict=True)
        groups = tuple(dataclasses.replace(group, num_pages=count) for group, count in pairs)
        return dataclasses.replace(self, num_pages=num_pages, groups=groups)


@dataclass(frozen=True)
class Sizes:
    """The inputs of the plan. Bytes are over all devices; the fields are MemoryPlan's.

    groups: the span of each layer group from 1 on, and the bytes of one page in all its layers.
    reached: bytes of one page in a layer of each group on a device, if `addressable` limits them, else 0; (): no limit
    """

    weight_bytes: int
    state_bytes: int
    scratch_bytes: int
    page_bytes: int
    page_size: int
    max_num_seqs: int
    groups: tuple[tuple[Span, int], ...] = ()
    reached: tuple[int, ...] = ()
    state_page_bytes: int = 0  # of a recurrent state in all layers that have one
    scratch_page_bytes: int = 0  # by which a page makes the temporary memory larger, if programs copy the cache

    def with_scratch(self) -> Sizes:
        """Return the sizes in which each page of the first group with bytes has its share of the temporary memory."""
        if self.page_bytes:
            return dataclasses.replace(self, page_bytes=self.page_bytes + self.scratch_page_bytes)
        (span, page_bytes), *others = self.groups
        return dataclasses.replace(self, groups=((span, page_bytes + self.scratch_page_bytes), *others))

    def pool_bytes(self, num_pages: int, of_groups: Sequence[int]) -> int:
        """Return the bytes of `num_pages` pages in group 0 and of `of_groups` in the others."""
        others = zip(of_groups, self.groups, strict=True)
        return num_pages * self.page_bytes + sum(count * page_bytes for count, (_, page_bytes) in others)

    def of_groups(self, first: int, longest: int) -> tuple[int, ...]:
        """Return the pages of each group from 1 on if the first one, which has the farthest reach, has `first`.

        The others have as many for each page that a request needs, but at least what a sequence of `longest` tokens
        needs.
        """
        farthest = self.groups[0][0].decoding if self.groups else 1
        others = [max(-(-first * span.decoding // farthest), span.least(longest)) for span, _ in self.groups[1:]]
        return tuple([first, *others][: len(self.groups)])


def plan_memory(sizes: Sizes, config: RunnerConfig, *, platform: str, device_bytes: int) -> MemoryPlan:
    """Plan the number of pages. Raises ConfigError that names the part that does not fit.

    If config.num_pages is None, the pages fill the budget, but are at most twice as many as all slots need at full
    length; the second half is for cached prefixes. The other layer groups are planned likewise, see `split_pool`.
    With config.shrink_context the context length may be cut to the longest that one request can have.
    """
    num_pages, max_model_len = config.num_pages, config.max_model_len
    asked = config.num_window_pages
    asked = sizes.of_groups(asked, max_model_len) if isinstance(asked, int) else asked
    budget = int(device_bytes * config.memory_fraction)
    free = budget - sizes.weight_bytes - sizes.state_bytes - sizes.scratch_bytes
    if num_pages is None:
        pool = min(free, max(CPU_POOL_FLOOR, sizes.weight_bytes)) if platform == "cpu" else free
        num_states = plan_states(max(pool, 0), sizes, config.num_state_pages)
        pool -= num_states * sizes.state_page_bytes
        num_pages, of_groups = split_pool(max(pool, 0), sizes.with_scratch(), max_model_len, asked)
    else:
        most = [min(num_pages, span.for_requests(sizes.max_num_seqs)) for span, _ in sizes.groups[:1]]
        of_groups = sizes.of_groups(*most, longest=max_model_len) if asked is None and most else asked or ()
        left = max(0, free - sizes.pool_bytes(num_pages, of_groups))
        # All that is left: `plan_states` gives states at most half of a cache.
        num_states = plan_states(2 * left if device_bytes else None, sizes, config.num_state_pages)
        _check_room(sizes, num_pages, of_groups, device_bytes, num_states * sizes.state_page_bytes)
    reached = sizes.reached or (0,) * (1 + len(sizes.groups))
    num_pages = _reachable("num_pages", num_pages, reached[0], config.num_pages)
    of_groups = tuple(
        _reachable("num_window_pages", count, size, None if asked is None else count)
        for count, size in zip(of_groups, reached[1:], strict=True)
    )
    longest = num_pages * sizes.page_size
    if longest < max_model_len and (not config.shrink_context or longest < sizes.page_size):
        states = num_states * sizes.state_page_bytes
        message = _too_small(sizes, num_pages, of_groups, max_model_len, budget, states)
        raise ConfigError(message, fix=_advice(longest, asked_states=config.num_state_pages is not None and states > 0))
    _check_groups(sizes, of_groups, min(longest, max_model_len))
    first = num_pages if sizes.page_bytes else of_groups[0]
    return MemoryPlan(
        device_bytes=device_bytes,
        budget_bytes=budget,
        weight_bytes=sizes.weight_bytes,
        state_bytes=sizes.state_bytes,
        scratch_bytes=sizes.scratch_bytes + sizes.scratch_page_bytes * first,
        page_bytes=sizes.page_bytes,
        num_pages=num_pages,
        page_size=sizes.page_size,
        max_model_len=min(max_model_len, longest),
        groups=tuple(
            GroupPlan(span.reach, page_bytes, count)
            for (span, page_bytes), count in zip(sizes.groups, of_groups, strict=True)
        ),
        num_state_pages=num_states,
        state_page_bytes=sizes.state_page_bytes,
    )


def plan_states(num_bytes: int | None, sizes: Sizes, asked: int | None = None) -> int:
    """Return the number of recurrent states; 0 if no layer has one.

    It is `asked`, if that is given. Else it is `enough_states`, but at most as many as half of `num_bytes`, the bytes
    of the cache, holds, and at least 2. num_bytes None: any number
    """
    if not sizes.state_page_bytes:
        return 0
    most = enough_states(sizes.max_num_seqs)
    if num_bytes is not None:
        most = min(most, num_bytes // 2 // sizes.state_page_bytes)
    return max(2, most) if asked is None else asked


def enough_states(max_num_seqs: int) -> int:
    """Return how many recurrent states `max_num_seqs` requests are served well with.

    That is one for each request that may run and one that is cached for each. At least three are cached: the state that
    a request begins with stays until its first step was read, while its prompt may give two.
    """
    return max_num_seqs + max(3, max_num_seqs)


def _check_groups(sizes: Sizes, of_groups: Sequence[int], longest: int) -> None:
    """Raise ConfigError if a group has fewer pages than one request of `longest` tokens may need."""
    for (span, _), count in zip(sizes.groups, of_groups, strict=True):
        if count < (least := span.least(longest)):
            farthest = sizes.groups[0][0]
            wanted = -(-least * farthest.decoding // span.decoding)
            raise ConfigError(
                f"the layers with a {span.reach.kind} of {span.reach.tokens} tokens have {count} pages, and one "
                f"request may need {least}",
                fix=f"set cache.num_window_pages to at least {wanted}, or raise cache.memory_fraction",
            )


def addressable(count: int, size: int) -> int:
    """Return how many of `count` pieces of `size` bytes a Triton kernel may read as one array of one-byte elements.

    Up to 4 GiB Pallas makes Triton's offsets of 32 bits, which have a sign, and above of 64 bits. Between 2 and 4 GiB
    the elements beyond 2 GiB would be read from before the array. An array of wider elements has at most 2**31 of them.
    """
    return _ADDRESSABLE // size if _ADDRESSABLE < count * size <= 2 * _ADDRESSABLE else count


def check_weight(name: str, size: int) -> None:
    """Raise ConfigError if a Triton kernel would read only a part of a weight of `size` one-byte values on a device.

    See `addressable`.
    """
    if addressable(size, 1) < size:
        raise ConfigError(
            f"{name} has {size / 2**30:.2f} GiB on a device, and the Triton kernels read at most 2 GiB of a "
            "weight in 8 or 4 bits, or more than 4",
            fix="raise mesh.tensor or mesh.expert, or set model.quantization: none",
        )


def _reachable(name: str, count: int, size: int, asked: int | None) -> int:
    """Return the pages of a group that the kernels reach. Raises ConfigError if the configuration asks for more."""
    most = addressable(count, size)
    if most == count:
        return count
    least, enough = _mib(_ADDRESSABLE), _mib(2 * _ADDRESSABLE)
    why = f"the Triton kernels read at most {least} of a layer's 8-bit pages, or more than {enough}"
    if asked is not None:
        raise ConfigError(f"cache.{name} is {count}, which is {_mib(count * size)}: {why}", fix=f"set it to {most}")
    logger.warning("cache.%s is %d instead of %d: %s", name, most, count, why)
    return most


def split_pool(
    num_bytes: int, sizes: Sizes, max_model_len: int, asked: Sequence[int] | None = None
) -> tuple[int, tuple[int, ...]]:
    """Return (pages of group 0, pages of each group from 1 on) that fit into `num_bytes`. asked: of these groups

    The first of these groups gets twice the pages that all requests can have at once; the second half is for cached
    prefixes. The others get their share, see `Sizes.of_groups`, and group 0 gets the rest.
    If that is too much, the first gets half as many pages as group 0, which suits a context of two windows, or a larger
    share if the longest request needs one. It gets up to a half less if group 0 then has room for one full context.
    If no layer sees all tokens, pages of group 0 take no memory. Their number is then set so that they never limit
    admission before the other groups' pages do.
    If one full context with its windows does not fit, all layers keep their whole context, and the context is shorter.
    """
    longest = -(-max_model_len // sizes.page_size)
    most = 2 * sizes.max_num_seqs * longest
    if not sizes.groups:
        return min(num_bytes // sizes.page_bytes, most) if sizes.page_bytes else most, ()
    spans = [span for span, _ in sizes.groups]
    of_groups = _affordable(num_bytes, sizes, max_model_len) if asked is None else tuple(asked)
    left = num_bytes - sizes.pool_bytes(0, of_groups)
    pages = 0
    if left >= 0 and sizes.page_bytes:
        pages = left // sizes.page_bytes
    elif left >= 0:
        each = zip(of_groups, spans, strict=True)
        pages = max(longest, *(count * longest // span.most(max_model_len) for count, span in each))
    kept = num_bytes // sizes.pool_bytes(1, [1] * len(spans))
    if asked is None and pages < min(kept, longest):
        return kept, (kept,) * len(spans)
    return min(pages, most), of_groups


def _affordable(num_bytes: int, sizes: Sizes, max_model_len: int) -> tuple[int, ...]:
    """Return the pages of each group from 1 on if the configuration does not set them, see `split_pool`."""
    longest = -(-max_model_len // sizes.page_size)
    span = sizes.groups[0][0]
    share = max(0.5, span.most(max_model_len) / longest) if sizes.page_bytes else 1.0
    page_bytes = sum(size * each.decoding / span.decoding for each, size in sizes.groups)  # with the others' shares
    affordable = int(share * num_bytes / (sizes.page_bytes + share * page_bytes))
    beside = int((num_bytes - longest * sizes.page_bytes) / page_bytes)  # one full context
    if affordable // 2 <= beside:
        affordable = min(affordable, beside)
    first = max(min(span.for_requests(sizes.max_num_seqs), affordable), span.least(max_model_len))
    return sizes.of_groups(first, max_model_len)


def plan_host_pages(plan: MemoryPlan, page_bytes: Sequence[int], host_memory: int) -> MemoryPlan:
    """Add the pages that fit into `host_memory` bytes, with the same ratio between the groups as on the device.

    page_bytes: of a page of each group in the memory of the host. Raises ConfigError if the bytes are too many or too
    few.
    """
    if host_memory > (total := machine_memory()):
        message = f"cache.host_memory is {_mib(host_memory)}, and the machine has {_mib(total)}"
        raise ConfigError(message, fix="lower cache.host_memory")
    own, *others = page_bytes
    shares = [min(1.0, group.num_pages / plan.num_pages) for group in plan.groups]
    num_pages = int(host_memory / (own + sum(share * size for share, size in zip(shares, others, strict=True))))
    if num_pages < 1:
        message = f"cache.host_memory is {host_memory} bytes, and one page takes {own}"
        raise ConfigError(message, fix="raise cache.host_memory, or leave it out")
    groups = []
    for group, share, size in zip(plan.groups, shares, others, strict=True):
        count, (kind, tokens) = int(num_pages * share), group.reach
        if count * plan.page_size < tokens:
            raise ConfigError(
                f"cache.host_memory is {host_memory} bytes, which is {count} pages of the layers with a {kind} of "
                f"{tokens} tokens: not one {kind}",
                fix="raise cache.host_memory",
            )
        groups.append(dataclasses.replace(group, num_host_pages=count, host_page_bytes=size))
    return dataclasses.replace(plan, num_host_pages=num_pages, host_page_bytes=own, groups=tuple(groups))


def plan_without_cache(
    weight_bytes: int, scratch_bytes: int, *, device_bytes: int, memory_fraction: float, max_model_len: int
) -> MemoryPlan:
    """Make the plan of an encoder, which has no KV cache."""
    return MemoryPlan(
        device_bytes=device_bytes,
        budget_bytes=int(device_bytes * memory_fraction),
        weight_bytes=weight_bytes,
        state_bytes=0,
        scratch_bytes=scratch_bytes,
        page_bytes=0,
        num_pages=0,
        page_size=max_model_len,
        max_model_len=max_model_len,
    )


def _check_room(
    sizes: Sizes, num_pages: int, of_groups: Sequence[int], device_bytes: int, recurrent_bytes: int
) -> None:
    """Raise ConfigError if the configured pages do not fit beside the weights, whatever the memory fraction."""
    pool = sizes.pool_bytes(num_pages, of_groups)
    left = device_bytes - sizes.weight_bytes - sizes.state_bytes - recurrent_bytes
    if device_bytes and pool > left:
        states = f" and {_mib(recurrent_bytes)} of recurrent states" if recurrent_bytes else ""
        most = max(left, 0) * num_pages // pool
        fix = f"set it to at most {most}, or leave it out"
        raise ConfigError(
            f"cache.num_pages is {num_pages}, which takes {_mib(pool)}, and {_mib(left)} are left beside the weights"
            f"{states}",
            fix="lower cache.num_state_pages, or leave it out" if states and not most else fix,
        )


def _too_small(
    sizes: Sizes, num_pages: int, of_groups: Sequence[int], max_model_len: int, budget: int, recurrent_bytes: int
) -> str:
    pool = sizes.pool_bytes(num_pages, of_groups)
    states = f"recurrent states {_mib(recurrent_bytes)}, " if recurrent_bytes else ""
    return (
        f"the KV cache has room for {num_pages * sizes.page_size} tokens, and one request may have {max_model_len} "
        f"(budget {_mib(budget)}: weights {_mib(sizes.weight_bytes)}, slots {_mib(sizes.state_bytes)}, "
        f"programs {_mib(sizes.scratch_bytes)}, {states}{_mib(pool)} for pages)"
    )


def _advice(longest: int, *, asked_states: bool) -> str:
    lower = "lower cache.num_state_pages, " if asked_states else ""
    lower += f"set model.max_model_len to at most {longest}, " if longest else ""
    more = "use more devices (jaxserve plan MODEL says how many) or model.quantization"
    return f"{lower}raise cache.memory_fraction or cache.num_pages, {more}, or take a smaller model"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / MIB:.0f} MiB"


def device_memory(devices: Sequence[Any]) -> int:
    """Return the total memory in bytes of the given jax devices. For a CPU, the machine's or the container's limit.

    Only this process's devices can be asked, so other hosts' devices are assumed to have as much.
    """
    if devices[0].platform == "cpu":
        return machine_memory() * len({device.process_index for device in devices})
    own = [device for device in devices if device.process_index == jax.process_index()]
    stats = [device.memory_stats() or {} for device in own]
    return sum(int(stat.get("bytes_limit", 0)) for stat in stats) * len(devices) // len(own)


def scratch_bytes(compiled: jax.stages.Compiled) -> int:
    """Return the bytes of a program's temporary memory and code by XLA's analysis; 0 if the platform has none."""
    analysis = compiled.memory_analysis()
    if analysis is None:
        return 0
    return int(analysis.temp_size_in_bytes + analysis.generated_code_size_in_bytes)
