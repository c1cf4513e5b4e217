"""Passes the KV pages of a prompt from one engine to another, through a file that both can read.

One engine computes the prompt, holds its pages (`EngineRequest.hold_seconds`) and writes them to a file. The other one
reads the file into its prefix cache. A request with this prompt then computes only the rest there: less than a page,
and the last token, from which the first token is sampled.

A file that is damaged, or of another model or other weights, is refused, and the request computes its whole prompt. A
file in /dev/shm is memory that both processes map. A server does so with `mesh.prefill_replicas`
(client/prompt_handover.py).
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import stat
import time
import zlib
from collections.abc import Sequence
from typing import Any

import jax
import msgspec
import numpy as np

from jaxserve.config import Config
from jaxserve.engine.core import EngineCore
from jaxserve.errors import ConfigError, ConflictError, InvalidValueError, ServerError
from jaxserve.models.config import ModelConfig
from jaxserve.runtime.host_pages import page_views
from jaxserve.runtime.model_runner import ModelRunner
from jaxserve.types.step import SchedulerOutput

_LENGTH = 4  # bytes of the header's length, little-endian
_MAX_HEADER = 64 * 2**20  # bytes


class _PagesHeader(msgspec.Struct, frozen=True):
    """The beginning of a file of pages.

    form: see PageHandover. tokens: int32, little-endian, the tokens of the pages
    checksums: one a page
    version, weights: label and number of the weights, see ServingState
    written: time.monotonic(), which all processes of a machine share; two weight updates may have the same label
    """

    form: str
    version: str
    weights: int
    written: float
    namespace: str
    tokens: bytes
    checksums: list[int]


_HEADER = msgspec.msgpack.Decoder(_PagesHeader)


def check_handover(config: Config, model: ModelConfig, *, generates: bool) -> None:
    """Raise ConfigError if a model's prompts cannot be computed by one engine and go on in another."""
    if not config.mesh.prefill_replicas:
        return
    fix = "leave mesh.prefill_replicas out"
    if not generates:
        raise ConfigError("mesh.prefill_replicas is for models that generate text", fix=fix)
    if any(limit is not None for limit in (*model.windows, *model.layer_chunks)):
        raise ConfigError(
            "mesh.prefill_replicas does not work with layers that have a sliding window or chunks", fix=fix
        )
    if model.layer_states:
        raise ConfigError("mesh.prefill_replicas does not work with layers that have a recurrent state", fix=fix)


