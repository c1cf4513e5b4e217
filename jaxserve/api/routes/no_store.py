"""The routes of files, batches, stored responses and conversations on a server without a store: 503 with the reason."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from jaxserve.errors import StoreUnavailableError

_METHODS = ["GET", "POST", "DELETE"]
_PATHS = (
    *("/v1/files", "/v1/files/{rest:path}", "/v1/batches", "/v1/batches/{rest:path}"),
    *("/v1/responses/{rest:path}", "/v1/conversations", "/v1/conversations/{rest:path}"),
)


def no_store_router(reason: str) -> APIRouter:
    """Return the routes, each of which raises StoreUnavailableError. reason: a whole sentence for the client."""
    router = APIRouter()

    async def refuse() -> Response:
        """Raises StoreUnavailableError."""
        raise StoreUnavailableError(reason)

    for path in _PATHS:
        router.add_api_route(path, refuse, methods=_METHODS, include_in_schema=False)
    return router
