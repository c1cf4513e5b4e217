"""The leader's side of an engine over several hosts: each call of runner or weights is sent, then made here.

A follower gets the calls in the order in which they are made here. No clock and no scheduler decides what it does. If
a call that changes the devices fails on one host and not on others, the group ends. If a host is lost, the processes
of all hosts end and are started again.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.config import Config
from jaxserve.engine.control import EngineControl, old_weights_stay
from jaxserve.engine.hosts import agreement
from jaxserve.engine.hosts.jax_group import join_devices
from jaxserve.errors import InvalidValueError, ServerError
from jaxserve.models.checkpoint.structure import ModelStructure
from jaxserve.models.checkpoint.weight_sources import WeightSource
from jaxserve.runtime.memory import MemoryPlan
from jaxserve.runtime.model_runner import ModelRunner
from jaxserve.runtime.weights import DeviceWeights, Place, Tick
from jaxserve.transport.group import LeaderEnd
from jaxserve.types.calls import UpdateFromDirectory, UpdateFromFile
from jaxserve.types.group import Done, Execute, LeaderEnds, Operation, PlanOffer, Sample, WarmedUp, WarmRun, Welcome
from jaxserve.types.messages import Failed, FromEngine, Progress
from jaxserve.types.scheduling import StepTimes
from jaxserve.types.step import SampledTokens, SchedulerOutput, StepHandle

logger = logging.getLogger(__name__)

PLAN_LIMIT = 3600.0  # seconds that the slowest host may take to read the weights, and again to compile
OPERATION_LIMIT = 600.0  # seconds that a follower may take for a call other than a step
REBUILD_LIMIT = 30.0  # seconds for empty arrays in place of the old; a host whose device waits for others never answers


def offer_of(plan: MemoryPlan) -> PlanOffer:
    """Return the sizes that fit on this host."""
    return PlanOffer(plan.num_pages, plan.pages_by_group[1:], plan.max_model_len)


def with_sizes(plan: MemoryPlan, agreed: PlanOffer) -> MemoryPlan:
    """Return this host's plan with the sizes that all hosts have."""
    plan = plan.with_pages(agreed.num_pages, agreed.of_groups)
    return dataclasses.replace(plan, max_model_len=agreed.max_model_len)


class Leader:
    """Makes calls on all hosts. tick: called repeatedly while the leader waits for followers"""

    def __init__(self, end: LeaderEnd) -> None:
        self.end = end
        self.tick: Tick = lambda: None

    def agree(self, plan: MemoryPlan) -> MemoryPlan:
        """Return the plan with the sizes that fit on every host, and send it to the followers."""
        offers = [offer_of(plan)]
        offers += [offer for offer in self.end.answers(PLAN_LIMIT).values() if isinstance(offer, PlanOffer)]
        least = PlanOffer(
            min(offer.num_pages for offer in offers),
            tuple(map(min, zip(*(offer.of_groups for offer in offers), strict=True))),
            min(offer.max_model_len for offer in offers),
        )
        self.end.send(least)
        return with_sizes(plan, least)

    def stop(self) -> None:
        """Let the followers end, as this host does."""
        self.end.close(LeaderEnds())

    @contextmanager
    def everywhere(self, name: str, limit: float = OPERATION_LIMIT) -> Iterator[None]:
        """Make a call on the followers while the body makes it here. Ends the group if it fails anywhere.

        Raises ServerError if it failed on a follower.
        """
        self.end.send(Operation(name))
        try:
            yield
        except Exception as error:
            self.end.lose(f"{name} failed on host 0: {type(error).__name__}: {error}")
            raise
        if failure := self._failure(limit):
            self.end.lose(f"{name} failed on {failure}")
            raise ServerError(f"{name} failed on {failure}")

    def on_followers(self, name: str, **args: Any) -> None:
        """Make a call on the followers only. Raises ServerError with the first failure, and the group goes on."""
        self.end.send(Operation(name, args))
        if failure := self._failure(OPERATION_LIMIT):
            raise ServerError(failure)

    def hold_adapter(self, path: str, digest: str, held: Sequence[str]) -> None:
        """Let each follower read an adapter from its own directory of this name, and forget all but `held`.

        Raises ServerError if one of them cannot, or has other tensors there.
        """
        self.on_followers("hold_adapter", path=path, digest=digest, held=list(held))

    def _failure(self, limit: float) -> str | None:
        for rank, answer in self.end.answers(limit, self.tick).items():
            if not isinstance(answer, Done) or answer.error is not None:
                return f"host {rank}: {answer.error if isinstance(answer, Done) else 'no answer'}"
        return None


class LeaderRunner:
    """A `types.step.StepRunner` over the runners of all hosts."""

    def __init__(self, leader: Leader, runner: ModelRunner) -> None:
        self._leader = leader
        self._runner = runner

    def warm_up(self) -> StepTimes:
        """Do what `ModelRunner.warm_up` does, on all hosts at once, when all have compiled.

        A device that waits for another host's device fails after 30 s.
        """
        end = self._leader.end
        end.answers(PLAN_LIMIT)
        return self._runner.warm_up(
            lambda family, size: end.send(WarmRun(family, size)), after_runs=lambda: end.send(WarmedUp())
        )

    def execute(self, output: SchedulerOutput) -> StepHandle:
        """Dispatch a step on all hosts."""
        self._leader.end.send(Execute(output))
        return _LeaderStep(self._leader, self._runner.execute(output))

    def rebuild(self) -> None:
        """Replace the arrays of all hosts by empty ones."""
        with self._leader.everywhere("rebuild", REBUILD_LIMIT):
            self._runner.rebuild()

    def release(self) -> None:
        """Free the arrays of all hosts except the weights."""
        with self._leader.everywhere("release"):
            self._runner.release()

    def num_compiles(self) -> int:
        return self._runner.num_compiles()

    def close(self) -> None:
        self._runner.close()


