"""Encrypt texts that clients keep for the server. They are authenticated, and only the server's key opens them."""

from __future__ import annotations

import base64
import os
import secrets
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from jaxserve.errors import ConfigError
from jaxserve.store.directory import ENCRYPTION_KEY, TMP

MAX_TEXT_BYTES = 4 * 2**20  # of one encrypted text
_VERSION = b"\x01"
_KEY_BYTES = 32
_NONCE_BYTES = 12
_TAG_BYTES = 16
_MAX_ENCRYPTED = (len(_VERSION) + _NONCE_BYTES + MAX_TEXT_BYTES + _TAG_BYTES + 2) // 3 * 4  # characters of base64


class Encryption:
    """Encrypt and decrypt texts with one key. A text is bound to names and opens only with the same names."""

    def __init__(self, key: bytes) -> None:
        self._cipher = AESGCM(key)

    def encrypt(self, text: str, *names: str) -> str:
        """Return the encrypted text in base64; "" for a text that would be too large to open."""
        data = text.encode(errors="replace")
        if len(data) > MAX_TEXT_BYTES:
            return ""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        encrypted = self._cipher.encrypt(nonce, data, _bound(names))
        return base64.urlsafe_b64encode(_VERSION + nonce + encrypted).decode()

    def decrypt(self, encrypted: str, *names: str) -> str:
        """Return the text; "" if it was encrypted with another key or other names, or is too large."""
        if len(encrypted) > _MAX_ENCRYPTED or not encrypted.isascii():
            return ""
        try:
            data = base64.b64decode(encrypted, altchars=b"-_", validate=True)
            if data[:1] != _VERSION:
                return ""
            nonce, rest = data[1 : 1 + _NONCE_BYTES], data[1 + _NONCE_BYTES :]
            return self._cipher.decrypt(nonce, rest, _bound(names)).decode()
        except (ValueError, InvalidTag):
            return ""


def _bound(names: tuple[str, ...]) -> bytes:
    """Encode names so that different lists of names give different bytes."""
    return b"".join(b"%d:%b" % (len(name.encode()), name.encode()) for name in names)


def encryption_key(directory: Path | None) -> bytes:
    """Return the key kept in a directory, which is made there if it is missing; without a directory a new one.

    Raises ConfigError if the key cannot be read or written.
    """
    if directory is None:
        return AESGCM.generate_key(8 * _KEY_BYTES)
    path = directory / ENCRYPTION_KEY
    try:
        if not path.exists():
            _write_key(path)
        key = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"the key {path} cannot be used: {error}") from error
    if len(key) != _KEY_BYTES:
        raise ConfigError(f"the key {path} is damaged", fix="remove the file; reasoning encrypted with it is lost")
    return key


def _write_key(path: Path) -> None:
    """Write a new key under another name first: a server that stops in between leaves no damaged key."""
    new = path.parent / TMP / secrets.token_hex(12)  # removed at the next start if it stays
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(AESGCM.generate_key(8 * _KEY_BYTES))
        file.flush()
        os.fsync(file.fileno())
    new.rename(path)
