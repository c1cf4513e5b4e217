"""The fingerprint of compiled programs: versions, sources, device, processor and options, beside the model.

Two runs with equal fingerprints may exchange compiled programs. Each field has a name, so that a refusal can say which
one differs.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from jaxserve.errors import ConfigError
from jaxserve.runtime.mesh import DeviceMesh
from jaxserve.version import __version__

ROOT = Path(__file__).parents[1]  # the package
FORMAT = "1"  # of the files
_SOURCES = ("*.py", "*.c", "*.h")
_PACKAGES = ("jax", "jaxlib", "flax", "numpy", "ml_dtypes")
_PLUGINS = {"gpu": ("jax-cuda13-plugin", "jax-cuda12-plugin"), "tpu": ("libtpu",)}
_OPTIONS = ("jax_enable_x64", "jax_default_matmul_precision", "jax_default_prng_impl", "jax_threefry_partitionable")
_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
# Flags that only name the files of autotuning results, which are recorded separately.
_AUTOTUNE_FLAGS = ("--xla_gpu_load_autotune_results_from", "--xla_gpu_dump_autotune_results_to")
# The fix in the error message if a field differs.
_ADVICE: Mapping[str, str] = {
    "processor": "make the bundle on a machine with the same processor",
    "device": "make the bundle for this device",
}


def fingerprint(mesh: DeviceMesh) -> dict[str, str]:
    """Return the fingerprint of programs for this mesh. The values are short texts."""
    device, kind = mesh.devices[0], mesh.platform
    fields = {"format": FORMAT, "jaxserve": __version__, "sources": sources_digest()}
    fields |= {name: metadata.version(name) for name in _PACKAGES}
    fields |= {name: version for name in _PLUGINS.get(kind, ()) if (version := _version(name)) is not None}
    fields |= {"platform": kind, "device": device.device_kind, "devices": str([d.id for d in mesh.devices])}
    fields["mesh"] = " ".join(f"{name}={size}" for name, size in mesh.mesh.shape.items())
    if kind == "cpu":
        fields["processor"] = _short(f"{platform.machine()} {_processor()}")
        fields["cores"] = str(os.cpu_count())  # XLA splits its loops by them
    fields["options"] = "; ".join([*(f"{n}={jax.config.values[n]}" for n in _OPTIONS), *map(_variable, _VARIABLES)])
    return fields


def check_same(made_for: Mapping[str, str], here: Mapping[str, str], what: str) -> None:
    """Raise ConfigError that names the first field that differs. what: the file, for the message."""
    for name, value in here.items():
        made = made_for.get(name)
        if made != value:
            raise ConfigError(
                f"{what} was made for {name} {made or 'of another kind'}, and here it is {value}",
                fix=f"{_ADVICE.get(name, 'make it again here with jaxserve compile')}, or leave runtime.bundle out",
            )


@functools.cache
def sources_digest() -> str:
    """Return a digest of all sources of the package that may end up in a program."""
    digest = hashlib.sha256()
    for folder in ("models", "ops", "runtime", "types"):
        for path in sorted(found for kind in _SOURCES for found in (ROOT / folder).rglob(kind)):
            digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _variable(name: str) -> str:
    words = os.environ.get(name, "").split()
    return f"{name}={' '.join(sorted(word for word in words if not word.startswith(_AUTOTUNE_FLAGS)))}"


def _processor() -> str:
    """Return the instruction sets and the model, by which LLVM chooses its instructions."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    wanted = ("model name", "cpu family", "model\t", "flags", "Features", "CPU part")
    found = {
        line.partition(":")[0].strip(): line.partition(":")[2].strip() for line in lines if line.startswith(wanted)
    }
    name = found.pop("model name", "") or platform.processor() or "unknown"
    return f"{name} ({_short(' '.join(sorted(map(str, found.items()))), 8)})"


def _short(text: str, length: int = 120) -> str:
    """Return the text, or, if it is long, a digest of it."""
    return text if len(text) <= length and length > 8 else hashlib.sha256(text.encode()).hexdigest()[:length]


def describe(value: Any) -> str:
    """Return a text that is equal for equal shapes, shardings and plain data, in every process.

    Raises TypeError for an object whose text would contain its address, and for a frozenset, whose order differs.
    """
    if isinstance(value, jax.ShapeDtypeStruct):
        return f"{value.dtype.name}{list(value.shape)}{_sharding(value.sharding)}"
    if isinstance(value, jax.sharding.Sharding):
        return _sharding(value)
    text = repr(value)
    if " at 0x" in text or "frozenset({" in text:
        raise TypeError(f"{type(value).__name__} has no text that is the same in every process")
    return text


def _sharding(sharding: Any) -> str:
    if isinstance(sharding, jax.sharding.NamedSharding):
        return f"@{sharding.spec}"
    return "@one" if sharding is not None else "@none"
