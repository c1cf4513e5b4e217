"""Token ids to text as they arrive: never half a character, and the joined deltas are the whole text.

Where every token has its own bytes (byte-level and byte-fallback vocabularies: all models of today) the bytes go
through an incremental UTF-8 decoder, which is linear also for endless invalid bytes. Other decoders (WordPiece, CTC)
need the neighbours of a token; they go through the tokenizers library's DecodeStream.
"""

from __future__ import annotations

import codecs
from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

from tokenizers.decoders import DecodeStream

from jaxserve.text.tokenizer import Tokenizer

# a UTF-8 character has at most 4 bytes, so 4 tokens of context finish any character the prompt began
TAIL_TOKENS = 4


class Detokenizer(Protocol):
    """The text state of one output. Not shared between threads."""

    def push(self, token_ids: Iterable[int]) -> str:
        """Return the text these tokens complete; "" while a character is unfinished."""
        ...

    def flush(self) -> str:
        """Return the text still held at the end. A character cut in half by the end of the output is dropped."""
        ...


def make_detokenizer(
    tokenizer: Tokenizer,
    prompt_token_ids: Sequence[int] = (),
    *,
    skip_special_tokens: bool = True,
    visible_token_ids: Collection[int] = (),
) -> Detokenizer:
    """Return a detokenizer for the output that follows a prompt (only its last few ids are read).

    visible_token_ids: special tokens that are not skipped; with any, the "other" kind skips none
    """
    tail = list(prompt_token_ids[-TAIL_TOKENS:])
    if tokenizer.decoder_kind == "other":
        return StreamDetokenizer(tokenizer, tail, skip_special_tokens and not visible_token_ids)
    skipped = tokenizer.special_ids.difference(visible_token_ids) if skip_special_tokens else frozenset[int]()
    return ByteDetokenizer(tokenizer, tail, skipped)


class ByteDetokenizer:
    """Joins the tokens' bytes and decodes them as UTF-8; bytes that no character has become U+FFFD."""

    def __init__(self, tokenizer: Tokenizer, tail: Sequence[int], skipped: frozenset[int]) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._skip = skipped
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        # A sentencepiece text does not begin with the space that its first token carries.
        first = all(i in tokenizer.special_ids for i in tail)
        self._strip_first = tokenizer.decoder_kind == "byte_fallback" and tokenizer.strips_first_space and first
        self._decoder.decode(b"".join([self._token_bytes(i) for i in tail]))
        self._begun = self._decoder.getstate()[0]  # of a character that the prompt has not finished

    def push(self, token_ids: Iterable[int]) -> str:
        """Return the text that the tokens complete. The bytes of a character that is not complete are kept."""
        data = b"".join([self._token_bytes(i) for i in token_ids if i not in self._skip])
        if self._strip_first and data:
            self._strip_first = False
            data = data.removeprefix(b" ")
        if self._begun and data:
            if not _goes_on(self._begun, data[:1]):
                self._decoder.reset()  # the half character is the prompt's
            self._begun = b""
        return self._decoder.decode(data)

    def flush(self) -> str:
        self._decoder.reset()
        return ""


def _goes_on(begun: bytes, byte: bytes) -> bool:
    """Return whether a byte belongs to the UTF-8 character that has begun."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(begun + byte)
    except UnicodeDecodeError:
        return False
    return True


class StreamDetokenizer:
    """Decodes with DecodeStream of the tokenizers library, which decodes a short window again with each token."""

    def __init__(self, tokenizer: Tokenizer, tail: Sequence[int], skip_special_tokens: bool) -> None:
        self._backend, self._skip = tokenizer.backend, skip_special_tokens
        self._stream = DecodeStream(ids=list(tail), skip_special_tokens=skip_special_tokens)

    def push(self, token_ids: Iterable[int]) -> str:
        return "".join([self._step(i) for i in token_ids])

    def flush(self) -> str:
        return ""

    def _step(self, token_id: int) -> str:
        try:
            return self._stream.step(self._backend, token_id) or ""
        except Exception:  # the library's, bare: the text before changed with the token after it
            self._stream = DecodeStream(ids=[token_id], skip_special_tokens=self._skip)
            return self._backend.decode([token_id], skip_special_tokens=self._skip)
