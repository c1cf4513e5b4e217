"""The messages between the server and its picture worker. The server imports them without Pillow."""

from __future__ import annotations

import msgspec

from jaxserve.media.processor import PictureSettings


class PictureSetup(msgspec.Struct):
    """The limits of the worker.

    cpu_seconds: for one picture. memory_bytes: of the process. max_bytes, max_pixels: of an encoded picture
    """

    cpu_seconds: float
    memory_bytes: int
    max_bytes: int
    max_pixels: int


class PictureQuestion(msgspec.Struct):
    """A picture as the client sent it, and what is asked of it.

    settings: how to cut it into patches; None: only its size is asked for
    """

    data: bytes
    is_base64: bool
    settings: PictureSettings | None = None


class PictureAnswer(msgspec.Struct):
    """The upright size of a picture in pixels, and its patches, as in `Picture`; or why it cannot be read."""

    height: int = 0
    width: int = 0
    patches: bytes = b""
    error: str | None = None
