"""Plot the latencies of a run, or of the trials at several rates. Needs the extra `bench`."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from jaxserve.bench.capacity import Limits, Trial
from jaxserve.bench.load import Timing
from jaxserve.errors import ConfigError
from jaxserve.system import install_command


def check_plot(path: Path) -> None:
    """Raise ConfigError without matplotlib, and if the file is not a PNG."""
    if path.suffix.lower() != ".png":
        raise ConfigError(f"--plot writes a PNG, and {path} has another ending")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib", fix=install_command("bench"))


def plot(timings: Sequence[Timing], path: Path) -> None:
    """Write the plot as PNG. `check_plot` must have passed."""
    from matplotlib.figure import Figure  # noqa: PLC0415 # pyright: ignore[reportMissingImports]

    good = [t for t in timings if t.error is None]
    figure = Figure(figsize=(9, 4), layout="constrained")
    for axis, name, values in zip(
        figure.subplots(1, 2),
        ("time to first token, ms", "time per output token, ms"),
        ([t.ttft for t in good], [t.tpot or 0.0 for t in good]),
        strict=True,
    ):
        axis.plot([t.sent for t in good], [value * 1e3 for value in values], ".")
        axis.set_xlabel("sent at, s")
        axis.set_ylabel(name)
    figure.savefig(path)


def plot_trials(trials: Sequence[Trial], limits: Limits, path: Path) -> None:
    """Write the 90th percentiles over the request rate as PNG, with the limits. `check_plot` must have passed."""
    from matplotlib.figure import Figure  # noqa: PLC0415 # pyright: ignore[reportMissingImports]

    ordered = sorted(trials, key=lambda each: each.rate)
    figure = Figure(figsize=(9, 4), layout="constrained")
    for axis, name, limit, spreads in zip(
        figure.subplots(1, 2),
        ("time to first token, p90, ms", "time per output token, p90, ms"),
        (limits.ttft, limits.gap),
        ([each.report.ttft_ms for each in ordered], [each.report.tpot_ms for each in ordered]),
        strict=True,
    ):
        points = [(each.rate, spread.p90) for each, spread in zip(ordered, spreads, strict=True) if spread is not None]
        axis.plot([rate for rate, _ in points], [value for _, value in points], "o-")
        if limit is not None:
            axis.axhline(limit * 1e3, linestyle="--")
        axis.set_xlabel("requests per second")
        axis.set_ylabel(name)
    figure.savefig(path)
