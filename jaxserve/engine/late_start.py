"""Finishes a start while the engine serves: compiles programs in threads, then runs each once.

First runs happen only while no request is live. They run on padding, which changes no slot and no page.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

from jaxserve.engine.core import EngineCore
from jaxserve.runtime.compilation.compiler import WarmUp
from jaxserve.runtime.model_runner import ModelRunner
from jaxserve.types.scheduling import StepTimes

logger = logging.getLogger(__name__)

_END = object()


class LateStart:
    """Compiles the programs that the start left out, and tells the scheduler which ones are there.

    first: times that were measured before the engine was ready. share: part of the saturating rows that is useful
    """

    def __init__(self, core: EngineCore, runner: ModelRunner, first: StepTimes, share: float) -> None:
        self._core, self._runner, self._first, self._share = core, runner, first, share
        self._is_over = not runner.late.total
        self._runs: tuple[WarmUp, Iterator[object]] | None = None
        self._times: StepTimes | None = None

    def start(self) -> None:
        """Begin to compile the missing programs."""
        self._runner.late.start()

    @property
    def has_work(self) -> bool:
        """Return whether `proceed` would run a program now."""
        is_idle = not (self._core.live_ids or self._core.serving.halted)
        return not self._is_over and self._runner.late.is_complete and is_idle

    def proceed(self) -> None:
        """Let the scheduler cut steps to the programs that are there, and run one if no request is live."""
        if self._is_over:
            return
        self._core.scheduler.step_sizes = self._runner.extend_sizes
        if not self.has_work:
            return
        self._core.settle()
        if self._runs is None:
            warm_up = self._runner.padding_runs()
            self._runs = warm_up, warm_up.steps()
        if next(self._runs[1], _END) is _END:
            self._end(self._runs[0].times())

    def stats(self) -> dict[str, float]:
        """Return gauges of the engine: the number of programs, and the measured times."""
        total, late = self._runner.num_programs, self._runner.late
        stats = {"programs_total": float(total), "programs_ready": float(total - late.total + late.done)}
        if self._times is not None:
            most = self._runner.config.max_num_seqs
            stats["useful_rows"] = float(max(1, round(self._share * self._times.full_rows(most))))
        return stats

    def _end(self, times: StepTimes) -> None:
        times = times.like(self._first)
        self._times, self._is_over = times, True
        self._core.scheduler.batch_policy.retime(times)
        logger.debug("all %d programs are measured", self._runner.num_programs)
