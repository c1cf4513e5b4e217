"""A bundle: a directory with every compiled program of one model, mesh and device, written by `jaxserve compile`.

A server that is started with one compiles nothing. manifest.json names the model, mesh and device, and has a checksum
of each program; the other files have the form of program_store.py. The files are code, so the directory and each file
must belong to this user or to root, and no other user may be able to write them. Each mismatch is refused with its
reason.
"""

from __future__ import annotations

import dataclasses
import hashlib
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import msgspec

from jaxserve.errors import ConfigError
from jaxserve.models.checkpoint.structure import ModelStructure
from jaxserve.models.config import ModelConfig
from jaxserve.runtime.compilation.compiler import Program
from jaxserve.runtime.fingerprint import check_same, describe, fingerprint
from jaxserve.runtime.mesh import DeviceMesh
from jaxserve.runtime.runner_config import RunnerConfig
from jaxserve.runtime.saved_programs.executable import ProgramFormatError, load, serialize
from jaxserve.runtime.saved_programs.program_store import decode, encode, program_key, read_code, write_code
from jaxserve.system import CacheDirectoryError, opened

MANIFEST = "manifest.json"
TUNED = "on the device"
UNTUNED = "without a device: matrix products are untuned"
_AGAIN = "make it again with jaxserve compile"
_COMPARED = ("max_num_seqs", "max_num_batched_tokens", "page_size", "deterministic", "max_drafts")


def refuse_bundle(model: ModelConfig) -> None:
    """Raise ConfigError for a model whose pages a manifest cannot name yet."""
    if model.layer_states:
        raise ConfigError("a model whose layers have a recurrent state takes no bundle yet", fix="start it without one")


class ProgramFile(msgspec.Struct, frozen=True):
    """A program's file. key: see program_key. sha256: of the whole file, in hexadecimal."""

    file: str
    key: str
    sha256: str


class Manifest(msgspec.Struct, frozen=True):
    """The description of a bundle.

    made_for: the fingerprint. settings: the model and the limits, as texts. tuning: how matrix products were chosen
    num_pages, of_groups, max_model_len: of the memory plan, because the programs' shapes depend on them. of_groups:
    pages of the layer groups from 1 on
    """

    made_for: dict[str, str]
    settings: dict[str, str]
    tuning: str
    num_pages: int
    of_groups: tuple[int, ...]
    max_model_len: int
    programs: dict[str, ProgramFile]


_MANIFEST = msgspec.json.Decoder(Manifest)


class Bundle:
    """An opened bundle (implements compiler.ProgramStorage). Raises ConfigError in place of compiling."""

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self.manifest = manifest
        self._directory = directory

    @classmethod
    def open(cls, directory: Path, mesh: DeviceMesh) -> Bundle:
        """Read the manifest. Raises ConfigError if the bundle is not safe, or if its fingerprint differs."""
        manifest = _read_manifest(directory)
        check_same(manifest.made_for, fingerprint(mesh), f"the bundle {directory}")
        return cls(directory, manifest)

    def resolved(self, structure: ModelStructure, config: RunnerConfig, attention: str) -> RunnerConfig:
        """Return the configuration with the bundle's pages and context. Raises ConfigError if it is for another one.

        attention: name of the backend that serves
        """
        made = self.manifest
        check_same(made.settings, settings_of(structure, config, attention), f"the bundle {self._directory}")
        asked: dict[str, tuple[Any, int]] = {"cache.num_pages": (config.num_pages, made.num_pages)}
        asked["cache.num_window_pages"] = config.num_window_pages, next(iter(made.of_groups), 0)
        length = None if config.shrink_context else config.max_model_len
        asked["model.max_model_len"] = length, made.max_model_len
        for name, (wanted, has) in asked.items():
            if wanted is not None and wanted != has:
                raise ConfigError(
                    f"the bundle {self._directory} was made for {name} {has}, and here it is {wanted}",
                    fix=f"leave {name} out, or {_AGAIN}",
                )
        return dataclasses.replace(
            config,
            num_pages=made.num_pages,
            num_window_pages=made.of_groups,
            max_model_len=made.max_model_len,
            shrink_context=False,
        )

    def find(self, program: Program) -> jax.stages.Compiled:
        """Load a program. Raises ConfigError if it is missing, was changed, or has another shape."""
        found = self.manifest.programs.get(program.name)
        if found is None:
            raise self._refusal(f"has no program {program.name}")
        if found.key != program_key(program, self.manifest.made_for):
            raise self._refusal(f"has {program.name} for other shapes")
        try:
            with opened(self._directory) as held:
                data = read_code(held.descriptor, found.file)
            if hashlib.sha256(data).hexdigest() != found.sha256:
                raise self._refusal(f"is damaged: {found.file} was cut or changed")
            return load(decode(data), program)
        except OSError as error:
            raise self._refusal(f"cannot be read: {found.file}: {error.strerror}") from None
        except ProgramFormatError as error:
            raise self._refusal(f"cannot be used: {program.name}: {error}") from None

    def keep(self, program: Program, compiled: jax.stages.Compiled) -> None:
        """Never called: `find` returns a program or raises."""
        raise AssertionError(program.name)

    def discard(self) -> list[str]:
        """Raise ConfigError: a bundle's programs are not compiled."""
        raise self._refusal("has a program that cannot be run")

    def _refusal(self, what: str) -> ConfigError:
        return ConfigError(f"the bundle {self._directory} {what}", fix=f"{_AGAIN}, or leave runtime.bundle out")


