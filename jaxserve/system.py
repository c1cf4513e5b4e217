"""The machine and the installation: cache directories, the C heap, the platform, memory, how to install an extra."""

from __future__ import annotations

import contextlib
import ctypes
import grp
import os
import pwd
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from jaxserve.config import Config
from jaxserve.errors import ConfigError

_WALK = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MAX_LINKS = 40


class CacheDirectoryError(ConfigError):
    """A directory cannot be used for executable files. The message says why."""


@dataclass(frozen=True)
class OpenDirectory:
    """A directory that was checked. Use `descriptor` for calls with `dir_fd`."""

    descriptor: int
    path: Path

    def file(self, name: str) -> str:
        """Return a path for calls that accept no descriptor. It goes through the descriptor if the system can."""
        by_descriptor = f"/proc/self/fd/{self.descriptor}"
        return os.path.join(by_descriptor if os.path.isdir(by_descriptor) else self.path, name)


def user_cache(name: str) -> Path:
    """Return this user's cache directory `name`. Raises CacheDirectoryError if the user has no home directory.

    A relative XDG_CACHE_HOME is ignored, as its specification requires: it would depend on the working directory.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):
        return Path(base, "jaxserve", name)
    try:
        return Path.home() / ".cache" / "jaxserve" / name
    except RuntimeError:
        raise CacheDirectoryError("the home directory is unknown", fix="set HOME or XDG_CACHE_HOME") from None


@contextlib.contextmanager
def opened(path: Path) -> Iterator[OpenDirectory]:
    """Open the directory and create it if needed.

    Raises CacheDirectoryError if another user could write to it, or if it cannot be created.
    """
    try:
        descriptor = _walk(path.absolute())
    except OSError as error:
        raise CacheDirectoryError(f"{path} cannot be used: {error.strerror}") from None
    try:
        yield OpenDirectory(descriptor, path)
    finally:
        os.close(descriptor)


def _walk(path: Path) -> int:
    names, links = [*reversed(path.parts[1:])], 0
    here, at = os.open("/", _WALK), "/"
    try:
        _check(os.fstat(here), at, last=not names)
        while names:
            name = names.pop()
            target = _link(here, name)
            if target is not None:
                links += 1
                if links > _MAX_LINKS:
                    raise CacheDirectoryError(f"{path} cannot be used: too many links")
                names += reversed([part for part in Path(target).parts if part != "/"])
                if os.path.isabs(target):
                    os.close(here)
                    here, at = os.open("/", _WALK), "/"
                continue
            inner = _enter(here, name)
            os.close(here)
            here, at = inner, os.path.join(at, name)
            _check(os.fstat(here), at, last=not names)
    except BaseException:
        os.close(here)
        raise
    return here


def _link(directory: int, name: str) -> str | None:
    """Return the target of a link in `directory`; None if `name` is not a link. Another user's link is an error."""
    try:
        info = os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return None
    if not stat.S_ISLNK(info.st_mode):
        return None
    if info.st_uid not in _owners():
        raise CacheDirectoryError(f"the link {name} belongs to another user ({info.st_uid})")
    return os.readlink(name, dir_fd=directory)


def _enter(directory: int, name: str) -> int:
    with contextlib.suppress(FileExistsError):
        try:
            return os.open(name, _WALK, dir_fd=directory)
        except FileNotFoundError:
            os.mkdir(name, 0o700, dir_fd=directory)
    return os.open(name, _WALK, dir_fd=directory)


def _check(info: os.stat_result, at: str, *, last: bool) -> None:
    if info.st_uid not in _owners():
        raise CacheDirectoryError(f"{at} belongs to another user ({info.st_uid})")
    open_to_others = info.st_mode & stat.S_IWOTH or (info.st_mode & stat.S_IWGRP and not _is_own_group(info.st_gid))
    if open_to_others and (last or not info.st_mode & stat.S_ISVTX):
        raise CacheDirectoryError(f"other users can write to {at}")


def _owners() -> tuple[int, int]:
    return os.geteuid(), 0


def _is_own_group(group: int) -> bool:
    """Return whether this user is the only member of a group: the private group, or one without a name."""
    if group not in {os.getegid(), *os.getgroups()}:
        return False
    try:
        entry = grp.getgrgid(group)
        user = pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return True
    return entry.gr_name == user and set(entry.gr_mem) <= {user}


# Constants of glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4
_LARGEST = 2**31 - 1
_GROWTH = 64 * 2**20  # bytes by which the heap grows at once


def keep_freed_memory() -> bool:
    """Keep freed memory in this process from now on. Return False, and do nothing, without glibc.

    Meant for a process that only runs a CPU engine. Call it after loading the weights, so that the temporary memory
    of loading is returned to the system first.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    settings = ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, _LARGEST), (_M_TOP_PAD, _GROWTH))
    return all(mallopt(name, value) == 1 for name, value in settings)


Platform = Literal["cpu", "gpu", "tpu"]

NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")  # exists while the kernel driver is loaded
_TPU = (Path("/dev/accel0"), Path("/dev/vfio/0"))
_NAMES: dict[str, Platform] = {"cpu": "cpu", "cuda": "gpu", "gpu": "gpu", "tpu": "tpu"}  # in JAX_PLATFORMS


def platform_of(config: Config, environ: Mapping[str, str] = os.environ) -> Platform:
    """Return the platform that the engines will use: mesh.device, or the one that JAX will choose."""
    if config.mesh.device != "auto":
        return config.mesh.device
    first = environ.get("JAX_PLATFORMS", "").split(",")[0]
    if first in _NAMES:
        return _NAMES[first]
    if NVIDIA_DRIVER.exists():
        return "gpu"
    return "tpu" if any(path.exists() for path in _TPU) else "cpu"


_DEVICE_FILES = {"gpu": ("nvidia[0-9]*",), "tpu": ("accel[0-9]*", "vfio/[0-9]*")}


def count_devices(platform: Literal["gpu", "tpu"], root: Path = Path("/dev")) -> int:
    """Return the number of GPUs or TPU chips of this machine, or of its container, by their device files."""
    return sum(1 for pattern in _DEVICE_FILES[platform] for _ in root.glob(pattern))


DISTRIBUTION = "jaxserve-llm"  # the name on PyPI, where another project is called jaxserve
_ROOT = Path(__file__).parent.parent


def install_command(extra: str, *, root: Path = _ROOT) -> str:
    """Return the command that installs an extra (cuda, tpu, otel, bench, gguf) for this copy of the package.

    A checkout is installed from its directory `root`, a wheel by its name.
    """
    if not (root / "pyproject.toml").is_file():
        return f"pip install '{DISTRIBUTION}[{extra}]'"
    return f"pip install -e '{'.' if root == Path.cwd() else root}[{extra}]'"


_CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def machine_memory() -> int:
    """Return the bytes of memory of this machine, or of its container if that has less."""
    import psutil  # noqa: PLC0415  15 ms that the API process does not need

    return min([psutil.virtual_memory().total, *_container_limits()])


def free_memory() -> int:
    """Return the bytes of memory that are free on this machine, at most the limit of its container."""
    import psutil  # noqa: PLC0415  15 ms that the API process does not need

    return min([psutil.virtual_memory().available, *_container_limits()])


def _container_limits() -> list[int]:
    texts = [path.read_text().strip() for path in _CGROUP_LIMITS if path.exists()]
    return [int(text) for text in texts if text.isdigit()]
