import json
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from jaxserve.store import BatchError, Validation, Validator
from jaxserve.store.validation import MAX_FILE_ERRORS

ENDPOINT = "/v1/chat/completions"


def line(number: int = 1, **changes: Any) -> dict[str, Any]:
    messages = [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": f"Question {number}"},
    ]
    body = {"model": "demo", "messages": messages, "max_tokens": 8}
    return {"custom_id": f"r{number}", "method": "POST", "url": ENDPOINT, "body": body} | changes


def dumps(*rows: Any) -> bytes:
    return b"".join((row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n" for row in rows)


def validate(path: Path, data: bytes, *, max_line_bytes: int = 2**20, max_lines: int = 50_000) -> Validation:
    path.write_bytes(data)
    return Validator(ENDPOINT, lambda name: name == "demo", max_line_bytes, max_lines).run(path)


def codes(found: Validation) -> list[tuple[str, str | None, int | None]]:
    return [(error.code, error.param, error.line) for error in found.errors]


def test_a_good_file(tmp_path: Path) -> None:
    data = dumps(line(1), line(2, url="/chat/completions"), b"", line(3))
    assert validate(tmp_path / "f", data) == Validation(3, "demo", ())


def test_the_model_may_be_left_out_as_it_may_online(tmp_path: Path) -> None:
    assert validate(tmp_path / "f", dumps(line(1, body={}), line(2, body={}))) == Validation(2, None, ())


@pytest.mark.parametrize("wrap", [lambda d: b"\xef\xbb\xbf" + d, lambda d: d.replace(b"\n", b"\r\n"), bytes.rstrip])
def test_bom_crlf_and_a_missing_last_newline_are_accepted(tmp_path: Path, wrap: Any) -> None:
    assert validate(tmp_path / "f", wrap(dumps(line(1), line(2)))) == Validation(2, "demo", ())


@pytest.mark.parametrize("data", [b"", b"\n\n", b"\xef\xbb\xbf"])
def test_no_requests(tmp_path: Path, data: bytes) -> None:
    assert codes(validate(tmp_path / "f", data)) == [("empty_file", None, None)]


@pytest.mark.parametrize(
    ("bad", "code", "param"),
    [
        (b"{", "invalid_json_line", None),
        (b"nonsense", "invalid_json_line", None),
        (json.dumps(line(2, body={"x": float("nan")})).encode(), "invalid_json_line", None),
        (json.dumps(line(2, body={"x": float("inf")})).encode(), "invalid_json_line", None),
        (b"\xff", "invalid_json_line", None),
        (json.dumps(line(2)).replace("Question", "\xff").encode("latin-1"), "invalid_json_line", None),
        (b'{"custom_id": "x", "body": ' + b"[" * 100_000, "invalid_json_line", None),
        ([], "invalid_request", None),
        ({"custom_id": "x"}, "invalid_request", "method"),
        (line(2, custom_id=7), "invalid_request", "custom_id"),
        (line(2, custom_id=""), "invalid_request", "custom_id"),
        (line(2, body=[1]), "invalid_request", "body"),
        (line(2, body={"model": 3}), "invalid_request", "body.model"),
        (line(2, method="GET"), "invalid_method", "method"),
        (line(2, url="/v1/embeddings"), "url_mismatch", "url"),
        (line(1), "duplicate_custom_id", "custom_id"),
        (line(2, body={"model": "other"}), "model_mismatch", "body.model"),
        (line(2, body={"model": None}), "model_mismatch", "body.model"),
        (line(2, body={"model": "demo", "stream": True}), "unsupported_parameter", "body.stream"),
        (line(2, body={"model": "demo", "background": True}), "unsupported_parameter", "body.background"),
        (line(2, body={"model": "demo", "conversation": "conv_1"}), "unsupported_parameter", "body.conversation"),
        (line(2, body={"model": "demo", "text": "x" * 5000}), "request_too_large", None),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, bad: Any, code: str, param: str | None) -> None:
    limit = 200_000 if isinstance(bad, bytes) else 4000
    found = validate(tmp_path / "f", dumps(line(1), b"", bad, line(9)), max_line_bytes=limit)
    assert codes(found) == [(code, param, 3)]


def test_an_unknown_model_is_reported_once(tmp_path: Path) -> None:
    found = validate(tmp_path / "f", dumps(*(line(i, body={"model": "other"}) for i in range(9))))
    assert codes(found) == [("model_not_found", "body.model", 1)]


def test_the_first_and_the_last_line_of_a_full_file(tmp_path: Path) -> None:
    found = validate(tmp_path / "f", dumps(b"{", *(line(i) for i in range(2, 50_000)), b"]"))
    assert codes(found) == [("invalid_json_line", None, 1), ("invalid_json_line", None, 50_000)]


def test_the_number_of_lines(tmp_path: Path) -> None:
    assert not validate(tmp_path / "f", dumps(*(line(i) for i in range(10))), max_lines=10).errors
    found = validate(tmp_path / "f", dumps(b"{", *(line(i) for i in range(10))), max_lines=10)
    assert found.errors == (BatchError("too_many_tasks", "The file has more than 10 requests."),)


def test_errors_are_bounded(tmp_path: Path) -> None:
    assert len(validate(tmp_path / "f", b"{\n" * 1000).errors) == MAX_FILE_ERRORS


def test_speed_and_memory_of_a_full_file(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(dumps(*(line(i) for i in range(50_000))))
    started = time.thread_time()
    found = Validator(ENDPOINT, lambda name: True, 2**20).run(tmp_path / "f")
    assert found.total / (time.thread_time() - started) > 20_000
    tracemalloc.start()
    try:
        assert Validator(ENDPOINT, lambda name: True, 2**20).run(tmp_path / "f").total == 50_000
        assert tracemalloc.get_traced_memory()[1] < 20 * 2**20
    finally:
        tracemalloc.stop()


def test_one_line_of_100_mb_is_not_held(tmp_path: Path) -> None:
    with open(tmp_path / "f", "wb") as file:
        file.write(dumps(line(1)))
        file.seek(100 * 2**20)
        file.write(b"\n" + dumps(line(2)))
    tracemalloc.start()
    try:
        found = Validator(ENDPOINT, lambda name: True, 2**20).run(tmp_path / "f")
        assert tracemalloc.get_traced_memory()[1] < 10 * 2**20
    finally:
        tracemalloc.stop()
    assert codes(found) == [("request_too_large", None, 2)]
