"""The device suite: kernels, steps and a server on this device, compared with the roofline and with published marks.

    python -m benchmarks.device_suite [--run first|second] [--plan] [--tiny] [--seconds S] [--out DIR] [--work DIR]
    python -m benchmarks.device_suite --only SECTION,... | --chip v5e|v6e

--run first is made for eight minutes of a GPU and --run second for three more, which it spends by what the first left
in DIR; --plan prints the seconds that are expected and what is dropped first. Without --run all sections of the chip
are measured.

Writes DIR/device.json after every row. With the same DIR it measures only the rows that are missing. Every section runs
in a new process, so that a crash ends one cell only, memory is free for the next, and a start of the server is real. A
cell that takes too long or ends its process is recorded, and another process runs the cells after it.

--tiny runs everything in tiny sizes, with kernels in Pallas' interpreter. It checks the suite and measures nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from benchmarks.device_suite.rows import (
    ERROR_CHARS,
    RESULTS,
    Bench,
    Options,
    Planned,
    PlanningBench,
    Reporter,
    Results,
    describe,
)
from jaxserve.transport.child import child_environment

ROOT = Path(__file__).resolve().parent.parent.parent
AUTOTUNE = "autotune"  # folder of the choices that XLA measured; a later run takes them over
ROW_PREFIX, CELL_PREFIX = "ROW ", "CELL "  # of a child's lines: a finished row; a cell that begins
PROCESS_SECONDS = 8.0  # expected from the start of a section's process to its first cell
SILENT_SECONDS = 120.0  # in which a process begins its first or its next cell
# What each section answers. The most valuable first, because the time may run out. What may hang comes last.
SECTIONS = {
    "versions": "What machine is this?",
    "ceilings": "What can the device do at most?",
    "numerics": "Are the kernels that `auto` picks right on this device?",
    "numerics_weights": "Are the kernels of quantized weights and of experts right on this device?",
    "steps-llama-8b": "What is a step of the 8B worth at 1, 128 and 512 rows?",
    "serve-llama-8b": "What do clients of a server of the 8B get?",
    "steps-gpt-oss-20b": "What is a step with MXFP4 experts worth?",
    "serve_again-llama-8b": "How long is a second start?",
    "steps_async-llama-8b": "Does XLA's newer client, which never waits, make steps faster?",
    "steps_cublas-llama-8b": "Do products by cuBLASLt only make steps faster?",
    "steps_in_parts-llama-8b": "What is it worth that a step is one CUDA graph?",
    "attention": "How near is attention to the rates of the device?",
    "tune": "Do other tile sizes make attention faster?",
    "experts": "How near are layers of experts to the rates of the device?",
    "latent": "How near is latent attention to the rates of the device?",
    "linear": "How near are products to the rates of the device?",
    "write": "Is the write of K and V in place, and what does it take?",
    "engine-llama-8b": "What does the engine do without HTTP?",
    "restart-llama-8b": "How long is a second start of the engine?",
    "engine-qwen3-0.6b": "What does the engine do with a small model?",
    "pool-llama-8b": "What does a small pool of pages cost?",
    "numerics-mosaic_gpu": "Is the Mosaic kernel right?",
    "attention-mosaic_gpu": "Is the Mosaic kernel faster?",
    "tune-mosaic_gpu": "Do other tile sizes make the Mosaic kernel faster?",
}
_NUMERICS, _STEPS, _SERVE = "numerics", "steps-llama-8b", "serve-llama-8b"
FIRST = ("versions", "ceilings", _NUMERICS, "numerics_weights", _STEPS, _SERVE, "steps-gpt-oss-20b")
SECOND = (
    "serve_again-llama-8b",
    "steps_async-llama-8b",
    "steps_cublas-llama-8b",
    "attention",
    "tune",
    "steps_in_parts-llama-8b",
    "numerics-mosaic_gpu",
)
SECONDS = {"first": 480.0, "second": 180.0, None: 540.0}  # by run
_TPU = ("ceilings", "numerics", "steps-{0}", "attention", "engine-{0}", "restart-{0}", "write", "linear", "experts")
# A v5e has 16 GB, a v6e 32.
CHIPS = {
    "gpu": tuple(SECTIONS),
    "v5e": (*(name.format("llama-3b") for name in _TPU), "engine-qwen3-0.6b"),
    "v6e": (*(name.format("llama-8b") for name in _TPU), "engine-qwen3-0.6b", "pool-llama-8b"),
}
ALL_SECTIONS = tuple(dict.fromkeys(name for sections in CHIPS.values() for name in sections))
# Variants of the steps: XLA's own choice of what is in a CUDA graph; its newer client, which never waits; and products
# by cuBLASLt only, with which a layer has fewer kernels than with XLA's Triton (BENCHMARKS.md).
_XLA_GRAPHS = "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,CONDITIONAL"
ENVIRONMENTS = {
    "steps_in_parts": {"XLA_FLAGS": f"--xla_gpu_enable_command_buffer={_XLA_GRAPHS}"},
    "steps_async": {"XLA_PYTHON_CLIENT_USE_TFRT_GPU_CLIENT": "1"},
    "steps_cublas": {"XLA_FLAGS": "--xla_gpu_enable_triton_gemm=false"},
}
Show = Callable[[str], None]


# --- what is measured


def run_section(section: str, bench: Bench) -> None:
    """Run all cells of a section in this process, or let a PlanningBench take them down."""
    from benchmarks.device_suite import engine, experts, kernels, linear, serve, steps  # noqa: PLC0415  not the parent

    def weights(bench: Bench) -> None:
        """Compare the kernels of all that is not attention."""
        linear.numerics(bench)
        experts.numerics(bench)

    kind, _, of = section.partition("-")
    alone = kernels.SECTIONS | experts.SECTIONS | linear.SECTIONS | {"numerics_weights": weights}
    if kind in alone:
        alone[kind](bench)
    else:
        (steps.SECTIONS | serve.SECTIONS | engine.SECTIONS)[kind](bench, of)


def answers_of(section: str) -> str:
    """Return the question of a section, whichever model it is of."""
    kind = section.partition("-")[0]
    return SECTIONS.get(section) or next(text for name, text in SECTIONS.items() if name.partition("-")[0] == kind)


def plan(sections: Iterable[str], *, family: str = "gpu", tiny: bool = False) -> list[Planned]:
    """Return the cells of the sections in order. No device is touched."""
    cells: list[Planned] = []
    for section in sections:
        bench = PlanningBench(section, family, answers_of(section), tiny=tiny)
        run_section(section, bench)
        cells += bench.cells
    return cells


def needed(cells: Iterable[Planned], results: Results | None = None) -> float:
    """Return the seconds that the cells which are not optional are expected to take, without those that are done."""
    missing = [c for c in cells if not c.optional and not (results and results.done(c.section, c.name))]
    return sum(cell.estimate for cell in missing) + PROCESS_SECONDS * len({cell.section for cell in missing})


def print_plan(cells: Sequence[Planned], seconds: float, show: Show) -> None:
    """Show the cells with their seconds and their sum, and what is dropped first."""
    show(f"{'section':22} {'cell':34} {'s':>4} {'sum':>4}  answers")
    for index, cell in enumerate(cells):
        so_far = "   -" if cell.optional else f"{needed(cells[: index + 1]):4.0f}"
        show(f"{cell.section:22} {cell.name:34} {cell.estimate:4.0f} {so_far}  {cell.answers}")
    optional = [cell for cell in cells if cell.optional]
    spare = sum(cell.estimate for cell in optional)
    show(f"expected: {needed(cells):.0f} of {seconds:.0f} s, {PROCESS_SECONDS:.0f} of them for each section's process")
    show(f"optional (-), each run only while all that comes after it still fits: {len(optional)} cells, {spare:.0f} s")
    last = list(dict.fromkeys(cell.section for cell in reversed(cells)))
    show(f"dropped first: the optional cells, then whole cells from the end: {', '.join(last[:3])}")


def second_sections(results: Results, *, tiny: bool) -> list[str]:
    """Return the sections of the second run: those of the first with cells that are missing or failed, then others."""
    left = [c.section for c in plan(FIRST, tiny=tiny) if not c.optional and not results.done(c.section, c.name)]
    return [*(section for section in FIRST if section in left), *SECOND]


def attention_of(results: Results) -> str:
    """Return the attention of whole models: XLA's if `auto`'s kernel was wrong or hung, or if no step of it ran."""
    rows = [row for (section, name), row in results.rows.items() if section == _NUMERICS and " llama " in f"{name} "]
    wrong = any(row.get("ok") is False or "error" in row for row in rows if not row["name"].startswith("xla"))
    compiled = [
        row for (section, name), row in results.rows.items() if section == _STEPS and name.startswith("compile d")
    ]
    return "xla" if wrong or (compiled and all("error" in row for row in compiled)) else "auto"


# --- processes


class Watch:
    """Kills a child process whose cell takes longer than it may, or longer than the suite may."""

    def __init__(self, pid: int, until: float) -> None:
        self.cell: str | None = None  # the one that is being measured
        self.killed: str | None = None  # why
        self._pid, self._until = pid, until
        self._timer: threading.Timer | None = None
        self.begin(None, SILENT_SECONDS)  # to import jax and find the device

    def begin(self, cell: str | None, limit: float) -> None:
        """Give the child `limit` seconds from now, and not more than are left."""
        self.stop()
        self.cell = cell
        left = max(1.0, self._until - time.time() + 5)
        why = "the time was over" if left < limit else f"did not finish in {limit:.0f} s"
        self._timer = threading.Timer(min(left, limit), self._kill, (why,))
        self._timer.start()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _kill(self, why: str) -> None:
        self.killed = why
        os.killpg(self._pid, signal.SIGKILL)


def child_command(section: str, options: Options) -> list[str]:
    """Return the command that runs a section."""
    command = [sys.executable, "-m", "benchmarks.device_suite", "--section", section, "--out", str(options.out)]
    command += ["--work", str(options.work), "--until", str(options.until), "--kept", str(options.kept)]
    command += ["--attention", options.attention, "--chip", "gpu" if options.family == "gpu" else "v6e"]
    return [*command, *(["--tiny"] if options.tiny else [])]


def _run_child(section: str, options: Options, show: Show) -> Watch | None:
    """Run a section in a new process, which writes its rows. Return its watch if the process did not end well.

    The child ends with this process, even if that is killed: its input is a pipe.
    """
    log = options.work / f"{section}.log"
    with log.open("w") as errors, subprocess.Popen(
        child_command(section, options), env=_environment(section, options), cwd=ROOT, text=True, process_group=0,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
    ) as child:  # fmt: skip
        watch = Watch(child.pid, options.until)
        try:
            assert child.stdout is not None
            for line in child.stdout:
                if line.startswith(CELL_PREFIX):
                    planned = Planned(*json.loads(line.removeprefix(CELL_PREFIX)))
                    watch.begin(planned.name, planned.limit)
                    show(f"{planned.section:18} {planned.name:34} {planned.estimate:4.0f} s: {planned.answers}")
                elif line.startswith(ROW_PREFIX):
                    watch.begin(None, SILENT_SECONDS)
                    show(describe(json.loads(line.removeprefix(ROW_PREFIX))))
                    _bring_back(options)
                else:
                    show(line.rstrip())
            child.wait()
        finally:
            watch.stop()
            _end_group(child.pid)
    if child.returncode == 0:
        return None
    watch.killed = watch.killed or f"ended with code {child.returncode}: {log.read_text()[-ERROR_CHARS:]}"
    return watch


def _end_group(pid: int) -> None:
    """Kill what a section left running, a server for instance."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def _run_to_the_end(section: str, options: Options, show: Show) -> None:
    """Run a section. If a cell ends the process, run the cells after it in a new one, in at most three new ones."""
    for _ in range(4):
        watch = _run_child(section, options, show)
        if watch is None or watch.killed is None:
            return
        row = {"section": section, "name": watch.cell or "(between cells)", "error": watch.killed}
        row |= {"ended_process": watch.killed != "the time was over"}
        Results(options.out / RESULTS, tiny=options.tiny).add(row)
        show(describe(row))
        if watch.cell is None or options.until - time.time() < 5:
            return


