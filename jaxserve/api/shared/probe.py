"""The deep probe of GET /health_generate: checks that the engine makes tokens, not only that its loop runs."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from typing import Any, cast

from jaxserve.api.shared.engine_protocol import EngineProtocol
from jaxserve.errors import NotReadyError, QueueFullError
from jaxserve.types.sampling import EMBED, SamplingParams

TIMEOUT = 20.0  # seconds; as in SGLang
PROBE_INTERVAL = 0.1
STATS_AGE = 1.0  # maximum age of the engine's counters, in seconds

ONE_TOKEN = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)


async def check_generates(engine: EngineProtocol) -> None:
    """Return once the engine has answered a one-token request, or computed steps for other requests.

    Under load the probe's request waits, or the queue is full. A busy server is healthy.
    Raises NotReadyError (503) after TIMEOUT seconds, or the error with which the request ended.
    """
    started, steps = time.monotonic(), None
    probe = asyncio.create_task(_answer(engine))
    try:
        while (seconds := time.monotonic() - started) < TIMEOUT:
            await asyncio.wait({probe}, timeout=PROBE_INTERVAL)
            if probe.done():
                error = probe.exception()
                if error is None:
                    return
                if not isinstance(error, QueueFullError):
                    raise error
                await asyncio.sleep(PROBE_INTERVAL)
            if steps is None and seconds >= STATS_AGE:
                steps = engine.stats().steps
            elif steps is not None and engine.stats().steps > steps:
                return
    finally:
        probe.cancel()
        await asyncio.gather(probe, return_exceptions=True)
    raise NotReadyError(f"The engine computed nothing for {TIMEOUT:g} seconds.")


async def _answer(engine: EngineProtocol) -> None:
    params = ONE_TOKEN if engine.info.task == "generate" else EMBED
    outputs = engine.generate([(engine.info.eos_token_ids or [0])[0]], params, deadline=TIMEOUT)
    async with aclosing(cast(Any, outputs)) as stream:
        async for _ in stream:
            pass
