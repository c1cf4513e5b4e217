import pytest

from jaxserve.api.http.body import MAX_FIELD_BYTES, MAX_PARTS, UploadForm
from jaxserve.errors import InvalidValueError

TYPE = 'multipart/form-data; boundary="XX"'


def part(name: str, data: bytes, filename: str | None = None) -> bytes:
    extra = "" if filename is None else f'; filename="{filename}"'
    return f'--XX\r\nContent-Disposition: form-data; name="{name}"{extra}\r\n\r\n'.encode() + data + b"\r\n"


END = b"--XX--\r\n"


@pytest.mark.parametrize("piece", [1, 2, 7, 10_000])
def test_the_same_form_in_any_pieces(piece: int) -> None:
    data = b"line\r\n--X\r\n--XY\r\n" * 20
    body = part("purpose", b"batch") + part("file", data, "a b.jsonl") + part("x[y]", "é".encode()) + END
    form = UploadForm(TYPE)
    passed = b"".join(form.feed(body[start : start + piece]) for start in range(0, len(body), piece))
    assert (passed, form.filename, form.fields) == (data, "a b.jsonl", {"purpose": "batch", "x[y]": "é"})
    assert form.complete


@pytest.mark.parametrize("given", ["filename*=utf-8''%C3%A9%20b.jsonl", "filename*=\"UTF-8'en'%C3%A9%20b.jsonl\""])
def test_a_name_in_the_encoded_form_alone_is_the_files_name(given: str) -> None:
    form = UploadForm(TYPE)
    form.feed(f'--XX\r\nContent-Disposition: form-data; name="file"; {given}\r\n\r\nx\r\n'.encode() + END)
    assert form.filename == "é b.jsonl"
    both = UploadForm(TYPE)
    both.feed(f'--XX\r\nContent-Disposition: form-data; name="file"; filename="a"; {given}\r\n\r\n'.encode())
    assert both.filename == "a"


def test_a_body_that_ends_early_is_not_complete() -> None:
    form = UploadForm(TYPE)
    assert form.feed(part("file", b"abc", "a")[:-2]) == b"abc"
    assert not form.complete


@pytest.mark.parametrize(
    "kind",
    ["", "application/json", "multipart/form-data", "multipart/mixed; boundary=XX",
     "multipart/form-data; boundary=" + "x" * 30_000],
)  # fmt: skip
def test_other_content_types_are_refused(kind: str) -> None:
    with pytest.raises(InvalidValueError):
        UploadForm(kind)


@pytest.mark.parametrize(
    "body",
    [
        b"nonsense" * 10,
        part("file", b"1", "a") + part("file", b"2", "b"),
        b"--XX\r\nContent-Type: text/plain\r\n\r\nx\r\n",
        part("purpose", b"x" * (MAX_FIELD_BYTES + 1)),
        part("a", b"1") * (MAX_PARTS + 1),
        b"--XX\r\nX: " + b"y" * (MAX_FIELD_BYTES + 1),
    ],
)
def test_other_bodies_are_refused(body: bytes) -> None:
    form = UploadForm(TYPE)
    with pytest.raises(InvalidValueError):
        form.feed(body + END)
