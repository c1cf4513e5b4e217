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
from jaxserve.types.scheduling import WindowSize

logger = logging.getLogger(__name__)

MIB = 2**20
CPU_POOL_FLOOR = 512 * MIB  # on a CPU the pages take this or as much as the weights, whichever is more
_REACH = 2**31  # array elements that a signed 32-bit offset reaches


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes over all devices of the engine, and the number of pages.

    The full-attention group is the layers without a sliding window, or all layers if there is no sliding-window group.
    """

    device_bytes: int  # memory of the devices
    budget_bytes: int  # memory_fraction of it
    weight_bytes: int
    state_bytes: int  # slot state, and the hidden states between extend and head_sample
    scratch_bytes: int  # temporary memory of the largest program
    page_bytes: int  # of one page in all layers of the full-attention group
    num_pages: int
    page_size: int  # tokens
    max_model_len: int
    window: int | None = None  # tokens that the sliding-window group sees; None: there is no such group
    window_page_bytes: int = 0  # of one page in all layers of the sliding-window group
    num_window_pages: int = 0
    num_host_pages: int = 0  # copies of evicted pages in the memory of the host
    host_page_bytes: int = 0
    num_host_window_pages: int = 0  # likewise, of the sliding-window group
    host_window_page_bytes: int = 0

    @property
    def kv_bytes(self) -> int:
        return self.num_pages * self.page_bytes + self.num_window_pages * self.window_page_bytes

    @property
    def kv_tokens(self) -> int:
        return self.num_pages * self.page_size

    @property
    def max_concurrency(self) -> float:
        """Return the number of requests of the full context length that fit at once."""
        full = self.kv_tokens / self.max_model_len
        if self.window is None:
            return full
        size = WindowSize(self.window, self.page_size, chunk=1)
        return min(full, self.num_window_pages / size.most(self.max_model_len))

    def as_dict(self) -> dict[str, Any]:
        derived = {name: getattr(self, name) for name in ("kv_bytes", "kv_tokens", "max_concurrency")}
        return dataclasses.asdict(self) | derived


@dataclass(frozen=True)
class Sizes:
    """The inputs of the plan. Bytes are over all devices; the fields are MemoryPlan's.

    reached: bytes of one page in a layer of each group on a device, if `within_reach` limits them, else 0.
    """

    weight_bytes: int
    state_bytes: int
    scratch_bytes: int
    page_bytes: int
    page_size: int
    max_num_seqs: int
    window_page_bytes: int = 0
    window: WindowSize | None = None
    reached: tuple[int, int] = (0, 0)
    scratch_page_bytes: int = 0  # by which a page makes the temporary memory larger, if programs copy the cache

    def with_scratch(self) -> Sizes:
        """Return the sizes with a page that has its share of the temporary memory, of the first group with bytes."""
        name = "page_bytes" if self.page_bytes else "window_page_bytes"
        return dataclasses.replace(self, **{name: getattr(self, name) + self.scratch_page_bytes})


def plan_memory(sizes: Sizes, config: RunnerConfig, *, platform: str, device_bytes: int) -> MemoryPlan:
    """Plan the number of pages. Raises ConfigError that names the part that does not fit.

    If config.num_pages is None, the pages fill the budget, but are at most twice as many as all slots need at full
    length; the second half is for cached prefixes. The sliding-window group is planned likewise, see `split_pool`.
    With config.shrink_context the context length may be cut to the longest that one request can have.
    """
    num_pages, max_model_len, num_window_pages = config.num_pages, config.max_model_len, config.num_window_pages
    budget = int(device_bytes * config.memory_fraction)
    free = budget - sizes.weight_bytes - sizes.state_bytes - sizes.scratch_bytes
    window_pages = 0
    if num_pages is None:
        pool = min(free, max(CPU_POOL_FLOOR, sizes.weight_bytes)) if platform == "cpu" else free
        num_pages, window_pages = split_pool(max(pool, 0), sizes.with_scratch(), max_model_len, num_window_pages)
    elif sizes.window is not None:
        most = sizes.window.for_requests(sizes.max_num_seqs)
        window_pages = min(num_pages, most) if num_window_pages is None else num_window_pages
    if config.num_pages is not None:
        _check_room(sizes, num_pages, window_pages, device_bytes)
    num_pages = _reachable("num_pages", num_pages, sizes.reached[0], config.num_pages)
    window_pages = _reachable("num_window_pages", window_pages, sizes.reached[1], num_window_pages)
    longest = num_pages * sizes.page_size
    if longest < max_model_len and (not config.shrink_context or longest < sizes.page_size):
        raise ConfigError(_too_small(sizes, num_pages, window_pages, max_model_len, budget), fix=_advice(longest))
    if sizes.window is not None and window_pages < (least := sizes.window.least(min(longest, max_model_len))):
        raise ConfigError(
            f"the layers with a sliding window have {window_pages} pages, and one request may need {least}",
            fix=f"set cache.num_window_pages to at least {least}, or raise cache.memory_fraction",
        )
    return MemoryPlan(
        device_bytes=device_bytes,
        budget_bytes=budget,
        weight_bytes=sizes.weight_bytes,
        state_bytes=sizes.state_bytes,
        scratch_bytes=sizes.scratch_bytes
        + sizes.scratch_page_bytes * (num_pages if sizes.page_bytes else window_pages),
        page_bytes=sizes.page_bytes,
        num_pages=num_pages,
        page_size=sizes.page_size,
        max_model_len=min(max_model_len, longest),
        window=sizes.window and sizes.window.window,
        window_page_bytes=sizes.window_page_bytes,
        num_window_pages=window_pages,
    )


def within_reach(count: int, size: int) -> int:
    """Return how many of `count` pieces of `size` bytes a Triton kernel may read as one array of one-byte elements.

    Up to 4 GiB Pallas makes Triton's offsets of 32 bits, which have a sign, and above of 64 bits. Between 2 and 4 GiB
    the elements beyond 2 GiB would be read from before the array. An array of wider elements has at most 2**31 of them.
    """
    return _REACH // size if _REACH < count * size <= 2 * _REACH else count


def check_weight(name: str, size: int) -> None:
    """Raise ConfigError if a Triton kernel would read only a part of a weight of `size` one-byte values on a device.

    See `within_reach`.
    """
    if within_reach(size, 1) < size:
        raise ConfigError(
            f"{name} has {size / 2**30:.2f} GiB on a device, and the Triton kernels read at most 2 GiB of a "
            "weight in 8 or 4 bits, or more than 4",
            fix="raise mesh.tensor or mesh.expert, or set model.quantization: none",
        )


def _reachable(name: str, count: int, size: int, asked: int | None) -> int:
    """Return the pages of a group that the kernels reach. Raises ConfigError if the configuration asks for more."""
    most = within_reach(count, size)
    if most == count:
        return count
    why = f"the Triton kernels read at most {_mib(_REACH)} of a layer's 8-bit pages, or more than {_mib(2 * _REACH)}"
    if asked is not None:
        raise ConfigError(f"cache.{name} is {count}, which is {_mib(count * size)}: {why}", fix=f"set it to {most}")
    logger.warning("cache.%s is %d instead of %d: %s", name, most, count, why)
    return most


def split_pool(
    num_bytes: int, sizes: Sizes, max_model_len: int, num_window_pages: int | None = None
) -> tuple[int, int]:
    """Return (pages, pages of the sliding-window group) that fit into `num_bytes`.

    The sliding-window group gets twice the pages that all requests can have at once; the second half is for cached
    prefixes. The full-attention group gets the rest.
    If that is too much, the sliding-window group gets half as many pages as the other, which suits a context of two
    windows, or a larger share if the longest request needs one.
    If every layer has a window, full-attention pages take no memory. Their number is then set so that they never
    limit admission before the window pages do.
    If one full context and its windows do not fit, all layers keep their whole context, and the context is shorter.
    """
    longest = -(-max_model_len // sizes.page_size)
    most = 2 * sizes.max_num_seqs * longest
    if sizes.window is None:
        return min(num_bytes // sizes.page_bytes, most), 0
    one = sizes.window.most(max_model_len)
    window_pages = num_window_pages
    if window_pages is None:
        share = max(0.5, one / longest) if sizes.page_bytes else 1.0
        affordable = int(share * num_bytes / (sizes.page_bytes + share * sizes.window_page_bytes))
        window_pages = min(sizes.window.for_requests(sizes.max_num_seqs), affordable)
        window_pages = max(window_pages, sizes.window.least(max_model_len))
    left = num_bytes - window_pages * sizes.window_page_bytes
    pages = 0
    if left >= 0:
        pages = left // sizes.page_bytes if sizes.page_bytes else max(longest, window_pages * longest // one)
    kept = num_bytes // (sizes.page_bytes + sizes.window_page_bytes)
    if num_window_pages is None and pages < min(kept, longest):
        return kept, kept
    return min(pages, most), window_pages


def plan_host_pages(plan: MemoryPlan, page_bytes: int, window_page_bytes: int, host_memory: int) -> MemoryPlan:
    """Add the pages that fit into `host_memory` bytes, with the same ratio between the groups as on the device.

    Raises ConfigError if the bytes are too many or too few.
    """
    if host_memory > (total := machine_memory()):
        raise ConfigError(f"cache.host_memory is {_mib(host_memory)}, and the machine has {_mib(total)}")
    share = min(1.0, plan.num_window_pages / plan.num_pages)
    num_pages = int(host_memory / (page_bytes + share * window_page_bytes))
    if num_pages < 1:
        raise ConfigError(f"cache.host_memory is {host_memory} bytes, and one page takes {page_bytes}")
    window_pages = int(num_pages * share)
    if plan.window is not None and window_pages * plan.page_size < plan.window:
        raise ConfigError(
            f"cache.host_memory is {host_memory} bytes, which is {window_pages} pages of the layers with a sliding "
            f"window of {plan.window} tokens: not one window",
            fix="raise cache.host_memory",
        )
    return dataclasses.replace(
        plan,
        num_host_pages=num_pages,
        host_page_bytes=page_bytes,
        num_host_window_pages=window_pages,
        host_window_page_bytes=window_page_bytes,
    )


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


def _check_room(sizes: Sizes, num_pages: int, window_pages: int, device_bytes: int) -> None:
    """Raise ConfigError if the configured pages do not fit beside the weights, whatever the memory fraction."""
    pool = num_pages * sizes.page_bytes + window_pages * sizes.window_page_bytes
    left = device_bytes - sizes.weight_bytes - sizes.state_bytes
    if device_bytes and pool > left:
        raise ConfigError(
            f"cache.num_pages is {num_pages}, which takes {_mib(pool)}, and {_mib(left)} are left beside the weights",
            fix=f"set it to at most {max(left, 0) * num_pages // pool}, or leave it out",
        )


def _too_small(sizes: Sizes, num_pages: int, window_pages: int, max_model_len: int, budget: int) -> str:
    pool = num_pages * sizes.page_bytes + window_pages * sizes.window_page_bytes
    return (
        f"the KV cache has room for {num_pages * sizes.page_size} tokens, and one request may have {max_model_len} "
        f"(budget {_mib(budget)}: weights {_mib(sizes.weight_bytes)}, slots {_mib(sizes.state_bytes)}, "
        f"programs {_mib(sizes.scratch_bytes)}, {_mib(pool)} for pages)"
    )


def _advice(longest: int) -> str:
    lower = f"set model.max_model_len to at most {longest}, " if longest else ""
    return f"{lower}raise cache.memory_fraction or cache.num_pages, or take a smaller model"


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