def _run_all(sections: Sequence[str], options: Options, cells: Sequence[Planned], show: Show) -> None:
    """Run the sections, then those again that left something out for the sake of others. cells: of all of them"""
    for turn in range(2):
        for index, section in enumerate(sections):
            results = Results(options.out / RESULTS, tiny=options.tiny)
            own = [cell for cell in cells if cell.section == section]
            if options.until - time.time() <= 5 or (turn and all(results.done(section, cell.name) for cell in own)):
                continue
            later = [cell for cell in cells if cell.section in sections[index + 1 :]]
            attention = attention_of(results) if options.attention == "auto" else options.attention
            _run_to_the_end(section, options._replace(kept=needed(later, results), attention=attention), show)


def _environment(section: str, options: Options) -> dict[str, str]:
    added = dict(ENVIRONMENTS.get(section.partition("-")[0], {}))
    kept = options.work / AUTOTUNE
    flags = [added.get("XLA_FLAGS", ""), f"--xla_gpu_per_fusion_autotune_cache_dir={kept}"]
    return child_environment() | added | {"XLA_FLAGS": " ".join([os.environ.get("XLA_FLAGS", ""), *flags]).strip()}


def _bring_back(options: Options) -> None:
    """Put the choices of XLA's autotuner beside the results, so that the next machine need not measure them again."""
    temporary = options.out / f"{AUTOTUNE}.part"
    try:
        with tarfile.open(temporary, "w:gz") as archive:
            archive.add(options.work / AUTOTUNE, AUTOTUNE)
    except FileNotFoundError:  # XLA has just renamed a file; the next row brings it
        return
    temporary.replace(options.out / f"{AUTOTUNE}.tgz")


