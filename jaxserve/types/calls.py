"""Calls to an engine and to a worker process: a struct for each, with its arguments and what it changes.

    api/sglang/weights.py       makes most calls to the engine
    client/replica_set.py       makes a call to every engine of the server
    client/control.py           keeps the calls that an engine gets again after its death
    engine/server.py            hands a call to what carries it out, which is engine/control.py for most

A call crosses the socket as `messages.Call` and is answered by one `messages.Reply`. A new call is a struct here, a
line where it is carried out, and what makes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import msgspec

# How running requests go on: they end; they return to the queue and are computed again; they keep their KV.
Mode = Literal["abort", "retract", "in_place"]
Tag = Literal["weights", "kv_cache"]  # a part of the devices' memory that can be freed
TAGS: tuple[Tag, ...] = ("weights", "kv_cache")

PAUSED = "scheduling"  # vLLM's name for it, beside the names of the parts that sleep


class _EngineCall(msgspec.Struct, frozen=True, omit_defaults=True):
    """A call that every engine of a server carries out."""

    reads: ClassVar[bool] = False  # it changes nothing, so engines that are down are left out
    changes_weights: ClassVar[bool] = False

    @property
    def name(self) -> str:
        return str(self.__struct_config__.tag)

    def joined(self, results: Sequence[Any]) -> Any:
        """Return the answer of all engines. results: the answer of each, at least one"""
        return results[0]

    def asleep_after(self, asleep: frozenset[str], result: Any) -> frozenset[str]:
        """Return the parts that are not on the devices of an engine which has carried out the call; PAUSED if paused.

        asleep: the parts before it. result: the engine's answer
        """
        return asleep


class FlushCache(_EngineCall, frozen=True, tag="flush_cache"):
    """Drop the prefix cache."""


class ListWaiting(_EngineCall, frozen=True, tag="waiting"):
    """Answered by a list of `messages.WaitingRequest`."""

    reads = True

    def joined(self, results: Sequence[Any]) -> Any:
        return [request for result in results for request in result]


class ReadState(_EngineCall, frozen=True, tag="state"):
    """Answered by whether the engine is paused, the tags of freed memory, and the label of the weights."""

    reads = True

    def joined(self, results: Sequence[Any]) -> Any:
        paused = all(result["paused"] for result in results)
        return results[0] | {"paused": paused, "asleep": sorted({tag for each in results for tag in each["asleep"]})}


class ReadWeights(_EngineCall, frozen=True, tag="read_weights"):
    """Answered by the first `num_rows` rows of a checkpoint tensor, as nested lists."""

    reads = True

    tensor: str
    num_rows: int


class Pause(_EngineCall, frozen=True, tag="pause"):
    """Run no more steps until `Resume`."""

    mode: str = "abort"  # a Mode

    def asleep_after(self, asleep: frozenset[str], result: Any) -> frozenset[str]:
        return asleep | {PAUSED}


class Resume(_EngineCall, frozen=True, tag="resume"):
    """Run steps again."""

    def asleep_after(self, asleep: frozenset[str], result: Any) -> frozenset[str]:
        return asleep - {PAUSED}


class _MovesMemory(_EngineCall, frozen=True):
    """Answered by the tags of all memory that is not on the devices now."""

    def joined(self, results: Sequence[Any]) -> Any:
        return sorted({tag for result in results for tag in result})

    def asleep_after(self, asleep: frozenset[str], result: Any) -> frozenset[str]:
        return asleep & {PAUSED} | frozenset(result)


class Sleep(_MovesMemory, frozen=True, tag="sleep"):
    """Free memory of the devices until `Wake`. level: 1 moves the weights to the host's memory, 2 drops them"""

    level: int = 1
    mode: str = "abort"  # a Mode
    tags: tuple[str, ...] = TAGS


class Wake(_MovesMemory, frozen=True, tag="wake"):
    """Bring back memory that `Sleep` freed."""

    tags: tuple[str, ...] = TAGS


class _ReplacesWeights(_EngineCall, frozen=True, kw_only=True):
    """Answered by the label of the new weights, which are on the devices even if the old ones slept.

    version: their label; None: the number of the update. running: a Mode; None: chosen by the engine
    number: of the update, see `ServingState.weights`
    """

    changes_weights = True

    version: str | None = None
    running: str | None = None
    number: int = 0

    def asleep_after(self, asleep: frozenset[str], result: Any) -> frozenset[str]:
        return asleep - {"weights"}


class UpdateFromDirectory(_ReplacesWeights, frozen=True, tag="update_from_directory"):
    """Replace the weights by a checkpoint directory."""

    path: str


class UpdateFromFile(_ReplacesWeights, frozen=True, tag="update_from_file"):
    """Replace the weights by the tensors of a safetensors file. partial: parameters that it lacks stay"""

    path: str
    partial: bool = False


Update = UpdateFromDirectory | UpdateFromFile


class SetWeightVersion(_EngineCall, frozen=True, tag="set_weight_version"):
    """Give the weights another label. Answered by it. running: a Mode; None: running requests go on"""

    version: str
    running: str | None = None


class LoadAdapter(_EngineCall, frozen=True, tag="load_adapter"):
    """Load an adapter of a directory. Answered by its `messages.AdapterStatus`.

    adapter: its name. replace: whether it replaces one that has the name; else that is an error
    digest: the one that its tensors must have; empty: any
    """

    adapter: str
    path: str
    replace: bool = False
    pinned: bool = False
    digest: str = ""


class UnloadAdapter(_EngineCall, frozen=True, tag="unload_adapter"):
    """Forget an adapter. Requests that have begun with it go on. missing_ok: it may be unknown"""

    adapter: str
    missing_ok: bool = False


class WritePages(_EngineCall, frozen=True, tag="write_pages"):
    """Write the cached pages of a prompt to a file. Answered by the number of their tokens."""

    path: str
    token_ids: list[int]
    namespace: str = ""


class ReadPages(_EngineCall, frozen=True, tag="read_pages"):
    """Put pages of a file into the prefix cache. Answered by the number of their tokens. most: pages; None: all"""

    path: str
    most: int | None = None


EngineCall = (
    FlushCache
    | ListWaiting
    | ReadState
    | ReadWeights
    | Pause
    | Resume
    | Sleep
    | Wake
    | UpdateFromDirectory
    | UpdateFromFile
    | SetWeightVersion
    | LoadAdapter
    | UnloadAdapter
    | WritePages
    | ReadPages
)


class _WorkerCall(msgspec.Struct, frozen=True):
    """A call of the main process to a worker that serves HTTP."""

    @property
    def name(self) -> str:
        return str(self.__struct_config__.tag)


class IsAlive(_WorkerCall, frozen=True, tag="is_alive"):
    """Answered by True."""


class Prepare(_WorkerCall, frozen=True, tag="prepare"):
    """Answered once the worker answers requests without delay. The engine must be ready."""


class AbortRequests(_WorkerCall, frozen=True, tag="abort_requests"):
    """Abort the requests of an owner whose ids begin with `prefix`. Answered by their ids. owner: None means any"""

    prefix: str
    owner: str | None


class ReadMetrics(_WorkerCall, frozen=True, tag="metrics"):
    """Answered by the families of the worker's registry."""


class Finish(_WorkerCall, frozen=True, tag="finish"):
    """Accept no more requests, end the open answers and exit."""


WorkerCall = IsAlive | Prepare | AbortRequests | ReadMetrics | Finish
