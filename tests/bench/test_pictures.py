"""`jaxserve bench pictures`: its pictures and chats, and a report from a server that streams at once."""

import base64
import io
import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from jaxserve.bench.pictures import KINDS, TURNS, hostile_files, picture_chats, png
from jaxserve.cli import bench
from jaxserve.config import MediaSection
from jaxserve.errors import InvalidValueError
from jaxserve.media.processor import PictureSettings
from jaxserve.media.reader import PictureReader, Source

from .conftest import Handler


def pictures_of(messages: list[dict[str, Any]]) -> list[bytes]:
    """The files of a chat."""
    parts = [part for message in messages if message["role"] == "user" for part in message["content"]]
    urls = [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]
    return [base64.b64decode(url.partition(",")[2]) for url in urls]


def test_a_picture_is_a_png_of_its_size_and_seed() -> None:
    with Image.open(io.BytesIO(png(70, 50, 0))) as image:
        image.load()
        assert (image.format, image.size, image.mode) == ("PNG", (70, 50), "RGB")
    assert png(70, 50, 0) == png(70, 50, 0) != png(70, 50, 1)


def test_the_chats_of_each_kind() -> None:
    made = {kind: picture_chats(kind, 8, size=(20, 10), output_len=5) for kind in KINDS}
    sent = {
        kind: [[pictures_of(turn.messages or []) for turn in chat] for chat in chats] for kind, chats in made.items()
    }
    assert all(len(chat) == 1 for kind in ("fresh", "repeated", "hostile") for chat in made[kind])
    assert len({chat[0][0] for chat in sent["fresh"]}) == 8
    assert len({chat[0][0] for chat in sent["repeated"]}) == 1 and len(sent["repeated"]) == 8
    assert len(sent["growing"]) == 2
    for chat in sent["growing"]:
        assert [len(turn) for turn in chat] == list(range(1, TURNS + 1))
        assert all(turn == chat[-1][: len(turn)] for turn in chat), "a later turn has the pictures of the turns before"


def test_the_hostile_files_are_refused() -> None:
    settings = PictureSettings(patch_size=16, merge_size=2, min_pixels=1024, max_pixels=262_144)
    reader = PictureReader(MediaSection.model_validate({}), settings, "qwen3_vl")
    try:
        for file in hostile_files():
            with pytest.raises(InvalidValueError):
                reader.read(Source.of(file, is_base64=False), settings, "")
    finally:
        reader.stop()


def test_text_streams_run_alone_and_beside_the_pictures(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.json"
    words = ["pictures", "--base-url", url, "--kind", "growing", "--num-prompts", "8", "--size", "20x10"]
    words += ["--output-len", "3", "--streams", "2", "--seconds", "0.2", "--json", str(path)]
    Handler.prompts.clear()
    assert bench.run(words) == 0
    report = json.loads(path.read_bytes())["report"]
    assert (report["pictures"]["completed"], report["pictures"]["output_tokens"], report["refused"]) == (8, 24, 0)
    assert report["text_alone"]["completed"] and report["text_beside"]["completed"]
    assert report["p99_ratio"] and report["longest_gap_ms"] and report["encode_share"] is None
    assert sum(isinstance(prompt[0], dict) for prompt in Handler.prompts) == 8
    assert "longest gap beside" in capsys.readouterr().out


def test_a_refusal_is_counted_apart(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Handler, "refuses_pictures", True)
    path = tmp_path / "report.json"
    words = ["pictures", "--base-url", url, "--kind", "hostile", "--num-prompts", "2", "--streams", "1"]
    assert bench.run([*words, "--seconds", "0.1", "--output-len", "2", "--json", str(path)]) == 0
    report = json.loads(path.read_bytes())["report"]
    assert (report["refused"], report["pictures"]["failed"]) == (2, 0) and report["slowest_refusal"] > 0
