"""Summarize timings: percentiles, throughput, goodput; as a table and as JSON. Describe the environment."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from jaxserve.bench.load import Timing
from jaxserve.errors import ConfigError
from jaxserve.version import __version__


@dataclass(frozen=True, slots=True)
class Spread:
    """Statistics of a sample in milliseconds."""

    mean: float
    median: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Spread | None:
        if not seconds:
            return None
        ms = np.asarray(seconds) * 1e3
        points = [float(np.mean(ms)), *(float(p) for p in np.percentile(ms, [50, 90, 99])), float(np.max(ms))]
        return cls(*(round(point, 3) for point in points))


@dataclass(frozen=True, slots=True)
class LoadReport:
    completed: int
    failed: int
    seconds: float
    request_rate: float  # completed per second
    prompt_tokens: int
    output_tokens: int
    output_rate: float  # tokens per second
    total_rate: float  # prompt and output tokens per second
    goodput: float | None  # requests per second within the limits; None without limits
    ttft_ms: Spread | None
    tpot_ms: Spread | None
    itl_ms: Spread | None  # gaps between two chunks
    e2e_ms: Spread | None
    first_error: str | None


def summarize(
    timings: Sequence[Timing], seconds: float, *, ttft_limit: float | None = None, tpot_limit: float | None = None
) -> LoadReport:
    """Summarize a run. A request counts for goodput if it is within both limits, in seconds."""
    good = [t for t in timings if t.error is None]
    output = sum(t.output_tokens for t in good)
    prompt = sum(t.prompt_tokens for t in good)
    limited = ttft_limit is not None or tpot_limit is not None
    within = sum(_within(t.ttft, ttft_limit) and _within(t.tpot, tpot_limit) for t in good)
    return LoadReport(
        completed=len(good),
        failed=len(timings) - len(good),
        seconds=round(seconds, 3),
        request_rate=round(len(good) / seconds, 3),
        prompt_tokens=prompt,
        output_tokens=output,
        output_rate=round(output / seconds, 2),
        total_rate=round((prompt + output) / seconds, 2),
        goodput=round(within / seconds, 3) if limited else None,
        ttft_ms=Spread.of([t.ttft for t in good]),
        tpot_ms=Spread.of([t.tpot for t in good if t.tpot is not None]),
        itl_ms=Spread.of([gap for t in good for gap in t.gaps]),
        e2e_ms=Spread.of([t.ended - t.sent for t in good]),
        first_error=next((t.error for t in timings if t.error is not None), None),
    )


def _within(value: float | None, limit: float | None) -> bool:
    return limit is None or value is None or value <= limit


def table(report: LoadReport) -> str:
    """Return the report as aligned lines."""
    lines = [
        f"completed {report.completed}, failed {report.failed}, in {report.seconds:.2f} s",
        f"output {report.output_rate:.1f} tokens/s, total {report.total_rate:.1f} tokens/s, "
        f"{report.request_rate:.2f} requests/s"
        + (f", goodput {report.goodput:.2f}/s" if report.goodput is not None else ""),
        f"{'ms':28}{'mean':>10}{'median':>10}{'p90':>10}{'p99':>10}{'max':>10}",
    ]
    names = {
        "time to first token": report.ttft_ms,
        "time per output token": report.tpot_ms,
        "gap between chunks": report.itl_ms,
        "end to end": report.e2e_ms,
    }
    for name, spread in names.items():
        if spread is not None:
            lines.append(f"{name:28}" + "".join(f"{value:10.1f}" for value in asdict(spread).values()))
    if report.first_error is not None:
        lines.append(f"first error: {report.first_error}")
    return "\n".join(lines)


def environment() -> dict[str, Any]:
    """Return the versions and the machine, to print beside every figure."""
    packages = {"jaxserve": __version__}
    for name in ("jax", "jaxlib", "flax", "numpy"):
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            continue
    return {
        "python": platform.python_version(),
        "packages": packages,
        "machine": platform.machine(),
        "processor": _processor(),
        "cores": os.cpu_count(),
    }


def write_json(record: dict[str, Any], path: Path | None, details: dict[str, Any] | None = None) -> None:
    """Print a record with the environment as one JSON line, and write it to `path` together with `details`.

    Raises ConfigError if it cannot be written.
    """
    record = {"environment": environment()} | record
    print(orjson.dumps(record).decode())
    if path is not None:
        try:
            path.write_bytes(orjson.dumps(record | (details or {})))
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}") from None


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()
