"""The device suite: times of kernels, steps and the engine on this device, compared with the roofline.

    python -m jaxserve.bench.device [--chip v5e] [--tiny] [--seconds 540] [--out DIR] [--work DIR] [--only SECTION,...]

Writes DIR/device.json after every row. With the same DIR it measures only the rows that are missing. Every section runs
in a new process, so that a crash ends one cell only, memory is free for the next, and a start of the engine is real. A
cell that takes too long or ends its process is recorded, and another process runs the cells after it.
device_kernels.py, device_linear.py, device_experts.py, device_steps.py and device_engine.py hold the measurements.

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
from collections.abc import Callable, Sequence
from pathlib import Path

from jaxserve.bench.device_rows import ERROR_CHARS, Bench, Options, Reporter, Results, describe
from jaxserve.transport.child_process import child_environment, python_command

RESULTS = "device.json"
AUTOTUNE = "autotune"  # folder of the choices that XLA measured; a later run takes them over
ROW_PREFIX, CELL_PREFIX = "ROW ", "CELL "  # of a child's lines: a finished row; a cell that begins
# The most valuable first, because the time may run out. What may hang comes last, and in processes of its own.
SECTIONS = (
    "ceilings",
    "numerics",
    "steps-llama-8b",
    "steps_in_parts-llama-8b",
    "steps_async-llama-8b",
    "steps_cublas-llama-8b",
    "attention",
    "engine-llama-8b",
    "experts",
    "latent",
    "tune",
    "write",
    "restart-llama-8b",
    "linear",
    "engine-qwen3-0.6b",
    "pool-llama-8b",
    "numerics-mosaic_gpu",
    "attention-mosaic_gpu",
    "tune-mosaic_gpu",
)
_TPU = ("ceilings", "numerics", "steps-{0}", "attention", "engine-{0}", "restart-{0}", "write", "linear", "experts")
# A v5e has 16 GB, a v6e 32. "gpu" has all sections but those of the smaller model.
CHIPS = {
    "gpu": SECTIONS,
    "v5e": (*(name.format("llama-3b") for name in _TPU), "engine-qwen3-0.6b"),
    "v6e": (*(name.format("llama-8b") for name in _TPU), "engine-qwen3-0.6b", "pool-llama-8b"),
}
ALL_SECTIONS = tuple(dict.fromkeys(name for sections in CHIPS.values() for name in sections))
# Variants of the steps: XLA's own choice of what is in a CUDA graph; its newer client, which never waits; and products
# by cuBLASLt only, with which a layer has fewer kernels than with XLA's Triton (BENCHMARKS.md).
_XLA_GRAPHS = "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,CONDITIONAL"
_ENVIRONMENTS = {
    "steps_in_parts": {"XLA_FLAGS": f"--xla_gpu_enable_command_buffer={_XLA_GRAPHS}"},
    "steps_async": {"XLA_PYTHON_CLIENT_USE_TFRT_GPU_CLIENT": "1"},
    "steps_cublas": {"XLA_FLAGS": "--xla_gpu_enable_triton_gemm=false"},
}
Show = Callable[[str], None]


def run_section(section: str, options: Options, results: Results, reporter: Reporter) -> None:
    """Run all cells of a section in this process."""
    from jaxserve.bench import (  # noqa: PLC0415  the parent touches no device
        device_engine,
        device_experts,
        device_kernels,
        device_linear,
        device_steps,
    )

    bench = Bench(section, options, results, reporter)
    kind, _, of = section.partition("-")
    kernels = device_kernels.SECTIONS | device_experts.SECTIONS | device_linear.SECTIONS
    if kind in kernels:
        kernels[kind](bench)
    else:
        (device_steps.SECTIONS | device_engine.SECTIONS)[kind](bench, of)


class Watch:
    """Kills a child process whose cell takes longer than it may, or longer than the suite may."""

    def __init__(self, pid: int, until: float) -> None:
        self.cell: str | None = None  # the one that is being measured
        self.killed: str | None = None  # why
        self._pid, self._until = pid, until
        self._timer: threading.Timer | None = None
        self.begin(None, 120)  # to import jax and find the device

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


def _run_child(section: str, options: Options, show: Show) -> Watch | None:
    """Run a section in a new process, which writes its rows. Return its watch if the process did not end well."""
    command = python_command("jaxserve.bench.device", "--section", section, "--out", str(options.out))
    command += ["--work", str(options.work), "--until", str(options.until), *(["--tiny"] if options.tiny else [])]
    log = options.work / f"{section}.log"
    with log.open("w") as errors, subprocess.Popen(
        command, env=_environment(section, options), stdout=subprocess.PIPE, stderr=errors, text=True,
        start_new_session=True,
    ) as child:  # fmt: skip
        watch = Watch(child.pid, options.until)
        try:
            assert child.stdout is not None
            for line in child.stdout:
                if line.startswith(CELL_PREFIX):
                    watch.begin(*json.loads(line.removeprefix(CELL_PREFIX)))
                elif line.startswith(ROW_PREFIX):
                    watch.begin(None, 120)
                    show(describe(json.loads(line.removeprefix(ROW_PREFIX))))
                else:
                    show(line.rstrip())
        finally:
            watch.stop()
    if child.returncode == 0:
        return None
    watch.killed = watch.killed or f"ended with code {child.returncode}: {log.read_text()[-ERROR_CHARS:]}"
    return watch


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


def _environment(section: str, options: Options) -> dict[str, str]:
    added = dict(_ENVIRONMENTS.get(section.partition("-")[0], {}))
    kept = options.work / AUTOTUNE
    kept.mkdir(parents=True, exist_ok=True)
    flags = [added.get("XLA_FLAGS", ""), f"--xla_gpu_per_fusion_autotune_cache_dir={kept}"]
    return child_environment() | added | {"XLA_FLAGS": " ".join([os.environ.get("XLA_FLAGS", ""), *flags]).strip()}


def _bring_back(options: Options) -> None:
    """Put the choices of XLA's autotuner beside the results, so that the next machine need not measure them again."""
    with tarfile.open(options.out / f"{AUTOTUNE}.tgz", "w:gz") as archive:
        archive.add(options.work / AUTOTUNE, AUTOTUNE)


