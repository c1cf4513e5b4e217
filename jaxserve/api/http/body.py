"""Turn a request's bytes into a validated body, or into one 400 that names the field.

pydantic reads a JSON body in one pass. A second parse runs only to word an error. A multipart form with one file is
parsed while it arrives (`UploadForm`): the file's bytes are passed on and never kept.
"""

from __future__ import annotations

import codecs
import itertools
import json
import re
from collections.abc import Iterator
from types import NoneType
from typing import Any, TypeVar
from urllib.parse import unquote_to_bytes

import orjson
from pydantic import BaseModel, ValidationError
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import ClientDisconnect, Request

from jaxserve.api.body_cost import is_large
from jaxserve.api.fields import Body, NestedObject
from jaxserve.api.http.errors import OLLAMA_PREFIX, ClientDisconnected, from_validation, path_in
from jaxserve.api.state import server_state
from jaxserve.errors import InvalidValueError, RequestError, UnsupportedParameterError
from jaxserve.text.json_cost import may_be_beyond_a_float

B = TypeVar("B", bound=Body)

MAX_ERRORS = 64  # validation errors worded per body
MAX_UNKNOWN = 64  # unknown fields reported per object

_PLAIN = (NoneType, str, int, float, dict)  # types of values that contain no object of the protocol
_NOTHING = (None, False, [], {}, "")  # values that say "not used"

# the JSON parser accepts numbers of up to 4,300 digits and names no field if it fails
_HUGE_NUMBER = re.compile(rb'"(\w{1,64})"\s*:\s*[\[{]*-?\d{4300}')
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
MAX_NAME_DISTANCE = 1024  # characters between an unreadable number and its field name
_NAME = re.compile(r'"(\w{1,64})"\s*:')


async def read_body(request: Request, model: type[B]) -> B:
    """Read and validate a JSON body. Raises a RequestError (4xx)."""
    _check_content_type(request)
    try:
        raw = await request.body()
    except ClientDisconnect:
        raise ClientDisconnected from None
    if server_state(request).group is not None:
        request.scope["state"]["body"] = raw  # see forward.py
    return await parse_body(raw, model, request)


async def parse_body(raw: bytes, model: type[B], request: Request) -> B:
    """Check and validate a body, outside the event loop if it is large. Raises a RequestError."""
    raw = raw.removeprefix(codecs.BOM_UTF8)  # Windows' editors and shells begin files with it
    state = server_state(request)
    path = request.scope["path"]  # request.url is built anew at each access
    limits = state.body_limits()

    def work() -> tuple[B, list[str]]:
        limits.check_json(raw, path)
        return validated(raw, model)

    body, unknown = await state.body_work.run(work, len(raw)) if is_large(raw) else work()
    if unknown:
        state.unknown_fields.note(path, unknown)
    return body


def validated(raw: bytes, model: type[B]) -> tuple[B, list[str]]:
    """Return (body, paths of its fields that no supported API has). Raises a RequestError."""
    try:
        body = model.model_validate_json(raw)
    except ValidationError as error:
        whole = _with_integers(error, raw, model)
        if whole is None:
            raise _explain(error, raw, model) from None
        body = whole
    if may_be_beyond_a_float(raw):
        _check_numbers(raw)
    body.note_size(len(raw))
    return body, list(_unserved(body))


def _with_integers(error: ValidationError, raw: bytes, model: type[B]) -> B | None:
    """Return the body with 5 for each 5.0 where an integer is wanted; None if that is not all that is wrong.

    Lua, R and Gson write all numbers as floats.
    """
    if error.error_count() > MAX_ERRORS:
        return None
    details = error.errors(include_url=False, include_context=False)
    wrong = [each for each in details if each["type"] == "int_type" and _is_whole(each["input"])]
    if not wrong:
        return None
    parsed = _parsed(raw)
    for each in wrong:
        if not (path := path_in(parsed, each)):
            return None
        *outer, key = path
        node: Any = parsed
        for part in outer:
            node = node[part]
        if isinstance(node, list):  # validation stops at the first wrong item
            node[:] = [int(item) if _is_whole(item) else item for item in node]
        elif _is_whole(node[key]):
            node[key] = int(node[key])
    try:
        return model.model_validate_json(json.dumps(parsed))
    except ValidationError:
        return None


def _is_whole(value: Any) -> bool:
    return isinstance(value, float) and value.is_integer()


def _check_numbers(raw: bytes) -> None:
    """Raise InvalidValueError for NaN, Infinity and numbers beyond a float's range.

    Validation accepts them in a free field, but they are not JSON, or cannot be written as JSON again.
    """
    try:
        orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise invalid_json(error) from None


