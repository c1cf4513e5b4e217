"""Checks a batch's input file in one streamed pass, before any request runs.

An error here names the line and makes the whole file invalid. An error of a single request (a wrong temperature, an
unknown tool) is found by its route when it runs, and fails only that request. Bodies are not parsed into objects: only
`model`, `stream`, `background` and `conversation` are read, and the rest is checked to be JSON.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec

from jaxserve.store.jsonl import Line, is_utf8, read_lines
from jaxserve.store.records import BatchError

MAX_LINES = 50_000
MAX_FILE_ERRORS = 100  # errors reported per file; checking then stops
LINES_PER_YIELD = 64  # lines after which other threads may run


class BatchLine(msgspec.Struct, frozen=True):
    """The envelope of one request. `body` is its JSON, unread."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class _Body(msgspec.Struct, frozen=True):
    model: str | None = None  # None: the server's first model, as online
    stream: bool | None = None
    background: Any = None  # this and the next of Responses; other routes have no such field, so it may be anything
    conversation: Any = None


BATCH_LINE = msgspec.json.Decoder(BatchLine)
_BODY = msgspec.json.Decoder(_Body)


@dataclass(frozen=True, slots=True)
class Validation:
    """The outcome of a check. `errors` is empty if the file may run."""

    total: int
    model: str | None
    errors: tuple[BatchError, ...]


def normalize_url(url: str) -> str:
    """Return the route of a line with its /v1 prefix, which clients may omit."""
    return url if url.startswith("/v1/") else "/v1" + url


@dataclass
class Validator:
    """Checks one file once.

    endpoint: the route that every line must name; known_model: returns whether a model name is served
    """

    endpoint: str
    known_model: Callable[[str], bool]
    max_line_bytes: int
    max_lines: int = MAX_LINES
    _model: str | None = None
    _first: bool = True
    _total: int = 0
    _errors: list[BatchError] = field(default_factory=list)
    # digests instead of ids, because 50,000 ids may have any length
    _seen: set[bytes] = field(default_factory=set)

    def run(self, path: Path) -> Validation:
        """Check all lines and return the outcome."""
        for line in read_lines(path, self.max_line_bytes):
            self._total += 1
            if self._total > self.max_lines:
                self._errors = [BatchError("too_many_tasks", f"The file has more than {self.max_lines} requests.")]
                break
            self._check(line)
            if len(self._errors) >= MAX_FILE_ERRORS:
                break
            if self._total % LINES_PER_YIELD == 0:
                time.sleep(0)
        if not self._total:
            self._errors.append(BatchError("empty_file", "The file has no requests."))
        return Validation(self._total, self._model, tuple(self._errors))

    def _check(self, line: Line) -> None:
        if line.data is None:
            self._add(line, "request_too_large", f"The line is longer than {self.max_line_bytes} bytes.")
        elif not is_utf8(line.data):
            self._add(line, "invalid_json_line", "The line is not UTF-8.")
        else:
            self._check_json(line, line.data)

    def _check_json(self, line: Line, data: bytes) -> None:
        prefix = ""
        try:
            envelope = BATCH_LINE.decode(data)
            prefix = "body"
            body = _BODY.decode(envelope.body)
        except msgspec.ValidationError as error:
            self._add(line, "invalid_request", f"{error}.", _param(prefix, str(error)))
        except msgspec.DecodeError as error:
            self._add(line, "invalid_json_line", f"The line is not valid JSON: {error}.")
        except RecursionError:
            self._add(line, "invalid_json_line", "The line's JSON is nested too deeply.")
        else:
            self._check_envelope(line, envelope)
            self._check_body(line, body)

    def _check_envelope(self, line: Line, envelope: BatchLine) -> None:
        digest = blake2b(envelope.custom_id.encode(), digest_size=16).digest()
        if not envelope.custom_id:
            self._add(line, "invalid_request", "custom_id is empty.", "custom_id")
        elif digest in self._seen:
            shown = envelope.custom_id[:64]
            self._add(line, "duplicate_custom_id", f"custom_id {shown!r} was used by an earlier line.", "custom_id")
        self._seen.add(digest)
        if envelope.method != "POST":
            self._add(line, "invalid_method", "method must be 'POST'.", "method")
        if normalize_url(envelope.url) != self.endpoint:
            shown = envelope.url[:64]
            self._add(line, "url_mismatch", f"url {shown!r} is not the batch's endpoint {self.endpoint!r}.", "url")

    def _check_body(self, line: Line, body: _Body) -> None:
        shown = repr(body.model and body.model[:64])
        if self._first:
            self._first, self._model = False, body.model
            if body.model is not None and not self.known_model(body.model):
                self._add(line, "model_not_found", f"The model {shown} does not exist.", "body.model")
        elif body.model != self._model:
            self._add(line, "model_mismatch", f"The model {shown} is not that of the earlier lines.", "body.model")
        if body.stream:
            self._add(line, "unsupported_parameter", "A batch cannot stream.", "body.stream")
        if body.background is True:
            message = "A batch runs in the background; its output would not have the answer."
            self._add(line, "unsupported_parameter", message, "body.background")
        if body.conversation is not None:
            message = "A batch cannot continue a conversation: its lines have no order, and a crash may run one again."
            self._add(line, "unsupported_parameter", message, "body.conversation")

    def _add(self, line: Line, code: str, message: str, param: str | None = None) -> None:
        self._errors.append(BatchError(code, message, param, line.number))


def _param(prefix: str, message: str) -> str | None:
    """Return the field that msgspec blames, as a dotted path."""
    path = re.search(r"`\$\.?([\w.\[\]]*)`$", message)
    missing = re.search(r"missing required field `(\w+)`", message)
    parts = [prefix, path[1] if path else "", missing[1] if missing else ""]
    return ".".join(part for part in parts if part) or None
