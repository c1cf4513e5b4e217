"""`jaxserve doctor [MODEL]`: check the machine, the configuration and the model, without loading a weight.

It prints one line for each finding, and how to mend it. The exit code is 1 if a finding is bad, else 0.
"""

# The checks here need no device. The checks that import jax are in doctor_devices.py.

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from huggingface_hub import constants, get_token, try_to_load_from_cache

from jaxserve.cli.http_server import bind, check_certificates
from jaxserve.cli.main import imported
from jaxserve.cli.options import GIB, load_config
from jaxserve.config import DEFAULT_STORE, Config, ModelSection, RuntimeSection, ServerSection, StoreSection
from jaxserve.errors import ConfigError
from jaxserve.model_files import local_directory, read_object
from jaxserve.models.unserved import refuse_unserved
from jaxserve.store.database import lock_holder
from jaxserve.system import CacheDirectoryError, free_memory, machine_memory, opened, user_cache
from jaxserve.version import __version__

OK, WARN, BAD = "ok", "warn", "bad"


@dataclass(frozen=True)
class Finding:
    """One line of the output.

    state: ok; warn: the server works, but worse; bad: it cannot serve
    fix: how to mend it; empty if there is nothing to do
    """

    check: str
    state: Literal["ok", "warn", "bad"]
    text: str
    fix: str = ""

    @classmethod
    def of(cls, check: str, error: Exception, state: Literal["warn", "bad"] = "bad") -> Finding:
        """Return the finding of an error, with the error's own fix."""
        if isinstance(error, ConfigError):
            return cls(check, state, str(error), error.fix or "")
        text = " ".join(f"{type(error).__name__}: {error}".split())
        return cls(check, state, text, "report it with this line if the cause is not plain")

    def line(self) -> str:
        """Return the finding as one line."""
        fix = f" -> {self.fix}" if self.fix else ""
        return f"{self.state:4} {self.check:9} {' '.join(self.text.split())}{fix}"


Findings = Callable[[], Iterable[Finding]]


def examined(name: str, check: Findings) -> Iterator[Finding]:
    """Yield the findings of a check. An error that it raises is a finding too, so that the other checks still run."""
    try:
        yield from check()
    except Exception as error:
        yield Finding.of(name, error)


_NEEDED_MEMORY = 2 * GIB  # bytes of host memory for the demo model's server
_NEEDED_DISK = GIB  # bytes for compiled programs, files and batches
_HUB_SECONDS = 3.0
# jaxlib 0.10.2 is the last one for Python 3.11; avoiding its wrong sums costs 7 % of a step (docs/doctor.md)
_NEWER_PYTHON = "Python 3.12 is recommended: 3.11 gets jax 0.10.2, whose defect on CPUs makes a step 7 % longer"
_PACKAGES = ("jax", "jaxlib", "flax", "transformers", "numpy")


def versions() -> Iterator[Finding]:
    """Report the versions of this installation, and that a newer Python gets a better jax."""
    packages = ", ".join(f"{name} {metadata.version(name)}" for name in _PACKAGES)
    text = f"jaxserve {__version__}, Python {platform.python_version()}, {packages}"
    yield Finding("versions", "ok", text, _NEWER_PYTHON if sys.version_info < (3, 12) else "")


def host_memory() -> Iterator[Finding]:
    """Compare the free memory with the memory that the demo model's server needs."""
    free = free_memory()
    text = f"{free / GIB:.1f} of {machine_memory() / GIB:.1f} GiB are free"
    if free < _NEEDED_MEMORY:
        fix = "end other processes; the smallest server needs 2 GiB"
        yield Finding("memory", "warn", text, fix)
    else:
        yield Finding("memory", "ok", text)


def disk(config: Config) -> Iterator[Finding]:
    """Check the free disk space for the store and for compiled programs."""
    paths = {_store_path(config.store), _cache_path(config.runtime.compile_cache, "xla")} - {None}
    for path in sorted(filter(None, paths)):
        there = next(parent for parent in (path, *path.parents) if parent.exists())
        free = shutil.disk_usage(there).free
        text = f"{free / GIB:.1f} GiB are free for {path}"
        full = free < _NEEDED_DISK
        yield Finding("disk", "warn" if full else "ok", text, "free some: batches and caches are kept there" * full)


def port(section: ServerSection) -> Iterator[Finding]:
    """Try to listen where the server would, and to read its certificate."""
    check_certificates(section)
    with bind(section) as listener:
        host, number = listener.getsockname()[:2]
        yield Finding("port", "ok", f"{host}:{number} is free")


def store(section: StoreSection) -> Iterator[Finding]:
    """Try to write into the store's directory."""
    path = _store_path(section)
    if path is None:
        yield Finding("store", "warn", "store.path is null: no files, no batches, no stored responses")
    elif problem := _write_problem(path):
        chosen = isinstance(section.path, Path)
        fix = "set --store.path to a directory that this user can write"
        yield Finding("store", "bad" if chosen else "warn", f"{path} cannot be written: {problem}", fix)
    elif holder := lock_holder(path):
        fix = "stop that server, or give this one its own directory with --store.path"
        yield Finding("store", "warn", f"{path} is in use by another process (pid {holder})", fix)
    else:
        yield Finding("store", "ok", f"{path} can be written")


def caches(section: RuntimeSection) -> Iterator[Finding]:
    """Check that compiled programs and kernels can be kept. Otherwise every start compiles them."""
    configured = section.compile_cache
    yield _cache("compiled programs", configured, "xla")
    yield _cache("C kernels", "auto", "kernels")