def _take_over(options: Options) -> None:
    """Unpack the choices of an earlier run, which lie beside its results, unless this machine has some."""
    kept, archive = options.work / AUTOTUNE, options.out / f"{AUTOTUNE}.tgz"
    if archive.exists() and not kept.exists():
        with tarfile.open(archive) as packed:
            packed.extractall(options.work, filter="data")
    kept.mkdir(parents=True, exist_ok=True)


# --- the command


def main(words: Sequence[str] | None = None) -> int:
    """Run the suite, or one section of it in a child process; return the exit code."""
    given = _parse(words)
    options = Options(
        given.out.resolve(),
        (given.work or given.out / "work").resolve(),
        given.tiny,
        given.until or time.time() + given.seconds,
        given.kept,
        given.attention,
        given.family,
    )
    show: Show = lambda line: print(line, flush=True)
    if given.plan:
        print_plan(plan(given.sections, family=given.family, tiny=given.tiny), given.seconds, show)
        return 0
    options.work.mkdir(parents=True, exist_ok=True)
    options.out.mkdir(parents=True, exist_ok=True)
    results = Results(options.out / RESULTS, tiny=options.tiny)
    if given.section is not None:
        _child(given.section, options, results)
        return 0
    _take_over(options)
    sections = given.sections
    if given.run == "second":
        sections = second_sections(results, tiny=given.tiny)
        show(f"second run, from what the first left: {', '.join(sections)}")
    try:
        _run_all(sections, options, plan(sections, family=given.family, tiny=given.tiny), show)
    finally:
        _bring_back(options)
    print(f"{options.out / RESULTS}: {len(Results(options.out / RESULTS, tiny=options.tiny).rows)} rows")
    return 0


