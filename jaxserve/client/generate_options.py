"""The optional arguments of every `generate` of one prompt."""

from __future__ import annotations

from typing import TypedDict

from jaxserve.client.abort_signal import AbortSignal
from jaxserve.client.sequences.outbox import Outbox
from jaxserve.types.sampling import Tenant


class GenerateOptions(TypedDict, total=False):
    """Keyword arguments of `EngineProtocol.generate`."""

    request_id: str | None  # for `abort` and logs; need not be unique
    priority: int  # lower runs earlier; default 0
    cache_salt: str  # prompts share cached prefixes only within a salt; default ""
    tenant: Tenant | None  # among whom the engine is shared; default: the tenant of all such requests
    deadline: float | None  # seconds from now after which the request ends with RequestTimeoutError
    signal: AbortSignal | None  # aborts this request and no other; it ends with finish_reason abort
    replica: int | None  # the engine that computes it; default: the router chooses
    continues: bool  # a request that was accepted needs the engine again: no drain and no full queue refuses it
    follows: bool  # an engine has answered a part of the same request; a pause that waits for requests waits for it
    outbox: Outbox | None  # the queue of unread outputs, if the caller wants to know its size
