"""From a request's bytes to a validated body, or to one 400 that names the field.

One pass of pydantic over the JSON text; a second parse only to word an error.
"""

from __future__ import annotations

import itertools
import json
import re
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from jaxserve.api.errors import ClientDisconnected, from_validation
from jaxserve.api.protocol.common import UNSUPPORTED, Body
from jaxserve.api.state import server_state
from jaxserve.errors import InvalidValueError, RequestError, UnsupportedParameterError

B = TypeVar("B", bound=Body)

MAX_ERRORS = 64  # of one body that are worded

# the parser reads numbers of up to 4300 digits, and names no field when it gives up
_HUGE_NUMBER = re.compile(rb'"(\w{1,64})"\s*:\s*[\[{]*-?\d{4300}')


async def read_body(request: Request, model: type[B]) -> B:
    """Read and validate a JSON body. Raises a RequestError (4xx)."""
    _check_content_type(request)
    try:
        raw = await request.body()
    except ClientDisconnect:
        raise ClientDisconnected from None
    return parse_body(raw, model, request)


def parse_body(raw: bytes, model: type[B], request: Request) -> B:
    try:
        body = model.model_validate_json(raw)
    except ValidationError as error:
        raise _explain(error, raw, model) from None
    unknown = refuse_unsupported(body)
    if unknown:
        server_state(request).unknown_fields.note(request.url.path, unknown)
    return body


def refuse_unsupported(body: BaseModel, prefix: str = "") -> list[str]:
    """Raise UnsupportedParameterError for a known field that is not offered; return the unknown ones."""
    unknown = []
    for name, value in (body.model_extra or {}).items():
        if name not in UNSUPPORTED:
            unknown.append(name)
        elif value not in (None, False, [], {}, ""):
            param = prefix + name
            raise UnsupportedParameterError(f"{param} is not supported: {UNSUPPORTED[name]}.", param=param)
    return unknown


def _check_content_type(request: Request) -> None:
    """Also what keeps a web page from posting here without asking: such posts cannot be JSON without a preflight."""
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
    """To word a million errors takes 20 s: those of the first entries of every object stand for all."""
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
