from pathlib import Path

import pytest

from jaxserve.store.jsonl import Line, is_utf8, read_lines


def lines(path: Path, data: bytes, limit: int = 100) -> list[Line]:
    path.write_bytes(data)
    return list(read_lines(path, limit))


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", []),
        (b"\n \r\n\t\n", []),
        (b"a", [Line(1, b"a")]),
        (b"a\nb", [Line(1, b"a"), Line(2, b"b")]),
        (b"a\r\nb\r\n", [Line(1, b"a"), Line(2, b"b")]),
        (b"\xef\xbb\xbfa\n", [Line(1, b"a")]),
        (b"\xef\xbb\xbf\n", []),
        (b"a\n\n\nb\n", [Line(1, b"a"), Line(4, b"b")]),
    ],
)
def test_lines_are_numbered_as_in_an_editor(tmp_path: Path, data: bytes, expected: list[Line]) -> None:
    assert lines(tmp_path / "f", data) == expected


@pytest.mark.parametrize("end", [b"", b"\n", b"\nnext"])
def test_a_line_over_the_limit_is_passed_over_whole(tmp_path: Path, end: bytes) -> None:
    rest = [Line(3, b"next")] if end == b"\nnext" else []
    assert lines(tmp_path / "f", b"x" * 10 + b"\n" + b"y" * 11 + end, 10) == [Line(1, b"x" * 10), Line(2, None), *rest]


def test_utf8_is_told_across_the_borders_of_pieces() -> None:
    text = ("a" * (2**20 - 1) + "é" + "𐍈" * 9).encode()
    assert is_utf8(text)
    assert not is_utf8(text[:-1])
    assert not is_utf8(b"\xff")
