"""The page handover of an engine with the device of tests/fakes.py."""

from typing import Any

import numpy as np

from jaxserve.engine.core import EngineCore
from jaxserve.engine.page_handover import PageHandover
from tests.fakes import FakeRunner


class FakePages:
    """The pages of a FakeRunner, as PageHandover reads and writes those of a ModelRunner."""

    def __init__(self, runner: FakeRunner) -> None:
        self.pages = self
        self.caches = runner.pages
        self.page = (runner.pages[:1],)

    def export(self, caches: np.ndarray, page_ids: list[int]) -> list[np.ndarray]:
        return [caches[page_ids]]

    def fill(self, caches: np.ndarray, page_ids: list[int], pages: tuple[np.ndarray]) -> np.ndarray:
        caches[page_ids] = pages[0]
        return caches


def handover(core: EngineCore, runner: FakeRunner) -> PageHandover:
    pages: Any = FakePages(runner)
    return PageHandover(core, pages, "fake")
