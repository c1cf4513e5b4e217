"""What the operator sees of a start: bars on a terminal, a line a phase elsewhere, then the ready card."""

from __future__ import annotations

import sys
import time

from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from jaxserve.engine.messages import EngineInfo
from jaxserve.engine.supervisor import EngineStatus

GIB = 2**30


class StartProgress:
    """Shows EngineStatus after EngineStatus; use as a context manager around the start."""

    def __init__(self, *, terminal: bool | None = None) -> None:
        self._terminal = sys.stderr.isatty() if terminal is None else terminal
        self._console = Console(stderr=True, soft_wrap=True)
        self._phase = ""
        self._phase_started = time.monotonic()
        self._last = EngineStatus("loading")
        self._task: TaskID | None = None
        self._bars = Progress(
            TextColumn("{task.description:18}"),
            BarColumn(),
            TextColumn("{task.fields[amount]}"),
            TimeElapsedColumn(),
            console=self._console,
        )

    def __enter__(self) -> StartProgress:
        if self._terminal:
            self._bars.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._finish_phase()
        self._bars.stop()

    def show(self, status: EngineStatus) -> None:
        if status.phase not in ("loading", "restarting") or not status.detail:
            return
        if status.detail != self._phase:
            self._finish_phase()
            self._phase, self._phase_started = status.detail, time.monotonic()
            if self._terminal:
                self._task = self._bars.add_task(status.detail, total=status.total or None, amount="")
        self._last = status
        if self._task is not None:
            self._bars.update(
                self._task, completed=status.done, total=status.total or None, amount=self._amount(status)
            )

    def _finish_phase(self) -> None:
        seconds = time.monotonic() - self._phase_started
        if self._phase and not self._terminal:
            print(
                f"jaxserve: {self._phase}: {self._amount(self._last)} {seconds:.1f} s",
                file=sys.stderr,
                flush=True,
            )
        self._phase = ""

    def _amount(self, status: EngineStatus) -> str:
        if status.unit == "bytes":
            rate = status.done / max(1e-9, time.monotonic() - self._phase_started) / 1e9
            return f"{status.done / GIB:.2f} GiB, {rate:.2f} GB/s"
        return f"{status.done}/{status.total} {status.unit}" if status.total else ""


def ready_card(info: EngineInfo, url: str, *, api_key: bool) -> str:
    """The text of the card: where, what, how much fits, how long the start took, and a line to try."""
    phases = " · ".join(f"{name} {seconds:.1f}" for name, seconds in info.seconds.items())
    concurrency = info.memory_plan.get("max_concurrency")
    path, body = _example(info)
    key = ' -H "Authorization: Bearer $KEY"' if api_key else ""
    rows = {
        "URL": f"{url}/v1",
        "model": f"{', '.join(info.served_names)} ({info.architecture}, {info.dtype})",
        "devices": f"{', '.join(info.devices)} · attention {info.attention}",
        "context": f"{info.max_model_len} tokens",
        "KV cache": f"{info.num_kv_tokens} tokens in {info.num_pages} pages of {info.page_size}",
        "concurrency": f"{info.max_num_seqs} requests at once, {concurrency} of full context",
        "memory": " · ".join(f"{k} {v / GIB:.2f} GiB" for k, v in info.memory_plan.items() if k.endswith("bytes")),
        "start": f"{sum(info.seconds.values()):.1f} s ({phases}); {info.num_programs} programs",
        "try": f"curl {url}{path} -H 'Content-Type: application/json'{key} -d '{body}'",
    }
    if (window := info.memory_plan.get("window")) is not None:
        rows["KV cache"] += f"; {info.memory_plan['num_window_pages']} of the layers with a window of {window}"
    if not info.num_pages:  # an encoder keeps nothing of a text
        del rows["KV cache"]
        rows["concurrency"] = f"{info.max_num_seqs} texts at once"
    return "\n".join(f"{name:12}{text}" for name, text in rows.items())


def _example(info: EngineInfo) -> tuple[str, str]:
    """Path and body of a request that works."""
    name = info.served_names[0]
    if info.is_embedding:
        return "/v1/embeddings", f'{{"model":"{name}","input":"What is the capital of France?"}}'
    message = '{"role":"user","content":"What is the capital of France?"}'
    return "/v1/chat/completions", f'{{"model":"{name}","messages":[{message}]}}'


def show_ready(info: EngineInfo, url: str, *, api_key: bool) -> None:
    card = ready_card(info, url, api_key=api_key)
    if sys.stdout.isatty():
        Console().print(Panel(card, title="jaxserve is ready", expand=False), soft_wrap=True, markup=False)
    else:
        print(f"jaxserve is ready\n{card}", flush=True)