class _LeaderStep:
    def __init__(self, leader: Leader, handle: StepHandle) -> None:
        self._leader = leader
        self._handle = handle

    def sample(self, bitmask: np.ndarray, late: Sequence[int] = ()) -> None:
        """Sample on all hosts. bitmask: int32 [R, W], a row's mask. late: rows without a mask, not sampled"""
        self._leader.end.send(Sample.of(bitmask, tuple(late)))
        self._handle.sample(bitmask, late)

    def result(self) -> SampledTokens:
        return self._handle.result()


class LeaderWeights:
    """The weights of all hosts. Before `replace` the followers must have staged the same weights."""

    def __init__(self, leader: Leader, weights: DeviceWeights) -> None:
        self._leader = leader
        self._weights = weights

    @property
    def structure(self) -> ModelStructure:
        return self._weights.structure

    @property
    def place(self) -> Place:
        return self._weights.place

    def staged(self, source: WeightSource, tick: Tick = lambda: None) -> WeightSource:
        """Do what `DeviceWeights.staged` does, on this host only."""
        return self._weights.staged(source, tick)

    def replace(self, source: WeightSource, tick: Tick = lambda: None) -> None:
        """Do what `DeviceWeights.replace` does, on all hosts. An update that is refused does not end the group."""
        self._weights.check(source)
        with self._leader.everywhere("replace"):
            self._weights.replace(source, tick)

    def to_host(self) -> None:
        with self._leader.everywhere("to_host"):
            self._weights.to_host()

    def to_device(self) -> None:
        with self._leader.everywhere("to_device"):
            self._weights.to_device()

    def drop(self) -> None:
        with self._leader.everywhere("drop"):
            self._weights.drop()

    def read(self, name: str, num_rows: int) -> np.ndarray:
        """Raise InvalidValueError, because a tensor's parts are on several hosts."""
        raise InvalidValueError("weights cannot be read over several hosts (mesh.hosts)", param="name")


PART_BYTES = 32 * 2**20  # of a file of weights in one frame


class GroupControl(EngineControl):
    """An EngineControl whose weights are on several hosts. An update is staged on all of them before any changes."""

    def __init__(self, leader: Leader, *args: Any) -> None:
        super().__init__(*args)
        self._leader = leader
        leader.tick = lambda: self.on_progress()

    def update_from_directory(self, call: UpdateFromDirectory) -> str:
        """Do what `EngineControl` does. Each host reads its own directory of this name."""
        with self._staging():
            self._leader.on_followers("stage_directory", path=call.path)
            return super().update_from_directory(call)

    def update_from_file(self, call: UpdateFromFile) -> str:
        """Do what `EngineControl` does. The file's bytes are sent to the other hosts."""
        with self._staging():
            self._send_file(call.path)
            self._leader.on_followers("stage_file", partial=call.partial)
            return super().update_from_file(call)

    def _send_file(self, path: str) -> None:
        with old_weights_stay(), Path(path).open("rb") as file:
            while part := file.read(PART_BYTES):
                self._leader.on_followers("add_part", data=part)

    @contextmanager
    def _staging(self) -> Iterator[None]:
        try:
            yield
        except Exception:
            self._leader.on_followers("unstage")
            raise


LOST = 3  # exit code
_SEND_TIME = 0.3  # seconds for the last message to leave

Send = Callable[[FromEngine], None]


def lead(config: Config, send: Send) -> Leader:
    """Wait for the followers and join all devices. Raises ConfigError. send: may be called by another thread.

    If a follower is lost later, this process ends, and its supervisor starts it again.
    """
    mesh = config.mesh
    agreement.check_hosts(config)

    def on_loss(reason: str, fix: str | None) -> None:
        end_process(send, reason, fix)

    end = LeaderEnd(
        mesh.leader,
        agreement.group_key(mesh),
        mesh.hosts,
        lambda hello: agreement.objection(config, hello),
        on_loss,
    )
    end.gather(mesh.join_timeout, lambda joined: send(Progress("hosts", joined, mesh.hosts, "hosts")))
    coordinator = f"{mesh.leader[0]}:{agreement.free_port(mesh.leader[0])}"
    end.send(Welcome(agreement.for_followers(config), coordinator))
    join_devices(coordinator, 0, mesh.hosts)
    return Leader(end)


def end_process(send: Send, reason: str, fix: str | None = None) -> None:
    """End this process at once. Its threads may wait for devices of a host that is gone.

    fix: what the operator can do, if the operator made a mistake
    """
    logger.error("%s: this engine process ends", reason)
    send(Failed(reason, fix, expected=fix is not None))
    time.sleep(_SEND_TIME)
    sys.stderr.flush()
    os._exit(LOST)