class PageHandover:
    """Writes the pages of prompts to files and reads other engines' files.

    form: two engines with the same one have pages of the same content for the same tokens.

    Every call runs between two steps and waits for the step in flight.
    """

    def __init__(self, core: EngineCore, runner: ModelRunner, form: str) -> None:
        self._core = core
        self._runner = runner
        self._form = form
        self._page_bytes = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(runner.page))

    def write(self, path: str, token_ids: Sequence[int], namespace: str = "") -> int:
        """Write the cached pages of the longest prefix of `token_ids` to a new file, and hold them no longer.

        Returns the number of tokens in these pages; 0: no page is cached and no file is made. Raises ConflictError for
        a model with sliding windows and while the KV cache is asleep, InvalidValueError if the file cannot be made.
        """
        kv = self._checked()
        node = kv.cache.match_prefix(namespace, token_ids, len(token_ids) // kv.page_size)
        if node.depth == 0:
            return 0
        pages = self._runner.pages.export(self._runner.caches, node.page_ids)
        rows = np.empty((node.depth, self._page_bytes), np.uint8)
        jax.tree.map(np.copyto, page_views(rows, self._runner.page), tuple(pages))
        num_tokens = node.depth * kv.page_size
        tokens = np.asarray(token_ids[:num_tokens], "<i4").tobytes()
        header = _PagesHeader(*self._identity, time.monotonic(), namespace, tokens, _checksums(rows))
        try:
            _write(path, msgspec.msgpack.encode(header), rows)
        except OSError as error:
            raise InvalidValueError(f"{path}: {error.strerror}", param="path") from None
        kv.held.give_up(node)
        self._core.scheduler.counters.pages_written += node.depth
        return num_tokens

    def read(self, path: str, most: int | None = None) -> int:
        """Put the pages of a file into the prefix cache. Returns the number of its tokens that are cached now.

        most: pages at most, so that steps of running requests can be computed in between; None: all. Pages for which
        there is no room are left out. Raises InvalidValueError if the file is not whole, and ConflictError if it is
        of another model, of other weights, older than the latest update here, or cannot be used in this state.
        """
        kv = self._checked()
        header, data = self._opened(path)
        tokens = np.frombuffer(header.tokens, "<i4").tolist()
        first = kv.cache.match_prefix(header.namespace, tokens, len(header.checksums)).depth
        rows = self._rows(path, header, data, first, most)
        page_ids = kv.adopt(header.namespace, tokens, len(rows))[1]
        try:
            if moves := kv.take_page_moves():  # pages that are evicted for these are copied before they are overwritten
                self._runner.execute(SchedulerOutput(0, [], 0, [], page_moves=moves))
            new = page_views(rows[: len(page_ids)], self._runner.page)
            self._runner.caches = self._runner.pages.fill(self._runner.caches, page_ids, new)
        except Exception as error:
            self._core.recover()
            raise ServerError(f"the pages cannot be read: {type(error).__name__}: {error}") from error
        self._core.scheduler.counters.pages_read += len(page_ids)
        return (first + len(page_ids)) * kv.page_size

    @property
    def _identity(self) -> tuple[str, str, int]:
        """Return the form, and the label and number of the weights."""
        return self._form, self._core.serving.version, self._core.serving.weights

    def _checked(self) -> Any:
        kv = self._core.scheduler.kv
        if kv.groups:
            raise ConflictError("a model with sliding windows or recurrent states passes no pages on")
        if "kv_cache" in self._core.serving.asleep:
            raise ConflictError("the KV cache is asleep")
        self._core.settle()
        return kv

    def _opened(self, path: str) -> tuple[_PagesHeader, np.ndarray]:
        """Return the header of a file, checked, and the bytes of its pages, uint8 [n]."""
        try:
            data = _mapped(path)
            header = _HEADER.decode(data[_LENGTH : _end_of_header(data)].tobytes())
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            raise InvalidValueError(f"{path} has no pages: {error}", param="path") from None
        own, since = self._identity, self._core.serving.updated
        if (header.form, header.version, header.weights) != own or header.written < since:
            raise ConflictError("the pages are of another model, or of other weights")
        data, num_pages = data[_end_of_header(data) :], len(header.checksums)
        size = self._core.scheduler.kv.page_size
        if data.size != num_pages * self._page_bytes or len(header.tokens) != 4 * num_pages * size:
            raise InvalidValueError(f"{path} is damaged", param="path")
        return header, data

    def _rows(self, path: str, header: _PagesHeader, data: np.ndarray, first: int, most: int | None) -> np.ndarray:
        """Return at most `most` pages from `first` on: uint8 [n, bytes of a page]. Raises InvalidValueError."""
        checksums = header.checksums[first:] if most is None else header.checksums[first : first + most]
        # a copy, because the file may change after it was checked
        rows = data.reshape(-1, self._page_bytes)[first : first + len(checksums)].copy()
        if _checksums(rows) != checksums:
            raise InvalidValueError(f"{path} is damaged", param="path")
        return rows


def _checksums(rows: np.ndarray) -> list[int]:
    return [zlib.crc32(row.data) for row in rows]


def _end_of_header(data: np.ndarray) -> int:
    length = int.from_bytes(data[:_LENGTH].tobytes(), "little")
    if not 0 < length <= min(_MAX_HEADER, len(data) - _LENGTH):
        raise ValueError("no header")
    return _LENGTH + length


def _write(path: str, header: bytes, rows: np.ndarray) -> None:
    """Write a file that other users cannot read. It gets its name when it is complete."""
    begun = f"{path}.new"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(begun)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with open(os.open(begun, flags, 0o600), "wb") as file:
            file.write(len(header).to_bytes(_LENGTH, "little") + header)
            file.write(rows.data)
        os.rename(begun, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(begun)
        raise


def _mapped(path: str) -> np.ndarray:
    """Map a file that belongs to this user, and return its bytes. Raises OSError or ValueError."""
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        info = os.fstat(file)
        if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid():
            raise ValueError("not a file of this user")
        return np.frombuffer(mmap.mmap(file, 0, prot=mmap.PROT_READ), np.uint8)
    finally:
        os.close(file)
