"""Carries out an operator's or a trainer's calls on a serving engine: replace weights, pause, free memory.

Every call runs between two steps, after the step in flight was read. Requests are accepted in every state; they wait
until steps run again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, get_args

import numpy as np

from jaxserve.engine.adapters import Adapters
from jaxserve.engine.core import EngineCore, adapters_off
from jaxserve.errors import InvalidValueError, JaxserveError, ServerError, WeightsLostError
from jaxserve.models.checkpoint.checkpoint import Checkpoint
from jaxserve.models.checkpoint.files import ModelFiles
from jaxserve.models.checkpoint.safetensors_file import read_contents
from jaxserve.models.checkpoint.structure import ModelStructure
from jaxserve.models.checkpoint.weight_sources import NamedTensors, WeightSource, directory_source, source_of
from jaxserve.runtime.weights import Place, Tick
from jaxserve.types.calls import (
    TAGS,
    EngineCall,
    LoadAdapter,
    Mode,
    Pause,
    ReadState,
    ReadWeights,
    Resume,
    SetWeightVersion,
    Sleep,
    Tag,
    UnloadAdapter,
    UpdateFromDirectory,
    UpdateFromFile,
    Wake,
)

MAX_LABEL = 128  # characters
MODES: tuple[Mode, ...] = get_args(Mode)


class DeviceState(Protocol):
    """The arrays of a runner other than its weights: KV cache, slots, hidden states."""

    def release(self) -> None: ...
    def rebuild(self) -> None: ...


class Weights(Protocol):
    """`DeviceWeights` of this process, or `LeaderWeights` of several hosts."""

    @property
    def structure(self) -> ModelStructure: ...
    @property
    def place(self) -> Place: ...
    def staged(self, source: WeightSource, tick: Tick = ...) -> WeightSource: ...
    def replace(self, source: WeightSource, tick: Tick = ...) -> None: ...
    def read(self, name: str, num_rows: int) -> np.ndarray: ...
    def to_host(self) -> None: ...
    def to_device(self) -> None: ...
    def drop(self) -> None: ...


class EngineControl:
    """Carries out the calls of an operator or a trainer.

    served: files of the model. on_progress: called repeatedly during a long call
    """

    def __init__(self, core: EngineCore, state: DeviceState, weights: Weights, served: ModelFiles) -> None:
        self._core = core
        self._state = state
        self._weights = weights
        self._served = served
        self.on_progress: Callable[[], None] = lambda: None

    def carry_out(self, call: EngineCall) -> Any:
        """Carry out a call of the API process. Returns plain data."""
        match call:
            case ReadState():
                return self.state()
            case ReadWeights():
                return self.read_weights(call.tensor, call.num_rows)
            case Pause():
                return self.pause(call.mode)
            case Resume():
                return self.resume()
            case Sleep():
                return self.sleep(call.level, call.mode, call.tags)
            case Wake():
                return self.wake(call.tags)
            case UpdateFromDirectory():
                return self.update_from_directory(call)
            case UpdateFromFile():
                return self.update_from_file(call)
            case SetWeightVersion():
                return self.set_version(call.version, call.running)
            case LoadAdapter():
                return self.adapters.load_directory(
                    call.adapter, call.path, replace=call.replace, pinned=call.pinned, digest=call.digest
                )
            case UnloadAdapter():
                return self.adapters.unload(call.adapter, missing_ok=call.missing_ok)
            case _:
                raise InvalidValueError(f"this engine has no call {call.name!r}")

    @property
    def adapters(self) -> Adapters:
        """The adapters of the engine. Raises InvalidValueError if it has room for none."""
        if self._core.adapters is None:
            raise adapters_off("lora_name")
        return self._core.adapters

    def state(self) -> dict[str, Any]:
        """Return whether the engine is paused, the tags of freed memory, and the label of the weights."""
        serving = self._core.serving
        return {
            "paused": serving.paused is not None,
            "asleep": sorted(serving.asleep),
            "version": serving.version,
        }

    # --- weights

    def update(
        self,
        given: Any,
        *,
        version: str | None = None,
        running: str | None = None,
        partial: bool = False,
        delete_old: bool = True,
    ) -> str:
        """Replace the weights by arrays in this process; see `Engine.update_weights`. Returns the new label."""
        source = source_of(given, self._weights.structure, partial=partial)
        return self._update(source, version, running, delete_old=delete_old)

    def update_from_directory(self, call: UpdateFromDirectory) -> str:
        """Replace the weights by a checkpoint directory. Returns the new label. If that fails, the old weights stay."""
        with old_weights_stay():
            source = directory_source(Path(call.path), self._weights.structure, self._served)
        return self._update(source, call.version, call.running, delete_old=False, number=call.number)

    def update_from_file(self, call: UpdateFromFile) -> str:
        """Replace the weights by the tensors of one safetensors file; see `Engine.update_weights`.

        Returns the new label. If the file cannot be read or does not fit, the old weights stay.
        """
        with old_weights_stay():
            contents = list(read_contents(Path(call.path)))
        names = [name for name, _ in contents]
        twice = {name for name in names if names.count(name) > 1} if len(set(names)) < len(names) else ()
        checkpoint = Checkpoint.of(Path("the update"), dict(contents), duplicate=twice)
        source = NamedTensors(self._weights.structure, checkpoint, partial=call.partial)
        return self._update(source, call.version, call.running, delete_old=False, number=call.number)

    def _update(
        self, source: WeightSource, version: str | None, running: str | None, *, delete_old: bool, number: int = 0
    ) -> str:
        core, serving = self._core, self._core.serving
        label = str(serving.num_updates + 1) if version is None else _checked_label(version)
        mode = _checked_mode(running or ("in_place" if serving.paused == "in_place" else "retract"))
        if not delete_old:
            with old_weights_stay():
                source = self._weights.staged(source, self.on_progress)
        self._stop_running(mode)
        core.scheduler.preempt_all(prompts_only=True)  # else one prompt's KV would be of both weights
        core.flush_prefix_cache(new_weights=True)
        try:
            with old_weights_stay():
                self._weights.replace(source, tick=self.on_progress)
        except WeightsLostError:
            serving.asleep.add("weights")
            raise
        serving.asleep.discard("weights")
        serving.num_updates += 1
        serving.updated = time.monotonic()
        serving.version, serving.weights = label, number
        return label

    def set_version(self, version: str, running: str | None = None) -> str:
        """Give the weights another label."""
        label = _checked_label(version)
        if running is not None:
            self._stop_running(_checked_mode(running))
        self._core.settle()
        self._core.serving.version = label
        return label

    def read_weights(self, name: str, num_rows: int) -> list[Any]:
        """Return the first `num_rows` rows of a checkpoint tensor, as nested lists, from the weights in use.

        Raises InvalidValueError, see `tensor_of`, and ConflictError if the weights are not on the devices.
        """
        return self._weights.read(name, num_rows).tolist()

    # --- pause

    def pause(self, mode: str = "abort") -> None:
        """Run no more steps until `resume`. mode: how running requests go on, see `types.calls.Mode`"""
        checked = _checked_mode(mode)
        self._stop_running(checked)
        self._core.serving.paused = checked

    def resume(self) -> None:
        """Run steps again, unless the engine is asleep."""
        self._core.serving.paused = None

    def _stop_running(self, mode: Mode) -> None:
        self._core.settle()
        if mode == "abort":
            self._core.abort_all()
        elif mode == "retract":
            self._core.scheduler.preempt_all()

    # --- memory

    def sleep(self, level: int = 1, mode: str = "abort", tags: Collection[str] = TAGS) -> list[Tag]:
        """Free the memory of the devices until `wake`. Returns the tags of all memory that is freed now.

        level: 1 moves the weights to the host's memory. 2 drops them: steps run again after the next update.
        mode: as in `pause`; no request keeps its KV. tags: the memory to free. Raises InvalidValueError, and
        ServerError if the host has no memory for the weights; the engine then serves on.
        """
        if level not in (1, 2):
            raise InvalidValueError(f"level is {level}; there are 1 and 2", param="level")
        checked = _checked_mode(mode)
        if checked == "in_place":
            raise InvalidValueError("no request keeps its KV while the engine sleeps; use retract", param="mode")
        serving, wanted = self._core.serving, _checked_tags(tags)
        self._stop_running(checked)
        if "weights" in wanted:  # first: if it fails, the engine serves on
            self._free_weights(level)
        if "kv_cache" in wanted and "kv_cache" not in serving.asleep:
            self._core.scheduler.recover()  # nothing is in flight, so this gives all pages back
            self._state.release()
        serving.asleep |= wanted
        return sorted(serving.asleep)

    def _free_weights(self, level: int) -> None:
        try:
            self._weights.to_host() if level == 1 else self._weights.drop()
        except Exception as error:  # the devices may raise anything if the host's memory is short
            raise ServerError(f"the engine cannot sleep: {type(error).__name__}: {error}") from error

    def wake(self, tags: Collection[str] = TAGS) -> list[Tag]:
        """Bring back the memory that `sleep` freed. Returns the tags still missing: dropped weights, until an update.

        Raises ServerError if the devices have no memory for it; the engine then sleeps on.
        """
        serving, wanted = self._core.serving, _checked_tags(tags)
        try:
            if "weights" in wanted & serving.asleep:
                self._weights.to_device()
                serving.asleep -= {"weights"} if self._weights.place == "device" else set()
            if "kv_cache" in wanted & serving.asleep:
                self._state.rebuild()
                serving.asleep.discard("kv_cache")
        except Exception as error:  # the devices may raise anything if memory is short
            if "kv_cache" in serving.asleep:  # otherwise the prefix cache still has its pages
                self._state.release()
            raise ServerError(f"the engine cannot wake: {type(error).__name__}: {error}") from error
        return sorted(serving.asleep)


@contextmanager
def old_weights_stay() -> Iterator[None]:
    """Raise ServerError for an exception in the body, which prepares new weights and replaces none.

    A JaxserveError passes unchanged. The others come from a file, the memory or a device.
    """
    try:
        yield
    except JaxserveError:
        raise
    except Exception as error:
        raise ServerError(f"the old weights stay: {type(error).__name__}: {error}") from error


def _checked_mode(mode: str) -> Mode:
    if mode not in MODES:
        raise InvalidValueError(f"mode is {mode!r}; there are {', '.join(MODES)}", param="mode")
    return MODES[MODES.index(mode)]


def _checked_tags(tags: Collection[str]) -> set[Tag]:
    unknown = set(tags) - set(TAGS)
    if unknown:
        raise InvalidValueError(f"there is no tag {min(unknown)!r}; there are {', '.join(TAGS)}", param="tags")
    return {tag for tag in TAGS if tag in tags}


def _checked_label(label: str) -> str:
    if not (isinstance(label, str) and 0 < len(label) <= MAX_LABEL and label.isprintable()):
        raise InvalidValueError(f"a weight version is a text of 1 to {MAX_LABEL} letters", param="weight_version")
    return label
