"""Splits a request for n choices into n requests for one choice each, and gives each a seed."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable

import msgspec

from jaxserve.errors import InvalidValueError
from jaxserve.types.sampling import EngineRequest

MAX_SEED = 2**63 - 1

logger = logging.getLogger(__name__)


def siblings(request: EngineRequest, new_id: Callable[[], str], seed: int | None) -> list[EngineRequest]:
    """Return one request per choice, each with its own id and seed, in one group. They share the list of prompt tokens.

    seed: of the first choice; each further choice adds 1. None: the engine draws the seeds. Raises InvalidValueError
    for n < 1.
    """
    params = request.params
    if params.n < 1:
        raise InvalidValueError("n must be at least 1", param="n")
    ids = [new_id() for _ in range(params.n)]
    group = ids[0] if params.n > 1 else ""
    seeds = [None if seed is None else (seed + index) & MAX_SEED for index in range(params.n)]
    return [
        msgspec.structs.replace(
            request, request_id=each, group=group, params=msgspec.structs.replace(params, n=1, seed=own)
        )
        for each, own in zip(ids, seeds, strict=True)
    ]


def request_seed(configured: int | None) -> int:
    """Return `runtime.random_seed`; if it is not set, draw a seed from the operating system.

    A fixed seed gives the requests of every start the same sequence of seeds. A drawn one is logged at the level debug,
    so that a run can be repeated.
    """
    if configured is not None:
        return configured
    seed = secrets.randbits(63)
    logger.debug("runtime.random_seed: %d was drawn", seed)
    return seed
