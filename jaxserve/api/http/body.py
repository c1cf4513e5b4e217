"""Turn a request's bytes into a validated body, or into one 400 that names the field.

pydantic reads the JSON text in one pass. A second parse runs only to word an error.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from types import NoneType
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from jaxserve.api.errors.families import OLLAMA_PREFIX
from jaxserve.api.errors.responses import ClientDisconnected, from_validation
from jaxserve.api.protocol.common import Body, NestedObject
from jaxserve.api.shared.body_cost import is_large
from jaxserve.api.shared.state import server_state
from jaxserve.errors import InvalidValueError, RequestError, UnsupportedParameterError
from jaxserve.text.json_cost import may_be_beyond_a_float

B = TypeVar("B", bound=Body)

MAX_ERRORS = 64  # validation errors worded per body
MAX_UNKNOWN = 64  # unknown fields reported per object

_PLAIN = (NoneType, str, int, float, dict)  # values that hold no part: quicker to tell than a part
_NOTHING = (None, False, [], {}, "")  # values that say "not used"

# the JSON parser accepts numbers of up to 4,300 digits and names no field if it fails
_HUGE_NUMBER = re.compile(rb'"(\w{1,64})"\s*:\s*[\[{]*-?\d{4300}')
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
        request.scope["state"]["body"] = raw  # see forward_to_main.py
    return await parse_body(raw, model, request)


async def parse_body(raw: bytes, model: type[B], request: Request) -> B:
    """Check and validate, outside the event loop if the body is large. Raises a RequestError."""
    state, path = server_state(request), request.scope["path"]  # request.url is built anew at each access
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
        raise _explain(error, raw, model) from None
    if may_be_beyond_a_float(raw):
        _check_numbers(raw)
    body.note_size(len(raw))
    return body, list(_unserved(body))


def _check_numbers(raw: bytes) -> None:
    """Raises InvalidValueError for NaN, Infinity and numbers beyond a float's range, which validation takes in a free
    field: they are not JSON, or become none."""
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
    """Yield the fields of a body and of the objects in it that are not known, without list indices.

    One with an empty value is left out. Raises UnsupportedParameterError for a known field that is refused.
    path: of the part, with indices. logged: without them
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

    Clients of Ollama's routes declare nothing or a form. There, what a web page sends is known by its Origin header.
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
        param = huge[1].decode() if huge else None
        return InvalidValueError(f"The body is not valid JSON. {reason}", param=param, code="invalid_json")
    return from_validation(error, _parsed(raw))


def _explain_many(raw: bytes, model: type[BaseModel]) -> RequestError:
    """Validate only the first entries of each container again and report those: wording a million errors takes 20 s."""
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
