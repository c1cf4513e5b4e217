"""Encrypted texts open with the same key and names, and with nothing else; the key outlives the server."""

import asyncio
from pathlib import Path

import pytest

from jaxserve.api.encryption import MAX_TEXT_BYTES, Encryption, encryption_key
from jaxserve.errors import ConfigError
from jaxserve.store import Store
from jaxserve.store.directory import ENCRYPTION_KEY, remove


def test_an_encrypted_text_opens_only_with_its_key_and_names() -> None:
    encryption, other = Encryption(encryption_key(None)), Encryption(encryption_key(None))
    for text in ("", "Hm, é \U0001f600", "x" * MAX_TEXT_BYTES):
        encrypted = encryption.encrypt(text, "model", "ab")
        assert encryption.decrypt(encrypted, "model", "ab") == text
        assert not text or text not in encrypted
        assert encrypted != encryption.encrypt(text, "model", "ab")
    encrypted = encryption.encrypt("thought", "model", "ab")
    assert not other.decrypt(encrypted, "model", "ab")
    for names in (("model",), ("model", "abc"), ("modela", "b"), ("", "modelab")):
        assert not encryption.decrypt(encrypted, *names)


def test_what_does_not_open_is_no_error() -> None:
    encryption = Encryption(encryption_key(None))
    encrypted = encryption.encrypt("thought", "m")
    for place in range(len(encrypted)):
        changed = encrypted[:place] + ("A" if encrypted[place] != "A" else "B") + encrypted[place + 1 :]
        assert encryption.decrypt(changed, "m") == ""
    changes = (encrypted[:-4], encrypted[:20], encrypted + "AAAA", encrypted + "\n")
    for wrong in ("", "A", "é", "gAAAA", *changes, "\ud800"):
        assert encryption.decrypt(wrong, "m") == ""


def test_large_texts_are_neither_encrypted_nor_decoded() -> None:
    encryption = Encryption(encryption_key(None))
    assert encryption.encrypt("x" * (MAX_TEXT_BYTES + 1)) == ""
    assert encryption.decrypt("A" * 2 * MAX_TEXT_BYTES) == ""


def test_the_key_is_kept_in_the_store(tmp_path: Path) -> None:
    directory = tmp_path / "store"
    asyncio.run(Store(directory).close())
    key = encryption_key(directory)
    path = directory / ENCRYPTION_KEY
    assert len(key) == 32 and path.stat().st_mode & 0o777 == 0o600
    assert encryption_key(directory) == key != encryption_key(None)
    path.write_bytes(b"short")
    with pytest.raises(ConfigError, match="damaged"):
        encryption_key(directory)
    path.unlink()
    path.mkdir()
    with pytest.raises(ConfigError, match="cannot be used"):
        encryption_key(directory)
    path.rmdir()
    encryption_key(directory)
    remove(directory)
    assert not directory.exists()
