"""The program that measures a fleet's sizes, at small ones: each section runs and says what it is named for."""

from pathlib import Path

import pytest

from benchmarks import scale


def lines_of(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    scale.main(words)
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(
    ("words", "labels"),
    [
        (
            ("index", "--pages", "2000", "--replicas", "70"),
            ["index: 2000 pages of 70 replicas", "index: a replica dies"],
        ),
        (("tree", "--tree-pages", "600"), ["pool: 600 pages", "tree: a collection of garbage"]),
        (("queue", "--waiting", "1200"), ["queue: 1200 requests wait", "queue: an abort"]),
    ],
)
def test_a_section(capsys: pytest.CaptureFixture[str], words: tuple[str, ...], labels: list[str]) -> None:
    lines = lines_of(capsys, *words)
    assert [lines[0][: len(labels[0])], lines[-1][: len(labels[1])]] == labels


def test_the_store_ends_its_batches(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    lines = lines_of(capsys, "store", "--lines", "150", "--directory", str(tmp_path))
    assert lines[0].startswith("store: 150 lines in 1 batches") and len(lines) == 9
    assert not list(tmp_path.iterdir()), "the store is removed"


def test_an_unknown_section_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        scale.main(["stores"])
    assert "unknown: stores" in capsys.readouterr().err
