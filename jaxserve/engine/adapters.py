"""The adapters of an engine by name: loaded, replaced and unloaded between two steps.

A request names an adapter by its digest, so a replacement never changes a request that has begun: it ends with the
tensors that it began with. Their copy in the memory of the host is dropped when no name and no request needs it. The
adapter before the last replacement stays, for requests that are on their way.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.config import NAME
from jaxserve.errors import ConflictError, InvalidValueError, ModelLoadError, ModelNotFoundError, ServerError
from jaxserve.models.checkpoint.adapter import Adapter, adapter_of, read_adapter
from jaxserve.runtime.adapters import DeviceAdapters
from jaxserve.scheduler.adapter_slots import AdapterSlots
from jaxserve.types.messages import AdapterStatus


@dataclass(frozen=True)
class _Loaded:
    """A loaded adapter. version: how often its name was loaded. before: digest of the one that it replaced"""

    digest: str
    rank: int
    version: int
    path: str
    pinned: bool
    before: str = ""


class Adapters:
    """The adapters of one engine.

    served: names of the model itself, which no adapter may have
    share: lets the other hosts of the engine hold an adapter, by its directory, its digest and the digests of those
      that stay. Raises ServerError if one of them cannot
    """

    def __init__(
        self,
        device: DeviceAdapters,
        slots: AdapterSlots,
        served: tuple[str, ...] = (),
        share: Callable[[str, str, Sequence[str]], None] = lambda path, digest, held: None,
    ) -> None:
        self._device = device
        self._share = share
        self._slots = slots
        self._served = served
        self._named: dict[str, _Loaded] = {}
        self._versions: dict[str, int] = {}  # of names that were loaded, unloaded ones included
        self._labels: dict[str, str] = {}  # by digest: NAME@VERSION

    def load_directory(
        self, name: str, path: str, *, replace: bool = False, pinned: bool = False, digest: str = ""
    ) -> AdapterStatus:
        """Load an adapter of a directory. replace: an adapter that has the name. pinned: it keeps its slot

        digest: the one that its tensors must have; empty: any
        Raises ConflictError if the name is in use and `replace` is false, InvalidValueError if the name or the files
        are wrong or too many adapters are pinned, and ServerError if the files or the memory of the host fail.
        """

        def read() -> Adapter:
            adapter = read_adapter(Path(path), self._device.adapted)
            if digest not in ("", adapter.digest):
                raise ModelLoadError(f"{path} has changed since it was loaded", fix="load it again")
            return adapter

        return self._load(name, read, path, replace, pinned)

    def load_arrays(
        self, name: str, tensors: Mapping[str, Any], config: Mapping[str, Any], *, replace: bool, pinned: bool = False
    ) -> AdapterStatus:
        """Load an adapter of arrays by peft's names, which are copied. Raises as `load_directory` does."""
        return self._load(name, lambda: adapter_of(_numpy(tensors), config, self._device.adapted), "", replace, pinned)

    def _load(self, name: str, read: Callable[[], Adapter], path: str, replace: bool, pinned: bool) -> AdapterStatus:
        if not re.fullmatch(NAME, name):
            raise InvalidValueError(
                f"{name[:128]!r} is no name for an adapter: a name is 1 to 128 letters, digits and . _ : / @ + -, and "
                "begins with a letter or a digit",
                param="lora_name",
            )
        if name in self._served:
            raise InvalidValueError(f"{name!r} is a name of the model", param="lora_name")
        old = self._named.get(name)
        if old is not None and not replace:
            raise ConflictError(f"the adapter {name!r} is loaded; load_inplace replaces it")
        others = {each.digest for other, each in self._named.items() if each.pinned and other != name}
        if pinned and len(others) >= self._device.adapted.shape.slots - 1:
            most = self._device.adapted.shape.slots - 1
            raise InvalidValueError(f"at most {most} of lora.slots can be pinned", param="pinned")
        try:
            adapter = read()
        except ModelLoadError as error:
            raise InvalidValueError(f"the adapter {name!r} is not loaded: {error}", param="lora_path") from error
        except (OSError, MemoryError) as error:  # a file of another user, one that vanishes; nothing has changed yet
            raise ServerError(f"the adapter {name!r} is not loaded: {type(error).__name__}: {error}") from error
        self._share(path, adapter.digest, [*self._device.held])
        self._device.held.setdefault(adapter.digest, adapter)
        version = self._versions[name] = self._versions.get(name, 0) + 1
        before = "" if old is None else old.digest
        self._named[name] = _Loaded(adapter.digest, adapter.rank, version, path, pinned, before)
        self._labels[adapter.digest] = f"{name}@{version}"
        self._changed()
        return self._status(name)

    def unload(self, name: str, *, missing_ok: bool = False) -> None:
        """Forget a name. Requests that have begun with its adapter go on. Raises ModelNotFoundError."""
        if name not in self._named and not missing_ok:
            raise ModelNotFoundError(f"there is no adapter {name[:128]!r}", param="lora_name")
        self._named.pop(name, None)
        self._changed()

    def check(self, digest: str) -> None:
        """Raise ModelNotFoundError if a new request's adapter is not there."""
        if digest not in self._device.held:
            raise ModelNotFoundError(
                "the adapter of this request was unloaded, or replaced, and is gone", param="model"
            )

    def digest_of(self, name: str) -> str:
        """Return the digest of a loaded adapter. Raises ModelNotFoundError."""
        if name not in self._named:
            shown = ", ".join(self._named) or "none"
            raise ModelNotFoundError(f"there is no adapter {name[:128]!r}; loaded: {shown}", param="model")
        return self._named[name].digest

    def label(self, digest: str) -> str:
        """Return NAME@VERSION of the adapter."""
        return self._labels.get(digest, digest)

    def counts(self) -> dict[str, float]:
        """Return how many adapters were written to a slot, and how many requests waited for one, since the start."""
        return {"adapter_loads": self._slots.num_loads, "adapter_waits": self._slots.num_waits}

    def statuses(self) -> list[AdapterStatus]:
        """Return all loaded adapters. Drops the tensors that no name and no request needs any more."""
        self._sweep()
        return [self._status(name) for name in self._named]

    def _status(self, name: str) -> AdapterStatus:
        named = self._named[name]
        running, waiting = self._slots.counts(named.digest)
        fields = dataclasses.asdict(named)
        del fields["before"]
        return AdapterStatus(name=name, num_running=running, num_waiting=waiting, **fields)

    def _changed(self) -> None:
        self._slots.pinned = {each.digest for each in self._named.values() if each.pinned}
        self._sweep()

    def _sweep(self) -> None:
        needed = {digest for each in self._named.values() for digest in (each.digest, each.before)}
        for digest in [each for each in self._device.held if each not in needed and not self._slots.is_used(each)]:
            del self._device.held[digest]
            self._labels.pop(digest, None)


def _numpy(tensors: Mapping[str, Any]) -> dict[str, np.ndarray]:
    return {name: np.asarray(array) for name, array in tensors.items()}
