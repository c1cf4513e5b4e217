"""Wait for the first output of a request, which shows that it has been accepted, but not for long."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from jaxserve.api.generate.generation import Outputs
from jaxserve.api.http.sse import START_SECONDS
from jaxserve.text.detokenizer import RequestOutput

FirstOutput = asyncio.Future[RequestOutput | None]


@asynccontextmanager
async def admitted(outputs: Outputs) -> AsyncIterator[FirstOutput]:
    """Return the future of the first output once it is there or START_SECONDS have passed; cancel it at the end.

    Raises what the engine raised by then.
    """
    first = asyncio.ensure_future(next_output(outputs))
    try:
        await asyncio.wait({first}, timeout=START_SECONDS)
        if first.done():
            await first
        yield first
    finally:
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)


async def next_output(outputs: Outputs) -> RequestOutput | None:
    found = await anext(outputs, None)
    return None if found is None else found[1]
