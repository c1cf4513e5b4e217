"""Namespaces of the prefix cache, and keys of a prompt's pages, by which engines and router name cached prefixes.

Requests share cached pages only within a namespace: of an adapter, and of the salt and the key that clients give.

The key of a page is a digest of the namespace and of all tokens up to the page's end. So one key names a whole prefix,
and no tokens are sent. Two prefixes with the same key, one in 2**64, cost a wrong choice of the router and no more.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from hashlib import blake2b

import msgspec

from jaxserve.types.picture import Picture

KEY_BYTES = 8
TOKEN_BYTES = 4  # a token is an int32


class PageEvents(msgspec.Struct, frozen=True, array_like=True):
    """The changes of an engine's prefix cache. Keys are joined; a key is in at most one of the two."""

    added: bytes = b""
    removed: bytes = b""


def salt_of(cache_salt: str | None, extra_key: str | None) -> str:
    """Join the two fields by which clients keep their cached prefixes apart. Pairs that differ have different salts."""
    if not (cache_salt and extra_key):
        return f":{cache_salt or extra_key}" if cache_salt or extra_key else ""
    return f"{len(cache_salt)}:{cache_salt}{extra_key}"


def namespace_of(adapter: str, salt: str) -> str:
    """Return the namespace for the digest of an adapter, "" for none, and a salt.

    Clients choose salts, so one may look like the namespace of an adapter.
    """
    return f"{adapter}\0{salt}" if adapter or "\0" in salt else salt


def root_key(namespace: str) -> bytes:
    """Return the key that stands before the first page of a namespace."""
    return blake2b(namespace.encode(), digest_size=KEY_BYTES, person=b"namespace").digest()


def next_key(parent: bytes, tokens: bytes) -> bytes:
    """Return the key of a page. parent: key of the page before it. tokens: int32, little-endian"""
    return blake2b(parent + tokens, digest_size=KEY_BYTES).digest()


def with_pictures(prompt: Sequence[int], pictures: Sequence[Picture], page_size: int) -> list[int]:
    """Return a prompt's tokens as the prefix cache knows them: each page that a picture overlaps names the picture.

    In each such page the picture's first placeholder becomes a negative number of its whole digest and of the page's
    place in the picture. So pages are equal only if their pictures are. No token is negative.
    """
    found = list(prompt)
    for picture in pictures:
        number = int.from_bytes(picture.digest, "big")
        later = range((picture.start // page_size + 1) * page_size, picture.end, page_size)
        for position in (picture.start, *later):
            found[position] = -1 - (number << 32 | position - picture.start)
    return found


_PICTURE_BYTES = 40  # a digest, 4 bytes of a place, and the sign


def token_bytes(tokens: Sequence[int]) -> bytes:
    """Return the tokens of a page as bytes, int32, little-endian; the numbers of pictures follow them.

    Different pages have different bytes: a page with pictures is longer than one without, and says where they are.
    """
    try:
        return array("i", tokens).tobytes()
    except OverflowError:
        pass
    narrow = array("i", [max(token, -1) for token in tokens]).tobytes()
    return narrow + b"".join(token.to_bytes(_PICTURE_BYTES, "little", signed=True) for token in tokens if token < 0)


def page_keys(namespace: str, prompt: bytes, page_size: int) -> Iterator[bytes]:
    """Yield the keys of the full pages of a prompt, each computed when it is asked for.

    prompt: token ids, int32, little-endian. page_size: tokens
    """
    key, size = root_key(namespace), page_size * TOKEN_BYTES
    for begin in range(0, len(prompt) - size + 1, size):
        key = next_key(key, prompt[begin : begin + size])
        yield key


def split_keys(joined: bytes) -> Iterator[bytes]:
    """Yield the keys that were joined."""
    for begin in range(0, len(joined), KEY_BYTES):
        yield joined[begin : begin + KEY_BYTES]
