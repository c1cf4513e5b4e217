"""Administrative calls that all engines of a server carry out, or a named error."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxserve.client.replicas.replica import Replica
from jaxserve.client.replicas.replica_summary import joined_result
from jaxserve.errors import EngineDeadError, HTTPError, NotReadyError, ServerError

READS = ("state", "waiting", "read_weights")  # they change nothing, so engines that are down are left out


def changes_weights(method: str) -> bool:
    return method.startswith("update_from_")


@dataclass(frozen=True)
class Outcome:
    """What came of a call. An engine that died meanwhile gets the call when it is started again.

    done, results: the engines that have carried it out, and what they answered. errors: of the others
    """

    method: str
    done: Sequence[Replica]
    results: Sequence[Any]
    errors: Sequence[tuple[Replica, HTTPError]]

    @property
    def refused(self) -> list[Replica]:
        """The engines that live and have not carried it out."""
        return [replica for replica, error in self.errors if not isinstance(error, EngineDeadError)]

    def result(self) -> Any:
        """Return the answer of all. Raises an HTTPError if an engine has not carried it out."""
        refused = [(each, error) for each, error in self.errors if not isinstance(error, EngineDeadError)]
        if not self.done:
            raise (refused or self.errors)[0][1]
        if refused:
            reasons = "; ".join(f"engine {each.index}: {error.message}" for each, error in refused)
            done = ", ".join(str(each.index) for each in self.done)
            raise ServerError(f"{self.method} was carried out by engines {done}, and not by all: {reasons}")
        return joined_result(self.method, self.results)


async def call_all(replicas: Sequence[Replica], method: str, args: dict[str, Any]) -> Outcome:
    """Make a call to all engines that are not dead. Raises NotReadyError, and calls none, if one is being started."""
    living = [replica for replica in replicas if not replica.is_dead]
    if method in READS:
        living = [replica for replica in living if replica.sender.is_up and not replica.is_stale] or living
        living = living[:1] if method == "read_weights" else living
    elif len(replicas) > 1 and (down := next((each for each in living if not each.sender.is_up), None)) is not None:
        phase = down.supervisor.status.phase
        raise NotReadyError(f"engine {down.index} is {phase}, and {method} is for all engines; try again")
    calls = (replica.calls.call(method, args) for replica in living)
    answers = await asyncio.gather(*calls, return_exceptions=True)
    done, results, errors = [], [], []
    for replica, answer in zip(living, answers, strict=True):
        if isinstance(answer, HTTPError):
            errors.append((replica, answer))
        elif isinstance(answer, BaseException):
            raise answer
        else:
            done.append(replica)
            results.append(answer)
    return Outcome(method, done, results, errors)
