"""Texts of requests to token ids, off the event loop where they are long, and refused early where they are too long.

Encoding takes 0.7 us and 95 bytes of memory a byte of text, so a text far over the context is counted in pieces and
left where the count passes the limit.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from functools import partial

from jaxserve.api.shared.work_pool import SizedPools
from jaxserve.errors import ContextLengthError, InvalidValueError
from jaxserve.text.tokenizer import Tokenizer

INLINE_CHARS = 4096  # longer texts leave the event loop; the library releases the interpreter's lock
LONG_CHARS = 256 * 1024  # longer ones have a thread of their own: they delay no shorter one
MAX_WAITING_CHARS = 64 * 2**20  # in each of the two pools
MAX_WAITING_TEXTS = 4096

MIN_WHOLE_CHARS = 2**20  # of a text that is encoded whatever its length, for /tokenize or to be truncated: 0.7 s
WHOLE_CHARS_A_TOKEN = 64  # or so many for each token of the context, if that is more
CHARS_A_TOKEN = 8  # English has 4.5; a text of fewer than so many times the limit is encoded whole
PIECE_CHARS = 32 * 1024
CUT_TOKENS = 64  # by which a cut may raise the count of its two pieces


class TextWork(SizedPools):
    """Threads for the texts of one server's requests."""

    def __init__(self) -> None:
        threads = max(2, min(8, os.cpu_count() or 1))
        limits = {"max_jobs": MAX_WAITING_TEXTS, "max_size": MAX_WAITING_CHARS}
        super().__init__("texts", "texts", long=LONG_CHARS, threads=threads, **limits)


class TextEncoder:
    """The tokenizer of one server, at work for all its requests."""

    def __init__(self, tokenizer: Tokenizer, work: TextWork, context: int = 0) -> None:
        self.max_whole_chars = max(MIN_WHOLE_CHARS, WHOLE_CHARS_A_TOKEN * context)
        self._tokenizer = tokenizer
        self._work = work

    async def encode(
        self,
        text: str,
        *,
        add_special_tokens: bool,
        plain: bool = False,
        limit: int | None = None,
        param: str = "prompt",
    ) -> list[int]:
        """The token ids of a text. Others have a turn before it: a request may bring two thousand.

        limit: the longest that is of use. Raises ContextLengthError for a text that is seen to be longer before it is
        encoded; a result may still be longer. None: all of it is; raises InvalidValueError for more characters than
        `max_whole_chars`.
        """
        if limit is None and len(text) > self.max_whole_chars:
            message = (
                f"{param} has {len(text)} characters; a text that is tokenized whole may have {self.max_whole_chars}."
            )
            raise InvalidValueError(message, param=param)
        work = partial(self._tokenizer.encode, text, add_special_tokens=add_special_tokens, plain=plain)
        if len(text) <= INLINE_CHARS:
            await asyncio.sleep(0)
            return work()
        return await self._work.run(partial(self._encode_within, work, text, plain, limit, param), len(text))

    def _encode_within(
        self, work: Callable[[], list[int]], text: str, plain: bool, limit: int | None, param: str
    ) -> list[int]:
        if limit is not None and len(text) > CHARS_A_TOKEN * limit:
            count = self._count_to(text, plain, limit)
            if count > limit:
                raise ContextLengthError.too_long(count, limit, param=param)
        return work()

    def _count_to(self, text: str, plain: bool, limit: int) -> int:
        """No more tokens than the text has; counting ends where it is over the limit."""
        count = 0
        for start in range(0, len(text), PIECE_CHARS):
            piece = text[start : start + PIECE_CHARS]
            count += max(0, len(self._tokenizer.encode(piece, add_special_tokens=False, plain=plain)) - CUT_TOKENS)
            if count > limit:
                break
        return count
