"""The calls that a new engine process gets after a death, so that it is again as its operator left it.

Weights of a directory are loaded again, and the engine is paused or put to sleep again. Weights that came as bytes are
gone with the process: the new one has those of its start, and says so in its weight version.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

from jaxserve.client.replicas.engine_calls import changes_weights

logger = logging.getLogger(__name__)

Call = tuple[str, dict[str, Any]]

PAUSED = "scheduling"  # vLLM's name beside those of what sleeps


class ControlRecord:
    """The state that calls of engine/control.py have made. num_resumed: how often steps were made to run again"""

    def __init__(self) -> None:
        self._weights: Call | None = None  # the last update that can be repeated
        self._label: str | None = None  # given since then
        self._lost: str | None = None  # label of weights that cannot be loaded again
        self._mode: str | None = None  # how it is paused
        self._sleep: dict[str, Any] | None = None
        self._num_updates = 0
        self._num_begun = 0  # of all updates, also of those that failed
        self.num_resumed = 0

    @property
    def has_lost(self) -> bool:
        """Whether the weights cannot be loaded again."""
        return self._lost is not None

    @property
    def asleep(self) -> frozenset[str]:
        """What is not on the devices of a new engine after `calls`, and PAUSED if it is."""
        tags = frozenset() if self._sleep is None else frozenset(self._sleep["tags"])
        return tags if self._mode is None else tags | {PAUSED}

    def begun_update(self, args: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of the next update: with a number that no other has, and a label.

        An engine that is started again counts from the beginning, so it cannot choose them.
        """
        self._num_begun += 1
        own = {"number": self._num_begun}
        return args | own | ({"version": str(self._num_updates + 1)} if args.get("version") is None else {})

    def note(self, method: str, args: dict[str, Any], result: Any) -> None:
        """Take in a call that has succeeded."""
        self._num_updates += changes_weights(method)
        match method:
            case "update_from_directory":
                self._weights = method, {"path": args["path"], "version": result, "number": args["number"]}
                self._label = self._lost = None
            case "update_from_file":
                self._weights = self._label = None
                self._lost = result
            case "set_weight_version":
                self._label = result
            case "pause":
                self._mode = args.get("mode", "abort")
            case "resume":
                self._mode = None
                self.num_resumed += 1
            case "sleep":
                self._sleep = {"level": args.get("level", 1), "tags": result}
            case "wake":
                self._still_sleeps(result)
        if changes_weights(method):  # which puts them on the devices
            self._still_sleeps(self.asleep - {"weights", PAUSED})

    def _still_sleeps(self, tags: Collection[str]) -> None:
        if self._sleep is not None:
            self._sleep = self._sleep | {"tags": sorted(tags)} if tags else None

    def calls(self) -> list[Call]:
        """Return the calls for a new engine, in order."""
        if self._lost is not None:
            logger.error("the weights %r went with the engine: it has the weights of its start", self._lost)
            self._lost = self._label = None
        found = [self._weights] if self._weights is not None else []
        if self._label is not None:
            found.append(("set_weight_version", {"version": self._label}))
        if self._mode is not None:
            found.append(("pause", {"mode": self._mode}))
        if self._sleep is not None:
            found.append(("sleep", self._sleep | {"mode": "retract"}))
        return found