def main(words: Sequence[str] | None = None) -> int:
    """Run the suite, or one section of it in a child process; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--seconds", type=float, default=540)
    parser.add_argument("--out", type=Path, default=Path("device-suite"), help="folder of the results")
    parser.add_argument("--work", type=Path, help="folder of caches and models (default: DIR/work)")
    parser.add_argument("--chip", choices=CHIPS, default="gpu", help="the sections of a GPU, or of a TPU v5e or v6e")
    parser.add_argument("--only", help="sections, separated by commas (default: all of the chip's)")
    parser.add_argument("--section", choices=ALL_SECTIONS, help=argparse.SUPPRESS)  # used by the child process
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    given = parser.parse_args(words)
    options = Options(
        given.out.resolve(),
        (given.work or given.out / "work").resolve(),
        given.tiny,
        given.until or time.time() + given.seconds,
    )
    options.work.mkdir(parents=True, exist_ok=True)
    options.out.mkdir(parents=True, exist_ok=True)
    if given.section is not None:
        results = Results(options.out / RESULTS, tiny=options.tiny)
        run_section(given.section, options, results, Reporter(
            begin=lambda name, limit: print(CELL_PREFIX + json.dumps([name, limit]), flush=True),
            end=lambda row: print(ROW_PREFIX + json.dumps(row), flush=True),
        ))  # fmt: skip
        return 0
    sections = CHIPS[given.chip]
    wanted = given.only.split(",") if given.only else sections
    if unknown := set(wanted) - set(sections):
        parser.error(f"no section {', '.join(sorted(unknown))}; there are {', '.join(sections)}")
    try:
        for section in (section for section in sections if section in wanted):
            if options.until - time.time() > 5:
                _run_to_the_end(section, options, lambda line: print(line, flush=True))
    finally:
        _bring_back(options)
    print(f"{options.out / RESULTS}: {len(Results(options.out / RESULTS, tiny=options.tiny).rows)} rows")
    return 0


if __name__ == "__main__":
    sys.exit(main())
