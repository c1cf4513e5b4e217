"""What the operator sees of a start: a line for each phase with its time, then the ready card and a curl line.

Every line fits 80 columns unless a name in it is too long, and none is cut: what is shown can be copied.
"""

from __future__ import annotations

import json
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Mapping

import psutil
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from jaxserve.client.supervisor import EngineStatus
from jaxserve.types.messages import EngineInfo

GIB = 2**30
COLUMNS = 80  # of a terminal that nobody has made wider
LABEL = 12  # of these, before the text of a row of the card
FIRST_PHASE = "engine process"  # until it reports something: Python and JAX are imported
UNREMARKABLE = 0.5  # seconds; a shorter phase without an amount has no line of its own


class StartProgress:
    """Shows EngineStatus after EngineStatus; use as a context manager around the start.

    seconds: of each phase that has ended.
    """

    def __init__(self, *, terminal: bool | None = None) -> None:
        self.seconds: dict[str, float] = {}
        self._terminal = sys.stderr.isatty() if terminal is None else terminal
        self._console = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
        self._bar = Progress(
            TextColumn("  {task.description:16}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[amount]}"),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
        )
        self._task = self._bar.add_task("", total=None, amount="")

    def __enter__(self) -> StartProgress:
        if self._terminal:
            self._bar.start()
        self._begin(FIRST_PHASE)
        return self

    def __exit__(self, *exc: object) -> None:
        self._end()
        if self._terminal:
            self._bar.stop()

    def show(self, status: EngineStatus) -> None:
        """Show one status; a new phase ends the line of the one before."""
        if status.phase not in ("loading", "restarting") or not status.detail:
            return
        if status.detail != self._phase:
            self._end()
            self._begin(status.detail)
        self._last = status
        self._bar.update(self._task, completed=status.done, total=status.total or None, amount=self._amount())

    def _begin(self, phase: str) -> None:
        self._phase, self._started, self._last = phase, time.monotonic(), EngineStatus("loading")
        self._bar.reset(self._task, description=phase, total=None, amount="")

    def _end(self) -> None:
        seconds = time.monotonic() - self._started
        self.seconds[self._phase] = seconds
        amount = self._amount()
        if amount or seconds > UNREMARKABLE:
            self._console.print(f"  {self._phase:16}{amount:28}{seconds:6.1f} s")

    def _amount(self) -> str:
        last = self._last
        if last.unit == "bytes" and last.done:
            rate = last.done / max(1e-9, time.monotonic() - self._started) / 1e9
            return f"{last.done / GIB:.2f} GiB, {rate:.2f} GB/s"
        return f"{last.done}/{last.total}" if last.total else ""


def ready_card(
    info: EngineInfo, url: str, *, api_key: bool, seconds: Mapping[str, float] | None = None, total: float = 0.0
) -> str:
    """The text of the card: where, what, how much fits, how long the start took, and a line to try.

    seconds: of the phases of the start; total: seconds since the command began.
    """
    rows = {
        "URL": f"{url}/v1",
        "model": f"{', '.join(info.served_names)} ({info.architecture}, {info.dtype})",
        "device": f"{_devices(info.devices)}, attention {info.attention}",
        "memory": _memory(info),
        "requests": _requests(info),
    }
    if seconds:
        phases = ", ".join(f"{name} {value:.1f}" for name, value in seconds.items() if value >= 0.05)
        rows["start"] = "\n".ljust(LABEL + 1).join(textwrap.wrap(f"{total:.1f} s: {phases}", COLUMNS - LABEL))
    return "\n".join(
        [*(f"{name:{LABEL}}{text}" for name, text in rows.items()), "", curl_example(info, url, api_key=api_key)]
    )


def _devices(devices: list[str]) -> str:
    """ "gpu:0 NVIDIA H200" for one, "8 x NVIDIA H200" for several."""
    if len(devices) == 1:
        return devices[0]
    kinds = Counter(device.partition(" ")[2] for device in devices)
    return ", ".join(f"{count} x {kind}" for kind, count in kinds.items())


def _memory(info: EngineInfo) -> str:
    plan = info.memory_plan
    weights, kv = (plan.get(name, 0) / GIB for name in ("weight_bytes", "kv_bytes"))
    other = (plan.get("state_bytes", 0) + plan.get("scratch_bytes", 0)) / GIB
    text = f"{plan.get('device_bytes', 0) / GIB:.1f} GiB: weights {weights:.2f}, "
    if info.num_pages:  # an encoder keeps nothing of a text
        text += f"KV cache {kv:.2f} ({info.num_kv_tokens} tokens), "
    text += f"other {other:.2f}"
    if plan.get("window") is not None:
        text += f"; {plan['num_window_pages']} pages for windows of {plan['window']}"
    return text


def _requests(info: EngineInfo) -> str:
    if not info.num_pages:
        return f"{info.max_num_seqs} texts at once, of at most {info.max_model_len} tokens"
    full = info.memory_plan.get("max_concurrency", 0.0)
    return f"{info.max_num_seqs} at once, {full:.1f} of the full context of {info.max_model_len} tokens"


def curl_example(info: EngineInfo, url: str, *, api_key: bool) -> str:
    """A command that works when it is copied whole into a shell."""
    name = json.dumps(info.served_names[0])
    question = "What is the capital of France?"
    if info.is_embedding:
        path, body = "/v1/embeddings", [f'{{"model": {name},', f' "input": "{question}"}}']
    else:
        message = f'{{"role": "user", "content": "{question}"}}'
        path, body = "/v1/chat/completions", [f'{{"model": {name},', f' "messages": [{message}]}}']
    data = "\n".join(body).replace("'", "'\\''")
    lines = [f"curl {url}{path}", "  -H 'Content-Type: application/json'"]
    if api_key:
        lines.append('  -H "Authorization: Bearer $JAXSERVE_SERVER__API_KEY"')
    return " \\\n".join([*lines, f"  -d '{data}'"])


def show_ready(info: EngineInfo, url: str, *, api_key: bool, seconds: Mapping[str, float]) -> None:
    total = time.time() - psutil.Process().create_time()
    print(f"jaxserve is ready\n{ready_card(info, url, api_key=api_key, seconds=seconds, total=total)}", flush=True)
