"""The administration of an engine over several hosts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jaxserve.engine.core.engine_control import EngineControl, old_weights_stay
from jaxserve.engine.core.serving_state import Mode
from jaxserve.engine.hosts.leading import Leader

PART_BYTES = 32 * 2**20  # of a file of weights in one frame


class GroupControl(EngineControl):
    """An EngineControl whose weights are on several hosts. An update is staged on all of them before any changes."""

    def __init__(self, leader: Leader, *args: Any) -> None:
        super().__init__(*args)
        self._leader = leader
        leader.tick = lambda: self.on_progress()

    def update_from_directory(
        self, path: str, version: str | None = None, running: Mode | None = None, number: int = 0
    ) -> str:
        """See `EngineControl`. Each host reads the directory of this name."""
        with self._staging():
            self._leader.on_followers("stage_directory", path=path)
            return super().update_from_directory(path, version, running, number)

    def update_from_file(
        self, path: str, version: str | None = None, running: Mode | None = None, partial: bool = False, number: int = 0
    ) -> str:
        """See `EngineControl`. The file's bytes are sent to the other hosts."""
        with self._staging():
            self._send_file(path)
            self._leader.on_followers("stage_file", partial=partial)
            return super().update_from_file(path, version, running, partial, number)

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
