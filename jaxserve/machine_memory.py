"""The memory of this machine, or of the container that this process runs in."""

from __future__ import annotations

from pathlib import Path

import psutil

_CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def machine_memory() -> int:
    """Return the bytes of memory of this machine, or of its container if that has less."""
    return min([psutil.virtual_memory().total, *_container_limits()])


def free_memory() -> int:
    """Return the bytes that are free on this machine, at most those of its container."""
    return min([psutil.virtual_memory().available, *_container_limits()])


def _container_limits() -> list[int]:
    texts = [path.read_text().strip() for path in _CGROUP_LIMITS if path.exists()]
    return [int(text) for text in texts if text.isdigit()]
