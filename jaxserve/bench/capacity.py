"""Find the highest request rate at which a server keeps limits on its latencies.

A trial sends requests at one rate. It holds if enough of them got their first token and each token after it within the
limits. The rate doubles until a trial does not hold, and then the interval between the best rate that held and the
lowest that did not is halved (in logarithms) until it is narrow. Every trial has prompts of its own, so that no prefix
cache knows them from the trial before.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from itertools import pairwise

from jaxserve.bench.load import LoadReport, LoadRequest, LoadTarget, Timing, run_load, summarize

HIGHEST = 2.0**14  # requests per second
PAUSE = 1.0  # seconds between two trials, in which the server ends the requests of the first


@dataclass(frozen=True)
class Limits:
    """The limits in seconds, and the share of requests that must keep them.

    ttft: to the first token. gap: mean time of a token after it. None: no limit
    """

    ttft: float | None
    gap: float | None
    share: float


@dataclass(frozen=True)
class Trial:
    """The outcome at one rate.

    within: share of the requests that were within the limits, of those that had ended if the trial was given up
    given_up: the trial was ended as soon as too many requests were late
    alone: each request had ended before the next was sent, so that a lower rate would change nothing
    """

    rate: float  # requests per second that were sent
    holds: bool
    within: float
    given_up: bool
    alone: bool
    report: LoadReport


def is_within(timing: Timing, limits: Limits) -> bool:
    """Return whether a request got its answer within the limits."""
    if timing.error is not None:
        return False
    late_start = limits.ttft is not None and timing.ttft > limits.ttft
    return not late_start and (limits.gap is None or timing.tpot is None or timing.tpot <= limits.gap)


async def find_capacity(
    target: LoadTarget,
    workload: Callable[[float, int], list[LoadRequest]],
    limits: Limits,
    *,
    rate: float = 1.0,
    precision: float = 0.1,
) -> AsyncIterator[Trial]:
    """Yield the trials in the order in which they are made. The capacity is the highest rate that held.

    workload: returns the requests of a trial with their arrival times, for a rate and the number of the trial
    rate: of the first trial. precision: the search ends when the rate that does not hold is at most so much higher
    """
    held, failed = 0.0, math.inf
    number = 0
    while rate <= HIGHEST:
        trial = await _trial(target, workload(rate, number), rate, limits)
        yield trial
        number += 1
        if trial.holds:
            held = max(held, rate)
        else:
            failed = min(failed, rate)
        if (held and failed <= held * (1 + precision)) or (not held and trial.alone):
            return
        if not held:
            rate /= 2
        else:
            rate = rate * 2 if math.isinf(failed) else math.sqrt(held * failed)
        await asyncio.sleep(PAUSE)


async def _trial(target: LoadTarget, requests: list[LoadRequest], rate: float, limits: Limits) -> Trial:
    """Run one trial. It is given up when so many requests were late that it cannot hold any more."""
    allowed = len(requests) - math.ceil(limits.share * len(requests))
    done: list[Timing] = []
    too_late = asyncio.Event()

    def record(timing: Timing) -> None:
        done.append(timing)
        if sum(not is_within(each, limits) for each in done) > allowed:
            too_late.set()

    run = asyncio.ensure_future(run_load(target, requests, concurrency=None, on_done=record))
    watch = asyncio.ensure_future(too_late.wait())
    try:
        await asyncio.wait((run, watch), return_when=asyncio.FIRST_COMPLETED)
    finally:
        given_up = not run.done()
        run.cancel()
        watch.cancel()
        await asyncio.gather(run, watch, return_exceptions=True)
    if not given_up:
        run.result()  # raises what ended the run
    within = sum(is_within(each, limits) for each in done)
    seconds = max((each.ended for each in done), default=0.0) or 1e-9
    report = summarize(done, seconds, ttft_limit=limits.ttft, tpot_limit=limits.gap)
    holds = not given_up and within >= limits.share * len(requests)
    by_time = sorted(done, key=lambda each: each.sent)
    alone = all(before.ended <= after.sent for before, after in pairwise(by_time))
    return Trial(rate, holds, within / max(1, len(done)), given_up, alone, report)


def curve(trials: list[Trial], limits: Limits) -> str:
    """Return the trials by their rate, and the capacity that follows from them, as aligned lines."""
    lines = [f"{'requests/s':>10}{'within':>8}{'tokens/s':>10}{'ttft p50':>10}{'p90':>8}{'gap p50':>10}{'p90':>8}  ms"]
    for trial in sorted(trials, key=lambda each: each.rate):
        report = trial.report
        spreads = (report.ttft_ms, report.tpot_ms)
        times = [value for each in spreads for value in ((each.median, each.p90) if each else (math.nan, math.nan))]
        cells = "".join(f"{value:{width}.1f}" for value, width in zip(times, (10, 8, 10, 8), strict=True))
        end = "" if trial.holds else "  given up" if trial.given_up else "  too late"
        lines.append(f"{trial.rate:10.2f}{trial.within:8.0%}{report.output_rate:10.1f}{cells}{end}")
    best = max((trial.rate for trial in trials if trial.holds), default=0.0)
    what = [
        f"{name} within {value * 1e3:g} ms"
        for name, value in (("the first token", limits.ttft), ("a token after it", limits.gap))
        if value is not None
    ]
    lines.append(f"capacity: {best:.2f} requests/s, with {limits.share:.0%} of them: {' and '.join(what)}")
    if (error := next((each.report.first_error for each in trials if each.report.first_error), None)) is not None:
        lines.append(f"first error: {error}")
    return "\n".join(lines)
