"""Serve the page for browsers, GET / and /web/FILE: static files of this package and a policy that loads nothing else.

A client that is not a browser gets the words that the probes of Ollama's clients look for. The page's addresses are
relative, so it works behind a path prefix that ends in a slash.
"""

from __future__ import annotations

from importlib.resources import files

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from jaxserve.api.http.middleware import PAGE_FILES
from jaxserve.errors import NotFoundError

_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
_FOLDER = files("jaxserve") / "assets" / "web"

router = APIRouter()


@router.get("/", response_class=PlainTextResponse, include_in_schema=False)
@router.head("/", include_in_schema=False)
async def root(request: Request) -> Response:
    """Return the page to a browser; answer the probes that clients send here first."""
    if "text/html" in request.headers.get("accept", ""):
        return _file("index.html", {"Vary": "Accept"})
    return PlainTextResponse("Ollama is running", headers={"Vary": "Accept"})


@router.get("/web/{name}", include_in_schema=False)
@router.head("/web/{name}", include_in_schema=False)
async def page_file(name: str) -> Response:
    """Return a file of the page. Raises NotFoundError."""
    if name not in PAGE_FILES:
        raise NotFoundError("There is no such file of the page.")
    return _file(name, {})


def _file(name: str, headers: dict[str, str]) -> Response:
    kind = {"html": "text/html", "css": "text/css", "js": "text/javascript"}[name.rpartition(".")[2]]
    return Response((_FOLDER / name).read_bytes(), media_type=kind, headers=_HEADERS | headers)
