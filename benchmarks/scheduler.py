"""Measure the scheduler: microseconds of CPU time per decode step, without a device or a model.

    python -m benchmarks.scheduler

A step is `schedule` of the next step, then `update` of the previous one, as in the engine. All requests only decode.
The CPU time of the thread excludes other work on the machine.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Iterable

import numpy as np

from jaxserve.scheduler.scheduler import Scheduler
from jaxserve.types.sampling import SamplingParams
from jaxserve.types.scheduling import GroupSizes, Reach, SchedulerConfig
from jaxserve.types.step import Request, SampledTokens, SchedulerOutput

ROWS = (1, 16, 64, 256, 1024, 2048)
_PAGE_SIZE = 16
_PROMPT = 32  # tokens
_WINDOW = 64  # tokens
_EOS = 0  # a token that the fake results never contain


def decode_step_seconds(num_rows: int, num_steps: int = 200, window: int | None = None) -> float:
    """Return the median CPU seconds of a step in which `num_rows` requests decode.

    One row in 16 takes a new page. With layers of a sliding window of `window` tokens it also frees one.
    """
    scheduler = decoding_scheduler(num_rows, num_steps + 8, window)
    previous = _schedule(scheduler)
    seconds = []
    gc.collect()
    for _ in range(num_steps):
        answer = fake_tokens(previous)
        began = time.thread_time()
        output = _schedule(scheduler)
        scheduler.update(previous, answer, 0.0)
        seconds.append(time.thread_time() - began)
        previous = output
    return statistics.median(seconds)


def fake_tokens(output: SchedulerOutput) -> SampledTokens:
    """Return results that end no request: token 1 for every row."""
    rows = len(output.rows)
    return SampledTokens(np.ones((rows, 1), np.int32), np.ones(rows, np.int32), np.zeros(rows, np.uint8))


def decoding_scheduler(num_rows: int, num_steps: int, window: int | None) -> Scheduler:
    """Return a scheduler with `num_rows` requests after their prefill, which have room for `num_steps` more tokens."""
    length = _PROMPT + 2 * num_rows + num_steps
    config = SchedulerConfig(
        num_pages=num_rows * (length // _PAGE_SIZE + 2),
        page_size=_PAGE_SIZE,
        max_num_seqs=num_rows,
        max_num_batched_tokens=num_rows + _PROMPT * max(1, num_rows // 4),
        max_model_len=length,
        groups=() if window is None else (GroupSizes(Reach("window", window), num_rows * (length // _PAGE_SIZE + 2)),),
    )
    scheduler = Scheduler(config, (_EOS,))
    for i in range(num_rows):
        # different lengths spread the new pages over the steps; different prompts share no prefix
        prompt = [i + 2] * (_PROMPT - i % _PAGE_SIZE)
        params = SamplingParams(max_tokens=length - _PROMPT, ignore_eos=False)
        scheduler.add(Request(f"r{i}", prompt, params, 0.0, seed=i, max_tokens=length - _PROMPT))
    while True:
        output = _schedule(scheduler)
        scheduler.update(output, fake_tokens(output), 0.0)
        if output.num_decode_rows == num_rows:
            return scheduler


def _schedule(scheduler: Scheduler) -> SchedulerOutput:
    output = scheduler.schedule(0.0)
    assert output is not None
    return output


def main(rows: Iterable[int] = ROWS) -> None:
    """Print a line per number of rows."""
    for num_rows in rows:
        seconds, windowed = decode_step_seconds(num_rows), decode_step_seconds(num_rows, window=_WINDOW)
        print(
            f"{num_rows:5d} rows  {seconds * 1e6:8.1f} us per step  {seconds / num_rows * 1e6:6.2f} us per row; "
            f"with windowed layers {windowed * 1e6:8.1f} us per step"
        )


if __name__ == "__main__":
    main()
