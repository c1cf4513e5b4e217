"""Keep the models of the front: load them on request, unload them when idle or for room, load them again.

`ModelPlan` has what the configuration says of a model, `FrontModel` its state, its adapters and its delay after a
failure, and `LoadedModels` finds, loads and unloads. Every change of a model's state happens on the event loop. A load
or an unload is one task (`work`), for which all requests of the model wait. So no request uses a model while it is
unloaded.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from jaxserve.api.openai.models import named_object
from jaxserve.config import Config, ModelEntry, ModelsSection, ServerSection
from jaxserve.errors import ModelNotFoundError, NotReadyError
from jaxserve.front.model_process import ModelProcess, ProcessEndedError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelPlan:
    """One model: its entry, and the whole configuration of its processes. names: the entry's name, then its aliases"""

    entry: ModelEntry
    config: Config
    names: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.entry.name


State = Literal["unloaded", "loading", "loaded", "unloading"]

# seconds after each consecutive failure before the next load; the last one repeats
DELAYS = (0.0, 2.0, 5.0, 15.0, 60.0)
FAILURES_FORGOTTEN_AFTER = 300.0  # seconds of service after which the count of failures is reset


@dataclass
class FrontModel:
    """A model of the front and its process.

    process: None unless the model takes room
    work: the load or unload that runs. asked: whether the operator asked for the load that runs
    in_flight: requests that the process answers. waiting: requests that wait for the load
    used: time.monotonic() at the end of the last request
    objects: entries of the process's /v1/models for the model's names, known after the first load
    """

    plan: ModelPlan
    state: State = "unloaded"
    process: ModelProcess | None = None
    work: asyncio.Task[None] | None = None
    in_flight: int = 0
    waiting: int = 0
    asked: bool = False
    used: float = 0.0
    objects: list[dict[str, Any]] = field(default_factory=list)
    created: int = field(default_factory=lambda: int(time.time()))
    exit_status: int | None = None  # exit status of the process that failed; None: it did not fail
    _failures: int = 0
    _next_load: float = 0.0  # time.monotonic() before which the model is not loaded again
    _loaded_adapters: dict[str, dict[str, Any]] = field(default_factory=dict)  # as `adapters`, of the process

    def read(self, objects: Sequence[dict[str, Any]]) -> None:
        """Take the entries of the process's /v1/models. The entries of adapters have a parent."""
        self.objects = [each for each in objects if each.get("parent") is None]
        self._loaded_adapters = {each["id"]: each for each in objects if each.get("parent") is not None}

    @property
    def adapters(self) -> dict[str, dict[str, Any]]:
        """Entries of /v1/models by the names of adapters; those that a load brings, while the model is not loaded."""
        if self.state == "loaded":
            return self._loaded_adapters
        return self._own_adapters | (self._loaded_adapters if self.plan.config.lora.keep else {})

    @cached_property
    def _own_adapters(self) -> dict[str, dict[str, Any]]:
        """`adapters` of the configuration."""
        return {
            each.name: named_object(each.name, self.created) | {"root": each.path, "parent": self.plan.name}
            for each in self.plan.config.lora.adapters
        }

    def adapter_named(self, name: str) -> str | None:
        """Return the adapter that a name means: its own name, or MODEL:ADAPTER. None if there is none."""
        names = (name, *(name.removeprefix(f"{own}:") for own in self.plan.names if name.startswith(f"{own}:")))
        adapters = self.adapters
        return next((each for each in names if each in adapters), None)

    def may_keep(self, name: str) -> bool:
        """Return whether MODEL:ADAPTER may mean an adapter that only the store of the unloaded model knows."""
        is_own = any(name.startswith(f"{own}:") for own in self.plan.names)
        return is_own and self.plan.config.lora.keep and self.state != "loaded"

    @property
    def is_free(self) -> bool:
        """Whether the model is loaded and no request of a client needs it."""
        return self.state == "loaded" and not self.in_flight and not self.waiting

    def failed(self, status: int, served: float) -> float:
        """Record that the process has ended by itself, and return the seconds until the next load.

        served: seconds for which the process served
        """
        if served > FAILURES_FORGOTTEN_AFTER:
            self._failures = 0
        if not served:
            self._failures = max(1, self._failures)  # a model that did not load at all is not tried again at once
        delay = DELAYS[min(self._failures, len(DELAYS) - 1)]
        self._failures += 1
        self.exit_status = status
        self._next_load = time.monotonic() + delay
        return delay

    def forgive(self) -> None:
        """Let the next load begin at once."""
        self._next_load = 0.0

    def check_may_load(self) -> None:
        """Raise NotReadyError if the delay after a failure is not over."""
        wait = self._next_load - time.monotonic()
        if wait > 0:
            error = NotReadyError(
                f"The process of the model {self.plan.name!r} ended with status {self.exit_status}, and it is not "
                "loaded again yet. The server's log says why."
            )
            error.retry_after = wait
            raise error

    def listed(self) -> list[dict[str, Any]]:
        """Return the entries of /v1/models, one for each name and adapter, with llama-server's `status`."""
        status: dict[str, Any] = {"value": self.state, "requests": self.in_flight}
        if self.state == "loading" and self.process is not None and self.process.progress:
            status["progress"] = self.process.progress
        if self.exit_status is not None:
            status |= {"failed": True, "exit_code": self.exit_status}
        entries = self.objects or [named_object(name, self.created) for name in self.plan.names]
        return [{**entry, "status": status} for entry in (*entries, *self.adapters.values())]

    def entry(self, name: str) -> dict[str, Any] | None:
        """Return the entry of /v1/models of a name. None if only a load shows whether there is one."""
        listed = {each["id"]: each for each in self.listed()}
        found = next((listed[each] for each in with_latest(name) if each in listed), None)
        adapter = self.adapter_named(name)
        return found if found is not None or adapter is None else listed[adapter] | {"id": name}