def invalid_json(error: orjson.JSONDecodeError) -> InvalidValueError:
    """Build the error for an unreadable body, naming the last field before the mistake."""
    names = _NAME.findall(error.doc[max(0, error.pos - MAX_NAME_DISTANCE) : error.pos])
    param = names[-1] if names else None
    return InvalidValueError(f"The body is not valid JSON: {error}.", param=param, code="invalid_json")


def _unserved(part: Body | NestedObject, path: str = "", logged: str = "") -> Iterator[str]:
    """Yield the unknown fields of a body and of the objects in it, without list indices.

    An unknown field with an empty value is left out.
    path: path of the part with list indices. logged: the same path without them
    Raises UnsupportedParameterError for a known field that is refused.
    """
    if given := part.unknown_fields:
        known = part.known
        for name in given.keys() & known.refused.keys():
            if known.refused[name].applies_to(given[name]):
                param = path + name
                message = f"{param} is not supported: {known.refused[name].reason}."
                raise UnsupportedParameterError(message, param=param)
        some = itertools.islice(given.keys() - known.refused.keys() - known.ignored, MAX_UNKNOWN)
        yield from (logged + name for name in some if not path or given[name] not in _NOTHING)
    for name, value in vars(part).items():  # its known fields
        if isinstance(value, _PLAIN):
            continue
        parts = value if isinstance(value, list) else [value]
        if not (parts and isinstance(parts[0], NestedObject)):
            continue
        for number, inner in enumerate(parts):
            if isinstance(inner, NestedObject):
                where = f"{path}{name}.{number}." if isinstance(value, list) else f"{path}{name}."
                yield from _unserved(inner, where, f"{logged}{name}.")


def _check_content_type(request: Request) -> None:
    """Refuse bodies that are not declared as JSON. A web page cannot send JSON across origins without a preflight.

    Clients of Ollama's routes declare nothing or a form. On these routes the Origin header shows a web page's request.
    """
    if request.scope["path"].startswith(OLLAMA_PREFIX) and "origin" not in request.headers:
        return
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise InvalidValueError(f"Send JSON with Content-Type: application/json (it is {kind or 'missing'}).")


def _explain(error: ValidationError, raw: bytes, model: type[BaseModel]) -> RequestError:
    if error.error_count() > MAX_ERRORS:
        return _explain_many(raw, model)
    if any(detail["type"] == "json_invalid" for detail in error.errors(include_url=False, include_input=False)):
        reason = error.errors(include_url=False, include_input=False)[0]["msg"]
        huge = _HUGE_NUMBER.search(raw) if "number out of range" in reason else None
        is_cut = "EOF" in reason
        param = huge[1].decode() if huge else None if is_cut else _name_before_mistake(raw)
        if "hex escape" in reason and _SURROGATE.search(raw):
            reason += ": a text has half of a character that is written as two \\u escapes"
        return InvalidValueError(f"The body is not valid JSON. {reason}", param=param, code="invalid_json")
    return from_validation(error, _parsed(raw))


def _name_before_mistake(raw: bytes) -> str | None:
    """Return the last field before the mistake in an unreadable body."""
    try:
        orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        return invalid_json(error).param
    return None


def _explain_many(raw: bytes, model: type[BaseModel]) -> RequestError:
    """Validate only the first entries of each container again and report their errors.

    Wording a million errors would take 20 s.
    """
    parsed = _parsed(raw)
    if isinstance(parsed, dict):
        try:
            model.model_validate_json(json.dumps({name: _shortened(value) for name, value in parsed.items()}))
        except ValidationError as error:
            return from_validation(error, parsed)
    return InvalidValueError("The body has many values that are not valid.")


def _shortened(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _shortened(value[name]) for name in itertools.islice(value, MAX_ERRORS)}
    return [_shortened(item) for item in value[:MAX_ERRORS]] if isinstance(value, list) else value


def _parsed(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        return None


MAX_FIELD_BYTES = 64 * 1024  # bytes of all fields except the file, headers included
MAX_PARTS = 32
_ENCODED_NAME = re.compile(rb";\s*filename\*=\"?utf-8'[^'\"]*'([^\";\s]+)", re.IGNORECASE)


class UploadForm:
    """Parse a form with one file piece by piece. `fields` and `filename` are set once their parts have arrived.

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
        self._name: str | None = None  # name of the current part
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
        self._name = None
        self._value = None

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
    """Return the file's name in the form of RFC 5987, the only form that some older clients send; "" without it.

    The parser skips this form, because RFC 7578 does not allow it in multipart/form-data.
    """
    found = _ENCODED_NAME.search(disposition)
    return "" if found is None else unquote_to_bytes(found[1]).decode(errors="replace")


def _too_large() -> RequestError:
    return InvalidValueError(f"The form's fields are larger than {MAX_FIELD_BYTES} bytes.")
