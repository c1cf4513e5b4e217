"""Pictures for one server: read in worker processes, and kept by content, so that a repeated one is decoded once.

An agent sends the pictures of its conversation again with every turn. The key of a picture is the SHA-256 of the bytes
that the client sent, its namespace and the processor's settings. The namespace is part of it because a client would
otherwise learn from the time of an answer which pictures others have sent.

    reader = PictureReader(section, settings, kind)
    height, width = reader.size(source)                  # from the header. These block: call them from a thread
    picture = reader.read(source, settings, namespace)
"""

from __future__ import annotations

import hashlib
import logging
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec

from jaxserve.config import MediaSection
from jaxserve.errors import ConfigError, InvalidValueError, MediaMemoryError, ServerError
from jaxserve.media.frames import PictureAnswer, PictureQuestion, PictureSetup
from jaxserve.media.processor import CHANNELS, PictureSettings
from jaxserve.transport.child_process import ChildEnded, ChildProcess

CPU_SECONDS = 5.0  # of a picture; 40 M pixels of a PNG take 2.2 s
MEMORY_BYTES = 1 << 30  # 40 M pixels of a PNG with alpha take 910 MB
LONG_BYTES = 1 << 20  # longer sources have a worker of their own, so that a photo delays no icon
MAX_SIZES = 4096  # sizes that are kept: 100 bytes each

_ANSWER = msgspec.msgpack.Decoder(PictureAnswer)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Source:
    """A picture as a client sent it: as bytes, or as base64 in ASCII. key: SHA-256 of `data` and its form"""

    data: bytes
    is_base64: bool
    key: bytes

    @classmethod
    def of(cls, data: bytes, *, is_base64: bool) -> Source:
        return cls(data, is_base64, hashlib.sha256(bytes([is_base64]) + data).digest())


class ReadPicture:
    """A picture that was read. Its fields are fields of `Picture`, which also has the place in a prompt."""

    def __init__(self, patches: bytes, grid: tuple[int, int, int], num_tokens: int, digest: bytes) -> None:
        self.patches = patches
        self.grid = grid
        self.num_tokens = num_tokens
        self.digest = digest


class PictureProcess(ChildProcess):
    """A worker that reads pictures."""

    def __init__(self, setup: PictureSetup, on_end: Callable[[], object]) -> None:
        super().__init__("jaxserve.media.worker", msgspec.msgpack.encode(setup))
        self._on_end = on_end

    def answer(self, asked: PictureQuestion) -> PictureAnswer:
        """Return the answer of the worker. Raises InvalidValueError if the picture cannot be read within the limits."""
        try:
            answer = _ANSWER.decode(self.ask(msgspec.msgpack.encode(asked)))
        except ConfigError as error:
            logger.error("the picture worker does not start: %s", error)
            raise ServerError("Images cannot be read now; the server's log says why.") from error
        except (ChildEnded, msgspec.MsgspecError):
            if self.is_stopped:
                raise ServerError("the server stops") from None
            self._on_end()
            raise InvalidValueError("The image takes too long or too much memory to decode.") from None
        if answer.error is not None:
            raise InvalidValueError(answer.error)
        return answer


