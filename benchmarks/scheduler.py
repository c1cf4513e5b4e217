"""What the scheduler costs: microseconds of one decode step, for a number of rows. No device and no model.

    python -m benchmarks.scheduler

A step is `schedule` and `update`, one ahead of the other as the engine runs them, on requests that only decode. CPU
time of the thread, so that other work on the machine does not count.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Iterable

import numpy as np

from jaxserve.scheduler.scheduler import Scheduler
from jaxserve.types.request import Request
from jaxserve.types.sampling import SamplingParams
from jaxserve.types.scheduler_config import SchedulerConfig
from jaxserve.types.step import SampledTokens, SchedulerOutput

ROWS = (1, 16, 64, 256, 1024, 2048)
_PAGE_SIZE = 16
_PROMPT = 32  # tokens
_WINDOW = 64  # tokens
_EOS = 0  # a token that the fake answers never hold


def decode_step_seconds(num_rows: int, num_steps: int = 200, window: int | None = None) -> float:
    """Median CPU seconds of a step in which `num_rows` requests decode; one row in 16 takes a new page, and with layers
    that see a window of so many tokens gives one back."""
    scheduler = _decoding_scheduler(num_rows, num_steps + 8, window)
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
    """An answer that ends no request: token 1 for every row."""
    rows = len(output.rows)
    return SampledTokens(np.ones((rows, 1), np.int32), np.ones(rows, np.int32), np.zeros(rows, np.uint8))


def _decoding_scheduler(num_rows: int, num_steps: int, window: int | None) -> Scheduler:
    """A scheduler whose `num_rows` requests have computed their prompts and have room for `num_steps` more tokens."""
    length = _PROMPT + 2 * num_rows + num_steps
    config = SchedulerConfig(
        num_pages=num_rows * (length // _PAGE_SIZE + 2),
        page_size=_PAGE_SIZE,
        max_num_seqs=num_rows,
        max_num_batched_tokens=num_rows + _PROMPT * max(1, num_rows // 4),
        max_model_len=length,
        window=window,
        num_window_pages=num_rows * (length // _PAGE_SIZE + 2),
    )
    scheduler = Scheduler(config, (_EOS,))
    for i in range(num_rows):
        # lengths differ so that page borders do not all fall into one step, prompts so that none is shared
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
    for num_rows in rows:
        seconds, windowed = decode_step_seconds(num_rows), decode_step_seconds(num_rows, window=_WINDOW)
        print(
            f"{num_rows:5d} rows  {seconds * 1e6:8.1f} us a step  {seconds / num_rows * 1e6:6.2f} us a row; "
            f"with windowed layers {windowed * 1e6:8.1f} us a step"
        )


if __name__ == "__main__":
    main()
