"""Administrative calls to all engines of a server: all carry a call out, or it fails with a named error."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxserve.client.replicas import Replica
from jaxserve.errors import EngineDeadError, HTTPError, NotReadyError, ServerError
from jaxserve.types.calls import EngineCall, ReadWeights


@dataclass(frozen=True)
class Outcome:
    """The outcome of a call to several engines.

    done: the engines that have carried it out, with their answers. errors: the errors of the others
    asked: the engines that got the call, and how often each had been started again before it
    """

    call: EngineCall
    done: Mapping[Replica, Any]
    errors: Sequence[tuple[Replica, HTTPError]]
    asked: Mapping[Replica, int]

    @property
    def missed(self) -> list[Replica]:
        """Engines that were started again meanwhile and serve without the call that others have carried out."""
        if not self.done or self.call.reads:
            return []
        return [each for each, before in self.asked.items() if each.supervisor.restarts > before and each.sender.is_up]

    def joined(self, again: Outcome) -> Outcome:
        """Return the outcome after the same call was made again to some of the engines."""
        done = {each: answer for each, answer in self.done.items() if each not in again.asked}
        errors = [each for each in self.errors if each[0] not in again.asked]
        return Outcome(self.call, {**done, **again.done}, [*errors, *again.errors], {**self.asked, **again.asked})

    @property
    def refused(self) -> list[Replica]:
        """Engines that run and have not carried it out."""
        return [replica for replica, error in self.errors if not isinstance(error, EngineDeadError)]

    def result(self) -> Any:
        """Return the answer of all. Raises an HTTPError if an engine has not carried it out."""
        refused = [(each, error) for each, error in self.errors if not isinstance(error, EngineDeadError)]
        if not self.done:
            raise (refused or self.errors)[0][1]
        if refused:
            reasons = "; ".join(f"engine {each.index}: {error.message}" for each, error in refused)
            done = ", ".join(str(each.index) for each in self.done)
            raise ServerError(f"{self.call.name} was carried out by engines {done}, and not by all: {reasons}")
        return self.call.joined([*self.done.values()])


async def call_all(replicas: Sequence[Replica], call: EngineCall) -> Outcome:
    """Make a call to all engines that are not dead. Raises NotReadyError, and calls none, if one is being started."""
    living = [replica for replica in replicas if not replica.is_dead]
    if call.reads:
        living = [replica for replica in living if replica.sender.is_up and not replica.is_stale] or living
        living = living[:1] if isinstance(call, ReadWeights) else living
    elif len(replicas) > 1 and (down := next((each for each in living if not each.sender.is_up), None)) is not None:
        phase = down.supervisor.status.phase
        raise NotReadyError(f"engine {down.index} is {phase}, and {call.name} is for all engines; try again")
    asked = {replica: replica.supervisor.restarts for replica in living}
    calls = (replica.calls.call(call) for replica in living)
    answers = await asyncio.gather(*calls, return_exceptions=True)
    done, errors = {}, []
    for replica, answer in zip(living, answers, strict=True):
        if isinstance(answer, HTTPError):
            errors.append((replica, answer))
        elif isinstance(answer, BaseException):
            raise answer
        else:
            done[replica] = answer
    return Outcome(call, done, errors, asked)