def with_latest(name: str) -> tuple[str, ...]:
    """Return a name and what it means without `:latest`, which Ollama's clients may add."""
    return name, name.removesuffix(":latest")


IDLE_LOOK_INTERVAL = 1.0  # seconds between two looks for idle models
FINISH_SECONDS = 15.0  # a process must end within this time after the drain timeout
UNKNOWN = -1  # exit status of a process that was not started


class LoadedModels:
    """Load and unload the models of one front. The first one is the default.

    directory: a private one, for the sockets of their processes
    """

    def __init__(
        self, plans: Sequence[ModelPlan], models: ModelsSection, server: ServerSection, directory: Path
    ) -> None:
        self.all: Sequence[FrontModel] = [FrontModel(plan) for plan in plans]
        self._by_name: Mapping[str, FrontModel] = {name: model for model in self.all for name in model.plan.names}
        self._models = models
        self._end_seconds = server.drain_timeout + FINISH_SECONDS
        self._directory = directory
        self._numbers = itertools.count()
        self._place = asyncio.Lock()  # held while a load looks for room, so that two do not take the same
        self._freed = asyncio.Event()  # set if there may be room, or a model that may be unloaded
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = False
        self.started = asyncio.Event()  # set once the models of the start are loaded, or failed

    @property
    def default(self) -> FrontModel:
        return self.all[0]

    async def find(self, name: str) -> FrontModel:
        """Return the model that has a name, or an adapter of this name. Raises ModelNotFoundError.

        If no model is known to have it, the servers of the loaded models are asked for their adapters.
        """
        found = self._known(name)
        if found is None:
            await self.refresh_adapters()
            found = self._known(name) or next((each for each in self.all if each.may_keep(name)), None)
        if found is None:
            shown = ", ".join((*self._by_name, *(adapter for each in self.all for adapter in each.adapters)))
            raise ModelNotFoundError(f"The model {name!r} does not exist. Served: {shown}.", param="model")
        return found

    def _known(self, name: str) -> FrontModel | None:
        """Return the first model of a name. A model's own name goes before an adapter's."""
        names = with_latest(name)
        own = next((self._by_name[each] for each in names if each in self._by_name), None)
        adapted = (model for each in names for model in self.all if model.adapter_named(each) is not None)
        return own or next(adapted, None)

    async def refresh_adapters(self) -> None:
        """Ask the loaded models that may have adapters for their names. One that does not answer keeps the old ones."""

        async def refresh(model: FrontModel, process: ModelProcess) -> None:
            objects = await process.models()
            if objects is not None and model.process is process:
                model.read(objects)

        wanted = [each for each in self.all if each.state == "loaded" and each.plan.config.lora.slots]
        await asyncio.gather(*(refresh(each, each.process) for each in wanted if each.process is not None))

    def loaded_processes(self) -> list[tuple[str, ModelProcess]]:
        """Return (name, process) of each loaded model."""
        return [(each.plan.name, each.process) for each in self.all if each.state == "loaded" and each.process]

    @property
    def draining(self) -> bool:
        return self._stopping

    async def run(self) -> None:
        """Load the models of the start one after the other, then unload idle ones until cancelled."""
        for model in self.all:
            if model.plan.entry.load == "start" and not self._stopping:
                await asyncio.wait((model.work or self._load_work(model, asked=True),))
        self.started.set()
        while True:
            await asyncio.sleep(IDLE_LOOK_INTERVAL)
            for model in self.all:
                await self._unload_if_idle(model)

    async def acquire(self, model: FrontModel) -> ModelProcess:
        """Load the model if it is not loaded, and keep it until `release`.

        Raises NotReadyError if it is not loaded in time.
        """
        await self._until_loaded(model)
        assert model.process is not None
        model.in_flight += 1
        return model.process

    def release(self, model: FrontModel) -> None:
        model.in_flight -= 1
        model.used = time.monotonic()
        self._freed.set()

    async def _until_loaded(self, model: FrontModel) -> None:
        model.waiting += 1
        try:
            async with asyncio.timeout(self._models.wait_seconds):
                while model.state != "loaded" or self._stopping:
                    self._check_not_stopping()
                    model.check_may_load()
                    await asyncio.wait((model.work or self._load_work(model),))
        except TimeoutError:
            raise NotReadyError(f"The model {model.plan.name!r} is not loaded yet.", param="model") from None
        finally:
            model.waiting -= 1

    def _check_not_stopping(self) -> None:
        if self._stopping:
            raise NotReadyError("The server is draining.")

    def load(self, model: FrontModel) -> None:
        """Start to load the model if it is not loaded. Raises NotReadyError while the server drains."""
        self._check_not_stopping()
        if model.state == "unloaded":
            model.forgive()
            self._load_work(model, asked=True)

    def unload(self, model: FrontModel) -> None:
        """Start to unload the model if it is loaded. Its requests end first. A load that runs is given up."""
        if model.state == "loading":
            if model.work is not None and not model.work.cancelling():  # a second cancel would not wait for the process
                model.work.cancel()
        elif model.state == "loaded":
            self._unload_work(model)

    # loading

    def _load_work(self, model: FrontModel, *, asked: bool = False) -> asyncio.Task[None]:
        """Start to load a model. asked: whether the operator asked for it; it then loads even if no request waits"""
        model.state = "loading"
        model.asked = asked
        return self._work(model, self._load(model))

    def _work(self, model: FrontModel, steps: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start the task that changes the model's state, and forget it when it has ended."""

        def ended(task: asyncio.Task[None]) -> None:
            model.work = None
            if model.state == "loading":  # cancelled before its first step, or after a failure
                model.state, model.process = "unloaded", None
            self._freed.set()

        model.work = asyncio.create_task(steps)
        model.work.add_done_callback(ended)
        return model.work

    async def _load(self, model: FrontModel) -> None:
        """Load the model. A failure is recorded, not raised."""
        began = time.monotonic()
        name = model.plan.name
        try:
            async with self._place:
                if not await self._make_room(model):
                    model.state = "unloaded"
                    return
                socket = self._directory / f"{next(self._numbers)}"
                process = model.process = ModelProcess(model.plan.config, socket)
                await process.start()
            model.read(await process.loaded())
        except ProcessEndedError as error:
            self._failed(model, error.status, served=0.0)
        except asyncio.CancelledError:
            await self._give_up(model)
            raise
        except Exception:
            logger.exception("the process of model %s could not be started", name)
            await self._give_up(model)
            self._failed(model, UNKNOWN, served=0.0)
        else:
            logger.info("model %s is loaded (%.1f s, process %s)", name, time.monotonic() - began, process.pid)
            model.state = "loaded"
            model.exit_status = None
            model.used = time.monotonic()
            self._keep(self._watch(model, process))

    async def _give_up(self, model: FrontModel) -> None:
        if model.process is not None:
            model.process.kill()
            await model.process.stop(self._end_seconds)
        model.state, model.process = "unloaded", None

    async def _make_room(self, wanted: FrontModel) -> bool:
        """Unload the least recently used models until there is room, and wait while every model is in use.

        Returns False if no request waits for `wanted` any more.
        """
        most = self._models.max_loaded
        while most is not None and sum(each.process is not None for each in self.all) >= most:
            if not (wanted.waiting or wanted.asked):
                return False
            self._freed.clear()
            free = [each for each in self.all if each.is_free]
            for model in sorted(free, key=lambda each: each.used):
                if await self._unload_if_free(model):
                    break
            else:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._freed.wait(), IDLE_LOOK_INTERVAL)  # nothing signals a batch's end
        return True

    async def _watch(self, model: FrontModel, process: ModelProcess) -> None:
        """Wait for the end of a loaded model's process, and record a failure unless the model was unloaded."""
        status = await process.ended()
        if model.state == "loaded" and not self._stopping:
            self._failed(model, status, served=time.monotonic() - process.since)
            self._freed.set()

    def _failed(self, model: FrontModel, status: int, served: float) -> None:
        delay = model.failed(status, served)
        model.state, model.process = "unloaded", None
        logger.error("the process of model %s ended with status %d", model.plan.name, status)
        if model.plan.entry.load == "start":
            self._keep(self._load_again(model, delay))

    async def _load_again(self, model: FrontModel, delay: float) -> None:
        await asyncio.sleep(delay)
        if model.state == "unloaded" and not self._stopping:
            self._load_work(model, asked=True)

    # unloading

    async def _unload_if_idle(self, model: FrontModel) -> None:
        limit = model.plan.entry.idle_seconds
        if limit is not None and model.is_free and time.monotonic() - model.used >= limit:
            await self._unload_if_free(model)

    async def _unload_if_free(self, model: FrontModel) -> bool:
        """Unload the model and wait for it, unless it works on a batch or a request has arrived meanwhile."""
        process = model.process
        if process is None or not await process.is_idle():
            return False
        if not model.is_free or model.process is not process:
            return False
        await asyncio.wait((self._unload_work(model),))
        return True

    def _unload_work(self, model: FrontModel) -> asyncio.Task[None]:
        model.state = "unloading"
        return self._work(model, self._unload(model))

    async def _unload(self, model: FrontModel) -> None:
        assert model.process is not None
        await model.process.stop(self._end_seconds)
        model.state, model.process = "unloaded", None
        logger.info("model %s is unloaded", model.plan.name)

    def _keep(self, steps: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(steps)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def stop(self) -> None:
        """Take no more requests, wait for the requests that run, and end all processes."""
        self._stopping = True
        loads = [each for each in self.all if each.state == "loading"]
        for model in loads:
            self.unload(model)
        await asyncio.gather(*(each.work for each in loads if each.work is not None), return_exceptions=True)
        for model in self.all:
            self.unload(model)
        await asyncio.gather(*(each.work for each in self.all if each.work is not None), return_exceptions=True)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
