"""Request bodies of the admin routes."""

from __future__ import annotations

from pydantic import Field

from jaxserve.api.protocol.common import Body


class AbortRequest(Body):
    rid: str | None = Field(None, description="Abort requests whose id begins with it.")
    abort_all: bool | None = None
