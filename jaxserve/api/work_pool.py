"""Tokenize long texts in threads, outside the event loop, and refuse texts early that are too long.

A pool limits the work that waits for it. It is separate from asyncio's own pool, so that long texts do not delay files,
batches and the store. Encoding takes 0.7 us and 95 bytes of memory per byte of text. A text far over the limit is
therefore encoded in pieces, and encoding stops once the count exceeds the limit.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

from jaxserve.errors import ContextLengthError, InvalidValueError, QueueFullError
from jaxserve.text.tokenizer import Tokenizer

T = TypeVar("T")


class Waiting:
    """Count the jobs in progress, waiting or running, and their sizes."""

    def __init__(self, what: str, max_jobs: int, max_size: int) -> None:
        self.jobs = 0
        self.size = 0
        self._what = what
        self._max_jobs = max_jobs
        self._max_size = max_size
        self._lock = threading.Lock()  # a job leaves in the thread that ran it

    def enter(self, size: int) -> None:
        """Count a job. A single job is accepted whatever its size. Raises QueueFullError if it exceeds a limit."""
        with self._lock:
            if self.jobs and (self.jobs >= self._max_jobs or self.size + size > self._max_size):
                raise QueueFullError(f"Too many {self._what} wait for a thread.")
            self.jobs += 1
            self.size += size

    @contextmanager
    def held(self, size: int) -> Iterator[None]:
        """Count work that another pool runs. Raises QueueFullError if it exceeds a limit."""
        self.enter(size)
        try:
            yield
        finally:
            self.leave(size)

    def leave(self, size: int) -> None:
        with self._lock:
            self.jobs -= 1
            self.size -= size


class WorkPool:
    """A lazily started thread pool.

    threads: number of threads, started at the first job
    max_size: limit on the sum of sizes in progress
    """

    def __init__(self, name: str, what: str, *, threads: int, max_jobs: int, max_size: int) -> None:
        self.waiting = Waiting(what, max_jobs, max_size)
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix=name)

    async def run(self, work: Callable[[], T], size: int) -> T:
        """Run `work` in a thread and return its result. Raises QueueFullError if too much waits.

        Work that has begun counts until its end, even if its caller no longer waits.
        """
        self.waiting.enter(size)
        try:
            future = self._executor.submit(work)
        except BaseException:
            self.waiting.leave(size)
            raise
        future.add_done_callback(lambda _: self.waiting.leave(size))
        return await asyncio.wrap_future(future)

    def stop(self) -> None:
        """Accept no more work and drop what has not begun."""
        self._executor.shutdown(wait=False, cancel_futures=True)


class SizedPools:
    """Two pools for one kind of work. Work larger than `long` has a thread of its own, so it delays no smaller work.

    threads: threads of the pool for smaller work. max_jobs, max_size: limits of each pool
    """

    def __init__(self, name: str, what: str, *, long: int, threads: int, max_jobs: int, max_size: int) -> None:
        self.short = WorkPool(name, what, threads=threads, max_jobs=max_jobs, max_size=max_size)
        self.long = WorkPool(f"long-{name}", f"long {what}", threads=1, max_jobs=max_jobs, max_size=max_size)
        self._long = long

    async def run(self, work: Callable[[], T], size: int) -> T:
        """Run `work` in a thread and return its result. Raises QueueFullError if too much waits."""
        return await (self.long if size > self._long else self.short).run(work, size)

    def stop(self) -> None:
        self.short.stop()
        self.long.stop()


INLINE_CHARS = 4096  # longer texts are encoded in a thread; the library releases the GIL
LONG_CHARS = 256 * 1024  # longer ones have a thread of their own: they delay no shorter one
MAX_WAITING_CHARS = 64 * 2**20  # characters that wait for each of the two pools
MAX_WAITING_TEXTS = 4096

MIN_WHOLE_CHARS = 2**20  # a text encoded whole whatever its length, for /tokenize or truncation: 0.7 s
WHOLE_CHARS_A_TOKEN = 64  # or this many per token of context, if that is more
# English has 4.5 characters per token; a text under this many per token of the limit is encoded whole
CHARS_A_TOKEN = 8
PIECE_CHARS = 32 * 1024
CUT_TOKENS = 64  # tokens that cutting a text in two may add


class TextWork(SizedPools):
    """The threads that tokenize the texts of one server."""

    def __init__(self) -> None:
        threads = max(2, min(8, os.cpu_count() or 1))
        limits = {"max_jobs": MAX_WAITING_TEXTS, "max_size": MAX_WAITING_CHARS}
        super().__init__("texts", "texts", long=LONG_CHARS, threads=threads, **limits)


class TextEncoder:
    """Tokenizes the texts of one server's requests: short ones at once, long ones in the threads of `work`.

    context: context length in tokens; it sets `max_whole_chars`
    """

    def __init__(self, tokenizer: Tokenizer, work: TextWork, context: int = 0) -> None:
        self.max_whole_chars = max(MIN_WHOLE_CHARS, WHOLE_CHARS_A_TOKEN * context)
        self._tokenizer = tokenizer
        self._work = work
        self._context = context

    async def encode(
        self,
        text: str,
        *,
        add_special_tokens: bool,
        plain: bool = False,
        limit: int | None = None,
        param: str = "prompt",
    ) -> list[int]:
        """Tokenize one text. Yields to the event loop first, because one request may hold 2,000 texts.

        limit: number of tokens of the longest text that is accepted. A result may be longer. None: encode it whole.
        Raises ContextLengthError if the text is found to exceed `limit` before it is fully encoded.
        Raises InvalidValueError if `limit` is None and the text has more than `max_whole_chars` characters.
        """
        if limit is None:
            self.check_whole(text, param)
        work = partial(self._tokenizer.encode, text, add_special_tokens=add_special_tokens, plain=plain)
        if len(text) > INLINE_CHARS:
            work = partial(self._encode_within, work, text, plain, limit, param)
        return await self.run(work, len(text))

    async def run(self, work: Callable[[], T], chars: int) -> T:
        """Run work on a text of `chars` characters, outside the event loop if it is long."""
        if chars > INLINE_CHARS:
            return await self._work.run(work, chars)
        await asyncio.sleep(0)
        return work()

    def check_whole(self, text: str, param: str) -> None:
        """Raise InvalidValueError if a text is too long to be tokenized whole."""
        if len(text) > self.max_whole_chars:
            message = (
                f"{param} has {len(text)} characters; a text that is tokenized whole may have {self.max_whole_chars}."
            )
            raise InvalidValueError(message, param=param)

    def _encode_within(
        self, work: Callable[[], list[int]], text: str, plain: bool, limit: int | None, param: str
    ) -> list[int]:
        if limit is not None and len(text) > CHARS_A_TOKEN * limit:
            count = self._count_to(text, plain, limit)
            if count > limit:
                raise ContextLengthError.too_long(count, limit, context=self._context, param=param)
        return work()

    def _count_to(self, text: str, plain: bool, limit: int) -> int:
        """Return a lower bound of the text's token count. Counting stops once it exceeds the limit."""
        count = 0
        for start in range(0, len(text), PIECE_CHARS):
            piece = text[start : start + PIECE_CHARS]
            count += max(0, len(self._tokenizer.encode(piece, add_special_tokens=False, plain=plain)) - CUT_TOKENS)
            if count > limit:
                break
        return count


class TokenTexts:
    """Cache of the text and bytes of single tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    @property
    def special_ids(self) -> frozenset[int]:
        """The special tokens, which a text leaves out unless it is asked for them."""
        return self._tokenizer.special_ids

    def text(self, token_id: int) -> str:
        """Decode the token's bytes; an incomplete character becomes U+FFFD."""
        found = self._texts.get(token_id)
        if found is None:
            found = self._texts[token_id] = self._tokenizer.token_bytes(token_id).decode("utf-8", "replace")
        return found

    def bytes(self, token_id: int) -> list[int]:
        return list(self._tokenizer.token_bytes(token_id))

    def name(self, token_id: int, as_id: bool) -> str:
        return f"token_id:{token_id}" if as_id else self.text(token_id)
