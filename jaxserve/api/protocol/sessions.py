"""Request bodies of SGLang's session routes."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from jaxserve.api.protocol import limits
from jaxserve.api.protocol.common import Body


class OpenSessionRequest(Body):
    session_id: limits.Identifier | None = Field(None, description="Default: a new id.")
    capacity_of_str_len: limits.TokenCountOrZero | None = Field(
        None, description="Maximum characters of a request's context; 0, the default: no limit."
    )
    streaming: bool | None = Field(None, description="Each request is appended to the previous one.")
    timeout: Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)] | None = Field(
        None, description="Close the session after this many seconds without a request."
    )


class CloseSessionRequest(Body):
    session_id: limits.Identifier
