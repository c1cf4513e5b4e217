"""Parse a multipart form with one file while it arrives: the file's bytes are passed on and never kept."""

from __future__ import annotations

import re
from urllib.parse import unquote_to_bytes

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from jaxserve.errors import InvalidValueError, RequestError

MAX_FIELD_BYTES = 64 * 1024  # bytes of all fields except the file, headers included
MAX_PARTS = 32
_ENCODED_NAME = re.compile(rb";\s*filename\*=\"?utf-8'[^'\"]*'([^\";\s]+)", re.IGNORECASE)


class UploadForm:
    """Parse the body piece by piece; `fields` and `filename` are set once their parts have arrived.

    Raises InvalidValueError if the body is not such a form.
    """

    def __init__(self, content_type: str) -> None:
        kind, options = parse_options_header(content_type)
        if kind != b"multipart/form-data" or not options.get(b"boundary"):
            raise InvalidValueError("Send the file as multipart/form-data.")
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self.complete = False
        self._parts = 0
        self._field_bytes = 0
        self._header = (bytearray(), bytearray())  # name and value received so far
        self._name: str | None = None  # of the current part
        self._value: bytearray | None = None  # name of the current field; None: the file
        self._file_data: list[bytes] = []
        try:
            self._parser = self._make_parser(options[b"boundary"])
        except FormParserError as error:  # a boundary over 256 bytes
            raise InvalidValueError(f"The multipart body is malformed: {error}") from error

    def _make_parser(self, boundary: bytes) -> MultipartParser:
        return MultipartParser(
            boundary,
            {
                "on_part_begin": self._on_part_begin,
                "on_header_field": lambda data, start, end: self._on_header(0, data[start:end]),
                "on_header_value": lambda data, start, end: self._on_header(1, data[start:end]),
                "on_header_end": self._on_header_end,
                "on_headers_finished": self._on_headers_finished,
                "on_part_data": lambda data, start, end: self._on_data(data[start:end]),
                "on_part_end": self._on_part_end,
                "on_end": self._on_end,
            },
        )

    def feed(self, data: bytes) -> bytes:
        """Parse a piece of the body and return the file's bytes in it. Raises InvalidValueError if it is malformed."""
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise InvalidValueError(f"The multipart body is malformed: {error}") from error
        passed = b"".join(self._file_data)
        self._file_data.clear()
        return passed

    def _on_part_begin(self) -> None:
        self._parts += 1
        if self._parts > MAX_PARTS:
            raise InvalidValueError(f"The form has more than {MAX_PARTS} parts.")
        self._name, self._value = None, None

    def _on_header(self, half: int, data: bytes) -> None:
        self._count(data)
        self._header[half].extend(data)

    def _on_header_end(self) -> None:
        name, value = (bytes(half) for half in self._header)
        for half in self._header:
            half.clear()
        if name.lower() == b"content-disposition":
            self._begin_part(value)

    def _begin_part(self, disposition: bytes) -> None:
        _, options = parse_options_header(disposition)
        self._name = options.get(b"name", b"").decode(errors="replace")
        if self._name != "file":
            self._value = bytearray()
        elif self.filename is not None:
            raise InvalidValueError("The form has more than one file.", param="file")
        else:
            self.filename = options.get(b"filename", b"").decode(errors="replace") or _encoded_name(disposition)

    def _on_headers_finished(self) -> None:
        if self._name is None:
            raise InvalidValueError("A part of the form has no Content-Disposition.")

    def _on_data(self, data: bytes) -> None:
        if self._value is None:
            self._file_data.append(data)
        else:
            self._count(data)
            self._value += data

    def _count(self, data: bytes) -> None:
        self._field_bytes += len(data)
        if self._field_bytes > MAX_FIELD_BYTES:
            raise _too_large()

    def _on_part_end(self) -> None:
        if self._name is not None and self._value is not None:
            self.fields[self._name] = self._value.decode(errors="replace")

    def _on_end(self) -> None:
        self.complete = True


def _encoded_name(disposition: bytes) -> str:
    """Return the file's name in the form of RFC 5987, which older clients send alone; "" if there is none.

    The parser skips it, because RFC 7578 has no such form in multipart/form-data.
    """
    found = _ENCODED_NAME.search(disposition)
    return "" if found is None else unquote_to_bytes(found[1]).decode(errors="replace")


def _too_large() -> RequestError:
    return InvalidValueError(f"The form's fields are larger than {MAX_FIELD_BYTES} bytes.")
