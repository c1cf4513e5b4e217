"""The bodies of the admin routes."""

from __future__ import annotations

from pydantic import Field

from jaxserve.api.protocol.common import Body


class AbortRequest(Body):
    rid: str | None = Field(None, description="Requests whose id begins with it are ended.")
    abort_all: bool | None = None
