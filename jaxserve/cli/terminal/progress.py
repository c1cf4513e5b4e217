"""The terminal output of a start: one line per phase with its time, then the ready card and a curl command.

Every line fits 80 columns unless a name in it is too long, or it is an agent's command. No line is cut, so that
everything can be copied.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from jaxserve.cli.options.help import GIB, WIDTH
from jaxserve.cli.terminal.client_lines import agent_lines
from jaxserve.client.supervisor import EngineStatus
from jaxserve.types.messages import EngineInfo

LABEL = 12  # columns of a row's name in the card
FIRST_PHASE = "imports"  # of the server and of the engine process, before its first status
LAST_PHASE = "server"  # its own first runs, after the engine's
SHORT = 0.5  # seconds; a shorter phase without an amount is not printed


class StartProgress:
    """Shows the engine's status during the start, as a context manager.

    began: time.monotonic() when the first phase began; None: now
    seconds: duration of each phase that has ended. They follow one another without a gap
    """

    def __init__(self, *, terminal: bool | None = None, began: float | None = None) -> None:
        self.seconds: dict[str, float] = {}
        self._ended = time.monotonic() if began is None else began
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
        """Show one status. A new phase ends the line of the previous one."""
        if status.phase not in ("loading", "restarting") or not status.detail:
            return
        if status.detail != self._phase:
            self._end()
            self._begin(status.detail)
        self._last = status
        self._bar.update(self._task, completed=status.done, total=status.total or None, amount=self._amount())

    def _begin(self, phase: str) -> None:
        self._phase, self._started, self._last = phase, self._ended, EngineStatus("loading")
        self._bar.reset(self._task, description=phase, total=None, amount="")

    def _end(self) -> None:
        self._ended = time.monotonic()
        self.seconds[self._phase] = seconds = self.seconds.get(self._phase, 0.0) + self._ended - self._started
        amount = self._amount()
        if amount or seconds > SHORT:
            self._console.print(f"  {self._phase:16}{amount:28}{seconds:6.1f} s")

    def add(self, phase: str) -> None:
        """Count the time since the last phase ended as one more."""
        self._begin(phase)
        self._ended = time.monotonic()
        self.seconds[phase] = self._ended - self._started

    def _amount(self) -> str:
        last = self._last
        if last.unit == "bytes" and last.done:
            rate = last.done / max(1e-9, time.monotonic() - self._started) / 1e9
            return f"{last.done / GIB:.2f} GiB, {rate:.2f} GB/s"
        return f"{last.done}/{last.total}" if last.total else ""


def ready_card(info: EngineInfo, url: str, *, api_key: bool, seconds: Mapping[str, float] | None = None) -> str:
    """Return the ready card: URL, model, device, memory, durations, a curl command, and how to start agents.

    seconds: of each phase of the start, from the command on
    """
    rows = {
        "URL": f"{url}/v1",
        "model": f"{', '.join(info.served_names)} ({info.architecture}, {info.dtype})",
        "device": f"{_devices(info.devices)}, attention {info.attention}",
        "memory": _memory(info),
        "requests": _requests(info),
    }
    if seconds:
        rows["start"] = "\n".ljust(LABEL + 1).join(textwrap.wrap(_phases(seconds), WIDTH - LABEL))
    shown = [f"{name:{LABEL}}{text}" for name, text in rows.items()]
    agents = agent_lines(info, url, api_key=api_key)
    examples = ["", curl_example(info, url, api_key=api_key), *(["", *agents] if agents else [])]
    return "\n".join([*shown, *examples])


def _phases(seconds: Mapping[str, float]) -> str:
    """Return the time of all phases and of each, in tenths of a second that add up: differences of rounded ends."""
    ends = [0.0, *(round(end, 1) for end in itertools.accumulate(seconds.values()))]
    tenths = [end - begin for begin, end in itertools.pairwise(ends)]
    parts = [f"{name} {value:.1f}" for name, value in zip(seconds, tenths, strict=True) if value > 0.05]
    return f"{ends[-1]:.1f} s: {', '.join(parts)}"


def _devices(devices: list[str]) -> str:
    """Return "gpu:0 NVIDIA H200" for one device, "8 x NVIDIA H200" for several."""
    if len(devices) == 1:
        return devices[0]
    kinds = Counter(device.partition(" ")[2] for device in devices)
    return ", ".join(f"{count} x {kind}" for kind, count in kinds.items())


def _memory(info: EngineInfo) -> str:
    plan = info.memory_plan
    weights, kv = (plan.get(name, 0) / GIB for name in ("weight_bytes", "kv_bytes"))
    other = (plan.get("state_bytes", 0) + plan.get("scratch_bytes", 0)) / GIB
    text = f"{plan.get('device_bytes', 0) / GIB:.1f} GiB: weights {weights:.2f}, "
    if info.num_pages:  # an encoder has no KV cache
        text += f"KV cache {kv:.2f} ({info.num_kv_tokens} tokens), "
    text += f"other {other:.2f}"
    if plan.get("num_host_pages"):
        text += f"; {plan['num_host_pages'] * info.page_size} more tokens in the memory of the host"
    if plan.get("window") is not None:
        text += f"; {plan['num_window_pages']} pages for windows of {plan['window']}"
    return text


def _requests(info: EngineInfo) -> str:
    if not info.num_pages:
        return f"{info.max_num_seqs} texts at once, of at most {info.max_model_len} tokens"
    full = info.memory_plan.get("max_concurrency", 0.0)
    return f"{info.max_num_seqs} at once, {full:.1f} of the full context of {info.max_model_len} tokens"


def curl_example(info: EngineInfo, url: str, *, api_key: bool) -> str:
    """Return a shell command that sends one request."""
    name = json.dumps(info.served_names[0])
    question = "What is the capital of France?"
    if info.task != "generate":
        path = "/v1/embeddings" if info.task == "embed" else "/v1/classify"
        body = [f'{{"model": {name},', f' "input": "{question}"}}']
    else:
        message = f'{{"role": "user", "content": "{question}"}}'
        path = "/v1/chat/completions"
        body = [f'{{"model": {name},', ' "temperature": 0,', f' "messages": [{message}]}}']
    data = "\n".join(body).replace("'", "'\\''")
    lines = [f"curl {url}{path}", "  -H 'Content-Type: application/json'"]
    if api_key:
        lines.append('  -H "Authorization: Bearer $JAXSERVE_SERVER__API_KEY"')
    return " \\\n".join([*lines, f"  -d '{data}'"])


def show_ready(info: EngineInfo, url: str, *, api_key: bool, progress: StartProgress) -> None:
    """Print the ready card."""
    card = ready_card(info, url, api_key=api_key, seconds=progress.seconds)
    print(f"jaxserve is ready\n{card}", flush=True)


def command_began() -> float:
    """Return time.monotonic() when this process began, to 10 ms; psutil's time is rounded to a second."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])  # since the machine was started
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - age
