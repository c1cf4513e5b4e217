"""Which model a request is for: the `model` of its JSON body, else of its query, else the default model."""

from __future__ import annotations

import asyncio

import msgspec
from starlette.requests import Request

from jaxserve.api.body_cost import BodyLimits, is_large
from jaxserve.errors import InvalidValueError
from jaxserve.front.model_plan import Catalog, ModelPlan


class _Named(msgspec.Struct):
    """A body of which only the model is read; what else is in it is skipped, not decoded."""

    model: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


_NAMED = msgspec.json.Decoder(_Named)
_NAME = msgspec.json.Decoder(str | None)


async def choose(catalog: Catalog, request: Request, body: bytes, limits: BodyLimits) -> ModelPlan | None:
    """Return the model; None if nothing names one. body: empty if there is none, or it is forwarded unread

    Raises InvalidValueError, ModelNotFoundError, and PayloadTooLargeError for a body that is costly to read.
    """
    named = None
    if body:
        read = (_model_of, body, limits, request.scope["path"])
        named = await asyncio.to_thread(*read) if is_large(body) else _model_of(*read[1:])
    in_query = request.query_params.get("model")
    if named is not None and in_query is not None and catalog.find(named) is not catalog.find(in_query):
        raise InvalidValueError("model: the body and the query name different models.", param="model")
    name = in_query if named is None else named
    return None if name is None else catalog.find(name)


def _model_of(body: bytes, limits: BodyLimits, path: str) -> str | None:
    """Return the body's model; None if it has none. Raises InvalidValueError and PayloadTooLargeError."""
    limits.check_json(body, path)
    try:
        found = _NAMED.decode(body).model
    except msgspec.ValidationError:
        raise InvalidValueError("body: should be an object", code="invalid_type") from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidValueError(f"The body is not valid JSON: {error}.", code="invalid_json") from None
    try:
        return None if isinstance(found, msgspec.UnsetType) else _NAME.decode(found)
    except msgspec.DecodeError:
        raise InvalidValueError("model: should be a string", param="model", code="invalid_type") from None
