"""A request for n choices as n requests for one each."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from jaxserve.errors import InvalidValueError
from jaxserve.types.sampling import EngineRequest

MAX_SEED = 2**63 - 1


def siblings(request: EngineRequest, new_id: Callable[[], str], seed: int | None) -> list[EngineRequest]:
    """One request for each choice: with an id and a seed of its own, and one group. They share the list of the prompt.

    seed: of the first choice; each further one has the next. None: the engine draws them.
    Raises InvalidValueError for no choices.
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