class BundleWriter:
    """Writes a bundle (implements compiler.ProgramStorage: finds nothing, keeps everything). Threads may share it."""

    def __init__(self, directory: Path, made_for: Mapping[str, str]) -> None:
        """Make the directory, for this user only. Raises ConfigError if it is not empty, or others could write it."""
        self._directory = directory
        self._made_for = dict(made_for)
        self._programs: dict[str, ProgramFile] = {}
        self._lock = threading.Lock()
        with opened(directory):
            others = [path.name for path in directory.iterdir() if path.name != MANIFEST and path.suffix != ".program"]
        if others:
            raise ConfigError(f"{directory} has other files: {others[0]}", fix="name a new directory")
        for path in directory.iterdir():
            path.unlink()

    def find(self, program: Program) -> None:
        """Return None, so that every program is compiled."""

    def keep(self, program: Program, compiled: jax.stages.Compiled) -> None:
        """Write a program's file. Raises ConfigError if XLA cannot serialize it, OSError if it cannot be written."""
        key = program_key(program, self._made_for)
        try:
            data = encode(serialize(compiled))
        except ProgramFormatError as error:
            raise ConfigError(f"{program.name} cannot be written: {error}") from None
        name = f"{key}.program"
        with opened(self._directory) as held:
            write_code(held.descriptor, name, data)
        with self._lock:
            self._programs[program.name] = ProgramFile(name, key, hashlib.sha256(data).hexdigest())

    def discard(self) -> list[str]:
        """Return no names: nothing is loaded."""
        return []

    def finish(self, settings: Mapping[str, str], tuning: str, pages: tuple[int, ...], max_model_len: int) -> int:
        """Write the manifest, which completes the bundle. Returns the bytes of all files.

        pages: of each layer group
        """
        first, *others = pages
        manifest = Manifest(self._made_for, dict(settings), tuning, first, tuple(others), max_model_len, self._programs)
        with opened(self._directory) as held:
            write_code(held.descriptor, MANIFEST, msgspec.json.format(msgspec.json.encode(manifest)))
        return sum(path.stat().st_size for path in self._directory.iterdir())


def settings_of(structure: ModelStructure, config: RunnerConfig, attention: str) -> dict[str, str]:
    """Return the model and the limits that programs are compiled for, as short texts."""
    weights = [(spec.name, spec.shape, jnp.dtype(spec.dtype).name) for spec in structure.specs]
    digest = hashlib.sha256(describe((structure.config, weights)).encode()).hexdigest()[:12]
    settings = {"model": f"{structure.config.architecture} of shape {digest}"}
    settings |= {name: str(getattr(config, name)) for name in _COMPARED}
    settings["lora.slots"] = str(0 if config.lora is None else config.lora.slots)
    if config.lora is not None:
        settings["lora.max_rank"] = str(config.lora.rank)
    return settings | {"attention": attention, "cache dtype": config.cache_dtype.name}


def _read_manifest(directory: Path) -> Manifest:
    if not directory.is_dir():
        raise ConfigError(f"there is no bundle {directory}", fix="write one with jaxserve compile")
    try:
        with opened(directory) as held:
            return _MANIFEST.decode(read_code(held.descriptor, MANIFEST))
    except CacheDirectoryError as error:
        raise ConfigError(f"the bundle {directory} is not safe: {error}", fix=error.fix or _AGAIN) from None
    except OSError as error:
        raise ConfigError(f"{directory} is no bundle: {MANIFEST}: {error.strerror}", fix=_AGAIN) from None
    except msgspec.MsgspecError as error:
        raise ConfigError(f"the bundle {directory} is damaged: {MANIFEST}: {error}", fix=_AGAIN) from None
