"""The platform that an engine will use, found without JAX, which would take the devices."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from jaxserve.config import Config

Platform = Literal["cpu", "gpu", "tpu"]

NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")  # exists while the kernel driver is loaded
_TPU = (Path("/dev/accel0"), Path("/dev/vfio/0"))
_NAMES: dict[str, Platform] = {"cpu": "cpu", "cuda": "gpu", "gpu": "gpu", "tpu": "tpu"}  # in JAX_PLATFORMS


def platform_of(config: Config, environ: Mapping[str, str] = os.environ) -> Platform:
    """Return the platform that the engines will use: mesh.device, or what JAX will choose."""
    if config.mesh.device != "auto":
        return config.mesh.device
    first = environ.get("JAX_PLATFORMS", "").split(",")[0]
    if first in _NAMES:
        return _NAMES[first]
    if NVIDIA_DRIVER.exists():
        return "gpu"
    return "tpu" if any(path.exists() for path in _TPU) else "cpu"
