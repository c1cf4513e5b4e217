"""Sealed texts open with the same key and names, and with nothing else; the key outlives the server."""

import asyncio
from pathlib import Path

import pytest

from jaxserve.api.sealing import MAX_TEXT_BYTES, Seal, sealing_key
from jaxserve.errors import ConfigError
from jaxserve.store import Store
from jaxserve.store.directory import SEALING_KEY, remove


def test_a_sealed_text_opens_only_as_it_was_sealed() -> None:
    seal, other = Seal(sealing_key(None)), Seal(sealing_key(None))
    for text in ("", "Hm, é \U0001f600", "x" * MAX_TEXT_BYTES):
        sealed = seal.seal(text, "model", "ab")
        assert seal.open(sealed, "model", "ab") == text
        assert not text or text not in sealed
        assert sealed != seal.seal(text, "model", "ab")
    sealed = seal.seal("thought", "model", "ab")
    assert not other.open(sealed, "model", "ab")
    for names in (("model",), ("model", "abc"), ("modela", "b"), ("", "modelab")):
        assert not seal.open(sealed, *names)


def test_what_does_not_open_is_no_error() -> None:
    seal = Seal(sealing_key(None))
    sealed = seal.seal("thought", "m")
    for place in range(len(sealed)):
        changed = sealed[:place] + ("A" if sealed[place] != "A" else "B") + sealed[place + 1 :]
        assert seal.open(changed, "m") == ""
    for wrong in ("", "A", "é", "gAAAA", sealed[:-4], sealed[:20], sealed + "AAAA", sealed + "\n", "\ud800"):
        assert seal.open(wrong, "m") == ""


def test_large_texts_are_neither_sealed_nor_decoded() -> None:
    seal = Seal(sealing_key(None))
    assert seal.seal("x" * (MAX_TEXT_BYTES + 1)) == ""
    assert seal.open("A" * 2 * MAX_TEXT_BYTES) == ""


def test_the_key_is_kept_in_the_store(tmp_path: Path) -> None:
    directory = tmp_path / "store"
    asyncio.run(Store(directory).close())
    key = sealing_key(directory)
    path = directory / SEALING_KEY
    assert len(key) == 32 and path.stat().st_mode & 0o777 == 0o600
    assert sealing_key(directory) == key != sealing_key(None)
    path.write_bytes(b"short")
    with pytest.raises(ConfigError, match="damaged"):
        sealing_key(directory)
    path.unlink()
    path.mkdir()
    with pytest.raises(ConfigError, match="cannot be used"):
        sealing_key(directory)
    path.rmdir()
    sealing_key(directory)
    remove(directory)
    assert not directory.exists()
