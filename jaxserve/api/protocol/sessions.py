"""The bodies of SGLang's sessions: to open one, to close it, and how a request goes on in it."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from jaxserve.api.protocol import limits
from jaxserve.api.protocol.common import Body


class OpenSessionRequest(Body):
    session_id: limits.Identifier | None = Field(None, description="Default: a new one.")
    capacity_of_str_len: limits.TokenCountOrZero | None = Field(
        None, description="Characters that the context of a request may have; 0, the default: no limit."
    )
    streaming: bool | None = Field(None, description="One turn after the other, each appended to the last.")
    timeout: Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)] | None = Field(
        None, description="Seconds without a request after which it is closed."
    )


class CloseSessionRequest(Body):
    session_id: limits.Identifier