class PictureMemory:
    """The bytes of all pictures that requests hold or that are kept for later ones. Safe to use from several threads.

    max_bytes: limit of all of them. max_kept: limit of those that are kept for later requests; beyond, the least
    recently used ones are dropped
    held: bytes of all of them now
    """

    def __init__(self, max_bytes: int, max_kept: int) -> None:
        self.held = 0
        self._max_bytes = max_bytes
        self._max_kept = min(max_kept, max_bytes)
        self._kept: OrderedDict[bytes, ReadPicture] = OrderedDict()
        self._kept_bytes = 0
        self._lock = threading.RLock()  # a finalizer may run while this thread has the lock

    def get(self, key: bytes) -> ReadPicture | None:
        """Return a picture that was kept, which is then the most recently used one."""
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
            return found

    @contextmanager
    def reserved(self, size: int) -> Iterator[None]:
        """Count `size` bytes while a picture is read. Raises MediaMemoryError if requests hold too much."""
        with self._lock:
            while self._kept and self.held + size > self._max_bytes:
                self._drop_oldest()
            if self.held + size > self._max_bytes:
                raise MediaMemoryError("The images of running requests fill the server's memory for images; try again.")
            self.held += size
        try:
            yield
        finally:
            self._release(size)

    def add(self, key: bytes, picture: ReadPicture) -> None:
        """Count a picture until nothing refers to it, and keep it."""
        size = len(picture.patches)
        with self._lock:
            self.held += size
            weakref.finalize(picture, self._release, size).atexit = False
            if key in self._kept or size > self._max_kept:
                return
            self._kept[key] = picture
            self._kept_bytes += size
            while self._kept_bytes > self._max_kept:
                self._drop_oldest()

    def _drop_oldest(self) -> None:
        _, picture = self._kept.popitem(last=False)
        self._kept_bytes -= len(picture.patches)

    def _release(self, size: int) -> None:
        with self._lock:
            self.held -= size


class PictureReader:
    """Reads the pictures of a server's requests.

    section: its limits. settings: the processor's. kind: the processor's name, a part of every digest
    on_hit, on_end: called when a picture was found in memory, and when a picture ended its worker
    """

    def __init__(
        self,
        section: MediaSection,
        settings: PictureSettings,
        kind: str,
        *,
        on_hit: Callable[[], object] = lambda: None,
        on_end: Callable[[], object] = lambda: None,
    ) -> None:
        self.section = section
        self.settings = settings
        self.memory = PictureMemory(section.memory, section.cache)
        self._kind = kind
        self._on_hit = on_hit
        setup = PictureSetup(CPU_SECONDS, MEMORY_BYTES, section.max_bytes, section.max_pixels)
        self._process = PictureProcess(setup, on_end)
        self._long_process = PictureProcess(setup, on_end)
        self._sizes: OrderedDict[bytes, tuple[int, int]] = OrderedDict()
        self._lock = threading.Lock()

    def size(self, source: Source) -> tuple[int, int]:
        """Return height and width of a picture, upright. Blocks. Raises InvalidValueError if it cannot be read."""
        with self._lock:
            found = self._sizes.get(source.key)
        if found is None:
            answer = self._ask(source, None)
            found = answer.height, answer.width
            with self._lock:
                self._sizes[source.key] = found
                if len(self._sizes) > MAX_SIZES:
                    self._sizes.popitem(last=False)
        return found

    def read(self, source: Source, settings: PictureSettings, namespace: str) -> ReadPicture:
        """Return a picture, read now or earlier. Blocks.

        Raises InvalidValueError if it cannot be read, MediaMemoryError if requests hold too many pictures.
        """
        numbers = msgspec.json.encode([self._kind, settings, namespace])
        key = hashlib.sha256(source.key + numbers).digest()
        if (found := self.memory.get(key)) is not None:
            self._on_hit()
            return found
        height, width = self.size(source)
        tokens = settings.num_tokens(height, width)
        with self.memory.reserved(tokens * settings.factor**2 * CHANNELS):
            answer = self._ask(source, settings)
            grid = settings.grid(answer.height, answer.width)
            digest = hashlib.sha256(answer.patches + msgspec.json.encode([self._kind, grid, settings])).digest()
            picture = ReadPicture(answer.patches, grid, tokens, digest)
        self.memory.add(key, picture)
        return picture

    def stop(self) -> None:
        """End the workers. A picture that is being read is an error of its request."""
        self._process.stop()
        self._long_process.stop()

    def _ask(self, source: Source, settings: PictureSettings | None) -> PictureAnswer:
        process = self._long_process if len(source.data) > LONG_BYTES else self._process
        return process.answer(PictureQuestion(source.data, source.is_base64, settings))