def _child(section: str, options: Options, results: Results) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    reporter = Reporter(
        begin=lambda planned: print(CELL_PREFIX + json.dumps(planned), flush=True),
        end=lambda row: print(ROW_PREFIX + json.dumps(row), flush=True),
    )
    platform = "cpu"
    if not section.startswith("serve"):  # a server's process has the device to itself
        from jaxserve.runtime.mesh import find_devices  # noqa: PLC0415  the parent touches no device

        platform = find_devices()[0].platform  # sets the share of the memory, which the first use of a device fixes
    run_section(section, Bench(section, options, results, reporter, platform, answers_of(section)))


def _end_with_parent() -> None:
    """Wait until the parent ends, and then end this process and all that it started, as a server."""
    while os.read(0, 4096):  # not sys.stdin, whose lock the end of the interpreter would want
        pass
    os.killpg(0, signal.SIGKILL)


def _parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.device_suite",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--run", choices=("first", "second"))
    parser.add_argument("--plan", action="store_true", help="print what would be measured, and measure nothing")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--seconds", type=float, help="default: 480 of the first run, 180 of the second, else 540")
    parser.add_argument("--out", type=Path, default=Path("build/device-suite"), help="folder of the results")
    parser.add_argument("--work", type=Path, help="folder of caches and models (default: DIR/work)")
    parser.add_argument("--chip", choices=CHIPS, default="gpu", help="the sections of a GPU, or of a TPU v5e or v6e")
    parser.add_argument("--only", help="sections, separated by commas (default: all of the chip's)")
    parser.add_argument("--attention", default="auto", help="runtime.attention of whole models")
    parser.add_argument("--section", choices=ALL_SECTIONS, help=argparse.SUPPRESS)  # used by the child process
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--kept", type=float, default=0.0, help=argparse.SUPPRESS)
    given = parser.parse_args(words)
    given.seconds = SECONDS[given.run] if given.seconds is None else given.seconds
    given.family = "gpu" if given.chip == "gpu" else "tpu"
    sections = {"first": FIRST, "second": SECOND}.get(given.run, CHIPS[given.chip])
    wanted = given.only.split(",") if given.only else sections
    if unknown := set(wanted) - set(sections):
        parser.error(f"no section {', '.join(sorted(unknown))}; there are {', '.join(sections)}")
    given.sections = [section for section in sections if section in wanted]
    return given
