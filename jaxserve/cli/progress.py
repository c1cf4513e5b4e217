"""The terminal output of a start: one line per phase with its time, then the ready card and a curl command.

Every line fits 80 columns unless a name in it is too long, or it is an agent's command. No line is cut, so that
everything can be copied.

The line that points each client at this server. docs/clients.md shows the same lines; a test compares the two.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import re
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from jaxserve.cli.options import GIB, WIDTH
from jaxserve.client.supervisor import EngineStatus
from jaxserve.log import fields, is_json
from jaxserve.types.messages import EngineInfo

logger = logging.getLogger(__name__)

AGENT_CONTEXT = 32_768  # tokens; prompts of coding agents have 15,000 to 25,000
# Claude Code takes 200,000 tokens for granted and compacts shortly before. It can be told another window, of at least
# 100,000. In a smaller context it has to compact at a part of that: 80 % leave room for what comes in one turn.
CLAUDE_CODE_WINDOW = 100_000
COMPACTED_AT = 0.8
MAX_OUTPUT = 32_768  # tokens; OpenCode keeps them free for an answer
KEY_VARIABLE = "JAXSERVE_SERVER__API_KEY"

_CLAUDE_CODE = "ANTHROPIC_BASE_URL={url} ANTHROPIC_AUTH_TOKEN={key} ANTHROPIC_MODEL={model} " + "".join(
    f"ANTHROPIC_DEFAULT_{kind}_MODEL={{model}} " for kind in ("HAIKU", "SONNET", "OPUS")
)
_CODEX = '{{name="jaxserve",base_url="{url}/v1",env_key="OPENAI_API_KEY",wire_api="responses"}}'
_OPENCODE = (
    '{{"provider":{{"jaxserve":{{"npm":"@ai-sdk/openai-compatible",'
    '"options":{{"baseURL":"{url}/v1","apiKey":"{config_key}"}},'
    '"models":{{"{model}":{{"limit":{{"context":{context},"output":{output}}}}}}}}}}}}}'
)
LINES = {
    "Claude Code": f"{_CLAUDE_CODE}{{compact}} claude",
    "Codex": (
        "OPENAI_API_KEY={key} codex -m {model} -c model_context_window={context} -c model_provider=jaxserve "
        f"-c 'model_providers.jaxserve={_CODEX}'"
    ),
    "OpenCode": f"OPENCODE_CONFIG_CONTENT='{_OPENCODE}' opencode -m jaxserve/{{model}}",
    "aider": "aider --openai-api-base {url}/v1 --openai-api-key {key} --model openai/{model}",
    "Agents SDK": "OPENAI_BASE_URL={url}/v1 OPENAI_API_KEY={key} OPENAI_DEFAULT_MODEL={model} python agent.py",
    "LangChain": 'ChatOpenAI(base_url="{url}/v1", api_key="{key}", model="{model}")',
    "Open WebUI": "OPENAI_API_BASE_URL={url}/v1 OPENAI_API_KEY={key} open-webui serve",
    "LiteLLM": "LITELLM_MASTER_KEY=sk-{key} litellm --model hosted_vllm/{model} --api_base {url}/v1",
    "Continue": "{{name: {model}, provider: openai, model: {model}, apiBase: {url}/v1, apiKey: {key}}}",
    "Ollama's clients": "OLLAMA_HOST={url}",
}
_PLAIN = re.compile(r"[\w./:-]+", re.ASCII)
AGENTS = ("Claude Code", "Codex", "OpenCode", "aider")


def client_line(client: str, url: str, model: str, key: str, context: int) -> str:
    """Return the line of a client.

    url: of the server, without /v1. key: any text if the server has none; $NAME is a variable of the environment.
    context: tokens of the model's context.
    """
    config_key = f"{{env:{key[1:]}}}" if key.startswith("$") else key  # no shell reads the variable in a quoted text
    compact = f"CLAUDE_CODE_AUTO_COMPACT_WINDOW={max(context, CLAUDE_CODE_WINDOW)}"
    if context < CLAUDE_CODE_WINDOW:
        compact += f" CLAUDE_AUTOCOMPACT_PCT_OVERRIDE={int(100 * COMPACTED_AT * context) // CLAUDE_CODE_WINDOW}"
    output = min(MAX_OUTPUT, context // 4)
    values = {"config_key": config_key, "context": context, "output": output, "compact": compact}
    return LINES[client].format(url=url, model=model, key=key, **values)


def agent_lines(info: EngineInfo, url: str, *, api_key: bool) -> list[str]:
    """Return the lines of the coding agents, if their prompts fit into the context and a name needs no quoting.

    With a key of the server, a line before them names the variable that must have it.
    """
    names = [name for name in info.served_names if _PLAIN.fullmatch(name)]
    if info.is_embedding or info.max_model_len < AGENT_CONTEXT or not names:
        return []
    name = min(names, key=lambda name: "/" in name)  # agents cannot select a name with a slash
    key = f"${KEY_VARIABLE}" if api_key else "none"
    lines = [f"{client:12}{client_line(client, url, name, key, info.max_model_len)}" for client in AGENTS]
    return [f"in a shell with {KEY_VARIABLE} set to the server's key:", *lines] if api_key else lines


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
        if not (amount or seconds > SHORT):
            return
        if is_json():
            last = self._last
            named = {"phase": self._phase, "seconds": round(seconds, 3), "done": last.done, "unit": last.unit}
            logger.info("start: %s", self._phase, extra=fields(event="phase", **named))
        else:
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
    """Return the ready card: URL, model, device, memory, drafts, durations, a curl command, and how to start agents.

    seconds: of each phase of the start, from the command on
    """
    rows = {
        "URL": f"{url}/v1",
        "model": f"{', '.join(info.served_names)} ({info.architecture}, {info.dtype})",
        "device": f"{_devices(info.devices)}, attention {info.attention}",
        **({"mesh": info.split} if info.split else {}),
        "memory": _memory(info),
        "requests": _requests(info),
    }
    if info.drafter:
        rows["drafts"] = info.drafter
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
    for group in plan.get("groups", ()):
        text += f"; {group['num_pages']} pages for {group['kind']}s of {group['tokens']}"
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
    """Print the ready card, or log what it says."""
    if is_json():
        return logger.info("jaxserve is ready", extra=fields(**_ready_fields(info, url, progress.seconds)))
    card = ready_card(info, url, api_key=api_key, seconds=progress.seconds)
    print(f"jaxserve is ready\n{card}", flush=True)


def _ready_fields(info: EngineInfo, url: str, seconds: Mapping[str, float]) -> dict[str, Any]:
    return {
        "event": "ready",
        "url": url,
        "models": info.served_names,
        "task": info.task,
        "devices": info.devices,
        "split": info.split,
        "max_model_len": info.max_model_len,
        "max_num_seqs": info.max_num_seqs,
        "kv_tokens": info.num_kv_tokens,
        "memory_plan": info.memory_plan,
        "drafter": info.drafter,
        "seconds": round(sum(seconds.values()), 3),
        "phases": {name: round(value, 3) for name, value in seconds.items()},
    }


def command_began() -> float:
    """Return time.monotonic() when this process began, to 10 ms; psutil's time is rounded to a second."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])  # since the machine was started
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - age