def hub(section: ModelSection) -> Iterator[Finding]:
    """Try to connect to the hub. Only a model that is named by its hub id needs it.

    Of such a model config.json is read, and nothing else is downloaded. Raises ModelLoadError if its family is not
    served.
    """
    needed = section.path is not None and local_directory(section.path) is None
    config = try_to_load_from_cache(str(section.path), "config.json", revision=section.revision) if needed else None
    if isinstance(config, str):
        refuse_unserved(read_object(Path(config)))
        yield Finding("hub", "ok", f"{section.path} is in the cache of downloads")
        return
    if constants.HF_HUB_OFFLINE:
        fix = "unset HF_HUB_OFFLINE, or name a local directory" if needed else ""
        yield Finding("hub", "bad" if needed else "ok", "HF_HUB_OFFLINE is set: nothing is downloaded", fix)
        return
    host = urlsplit(constants.ENDPOINT).netloc
    through = _first_host(constants.ENDPOINT)
    way = host if through[0] in host else f"the proxy {through[0]} on the way to {host}"
    try:
        with socket.create_connection(through, timeout=_HUB_SECONDS):
            yield Finding("hub", "ok", f"{way} is reached{'' if _has_token() else '; no token for gated models'}")
    except OSError as error:
        fix = "check the network or HF_ENDPOINT, or name a local directory"
        yield Finding("hub", "bad" if needed else "warn", f"{way} is not reached: {error.strerror or error}", fix)
        return
    if needed:
        imported("jaxserve.models.checkpoint.download").download_config(str(section.path), section.revision)


def _first_host(url: str) -> tuple[str, int]:
    """Return the host and port that a request for `url` connects to: the proxy's if the environment sets a proxy."""
    parts = urlsplit(url)
    proxy = getproxies().get(parts.scheme)
    if proxy and not proxy_bypass(parts.netloc):
        parts = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    return parts.hostname or "", parts.port or (80 if parts.scheme == "http" else 443)


def _has_token() -> bool:
    return get_token() is not None


def _cache(what: str, configured: Path | str | None, name: str) -> Finding:
    fix = "give this user a cache directory of its own: XDG_CACHE_HOME or runtime.compile_cache"
    state: Literal["bad", "warn"] = "bad" if isinstance(configured, Path) else "warn"
    try:
        path = _cache_path(configured, name)
        if path is None:
            return Finding("caches", "warn", f"{what} are not kept: runtime.compile_cache is null")
        with opened(path):
            problem = _write_problem(path)
    except CacheDirectoryError as error:
        return Finding("caches", state, f"{what} are not kept: {error}", error.fix or fix)
    if problem:
        return Finding("caches", state, f"{what} are not kept: {path} cannot be written: {problem}", fix)
    return Finding("caches", "ok", f"{what} are kept in {path}")


def _cache_path(configured: Path | str | None, name: str) -> Path | None:
    return configured if configured is None or isinstance(configured, Path) else user_cache(name)


def _store_path(section: StoreSection) -> Path | None:
    if section.path is None or isinstance(section.path, Path):
        return section.path
    try:
        return Path(DEFAULT_STORE).expanduser()
    except RuntimeError:
        raise ConfigError("the home directory is unknown", fix="set HOME or --store.path") from None


def _write_problem(path: Path) -> str:
    """Return why no file can be written in a directory, which need not exist; empty if one can be written."""
    there = next(parent for parent in (path, *path.parents) if parent.exists())
    if not there.is_dir():
        return f"{there} is not a directory"
    try:
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(bytes(4096))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return error.strerror or str(error)
    return ""


def run(words: Sequence[str]) -> int:
    """Run the command `doctor` and return 0, or 1 if a finding is bad."""
    options, rest = _parser().parse_known_args(words)
    found: list[Finding] = []
    for finding in findings(rest):
        found.append(finding)
        if not options.json:
            print(finding.line(), flush=True)
    bad = sum(finding.state == BAD for finding in found)
    if options.json:
        print(json.dumps({"ok": not bad, "findings": [asdict(finding) for finding in found]}, indent=2))
    else:
        print(f"\n{bad or 'none'} of {len(found)} findings must be mended")
    return 1 if bad else 0


def findings(words: Sequence[str]) -> Iterator[Finding]:
    """Yield the findings, cheap checks first. words: model and flags of `launch`"""
    yield from examined("versions", versions)
    notices: list[str] = []
    try:
        config = load_config(words, os.environ, notice=notices.append)
    except ConfigError as error:
        yield Finding.of("config", error)
        yield from examined("memory", host_memory)
        yield from _device_checks().findings(Config(), with_model=False)  # the model is not known
        return
    for notice in notices:
        yield Finding("config", "warn", notice)
    yield Finding("config", "ok", "the configuration is valid")
    yield from host_findings(config)
    yield from _device_checks().findings(config)


def _device_checks() -> Any:
    return imported("jaxserve.cli.doctor_devices")  # imports jax


def host_findings(config: Config) -> Iterator[Finding]:
    """Yield the findings of the checks that need no device."""
    checks: dict[str, Findings] = {
        "memory": host_memory,
        "disk": lambda: disk(config),
        "port": lambda: port(config.server),
        "store": lambda: store(config.store),
        "caches": lambda: caches(config.runtime),
        "hub": lambda: hub(config.model),
    }
    for name, check in checks.items():
        yield from examined(name, check)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "jaxserve doctor", description=__doc__, allow_abbrev=False, epilog="Other flags are those of jaxserve launch."
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser
