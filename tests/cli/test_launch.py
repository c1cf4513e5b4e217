"""`jaxserve launch` as an operator meets it: a real process, its ready card, its end, and its errors in one line."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx2
import pytest

from tests.conftest import SMALL
from tests.waiting import LAST_RESORT

FLAGS = [word for key, value in SMALL.items() for word in (f"--{key.replace('_', '-')}", str(value))]


def launch(*flags: str, cache: str | None = None, cwd: Path | None = None, **environ: str) -> subprocess.Popen[str]:
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "JAXSERVE_STORE__PATH": "", **environ}
    if cache is not None:
        environment["JAXSERVE_RUNTIME__COMPILE_CACHE"] = cache
    return subprocess.Popen(
        [sys.executable, "-m", "jaxserve", "launch", *flags],
        env=environment,
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def failure(tmp_path: Path, *flags: str) -> str:
    """The last line of stderr of a launch that must fail with exit code 2."""
    with launch(*flags, JAXSERVE_STORE__PATH=str(tmp_path / "store")) as process:
        _, stderr = process.communicate(timeout=LAST_RESORT)
    assert process.returncode == 2, stderr
    assert "Traceback" not in stderr
    return stderr.strip().splitlines()[-1]


def test_a_server_starts_answers_and_drains(tmp_path: Path, compile_cache: str) -> None:
    flags = ("--port", "0", "--served-model-name", "a", "--served-model-name", "b", *FLAGS)
    with launch(*flags, cache=compile_cache, JAXSERVE_STORE__PATH=str(tmp_path)) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "jaxserve is ready\n"
        lines = list(iter(process.stdout.readline, "\n"))
        card = {line[:12].strip(): line[12:].strip() for line in lines if line[:12].strip()}
        phases = " ".join([card["start"], *(line.strip() for line in lines if not line[:12].strip())])
        assert card["URL"].endswith("/v1")
        assert {"model", "device", "memory", "requests", "start"} <= set(card)
        names, seconds = zip(*(phase.rsplit(" ", 1) for phase in phases.partition(": ")[2].split(", ")), strict=True)
        assert sum(map(float, seconds)) == pytest.approx(float(phases.split()[0]))
        models = httpx2.get(f"{card['URL']}/models", timeout=LAST_RESORT).json()
        assert [model["id"] for model in models["data"]] == ["a", "b"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(LAST_RESORT) == 0
        first, *progress = process.stderr.read().splitlines()
        assert first.endswith("starts with the embedded demo model")
        shown = [line[2:18].strip() for line in progress if line.endswith(" s")]
        assert shown and shown == [name for name in names if name in shown]  # the longer ones, in their order
        assert len(progress) < 8  # nothing that nobody asked for, such as the whole configuration
        logged = [line for line in progress if line[:1].isdigit()]  # that programs came late, on a slow machine
        screen = [first, *lines, *process.stdout.read().splitlines(), *(set(progress) - set(logged))]
        assert not [line for line in screen if len(line.rstrip("\n")) > 80]  # of a terminal: nothing is wrapped


def test_a_launch_without_words_reads_its_configuration() -> None:
    with launch(JAXSERVE_SERVER__PORT="x") as process:
        _, stderr = process.communicate(timeout=LAST_RESORT)
    assert process.returncode == 2 and "server.port" in stderr and "Traceback" not in stderr, stderr


def test_a_damaged_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}))
    (tmp_path / "tokenizer.json").write_text("{}")
    assert "tokenizer.json" in failure(tmp_path, "--port", "0", "--model", str(tmp_path))


def test_a_chat_template_that_is_not_there(tmp_path: Path, compile_cache: str) -> None:
    line = failure(tmp_path, "--port", "0", "--chat-template", "nope.jinja", "--runtime.compile_cache", compile_cache)
    assert "model.chat_template: 'nope.jinja' is neither a readable file nor a Jinja template" in line


@pytest.mark.parametrize("flag", ["--help", "--help-all"])
def test_help_needs_no_model(flag: str) -> None:
    with launch(flag) as process:
        stdout, _ = process.communicate(timeout=LAST_RESORT)
    assert process.returncode == 0
    assert "--max-model-len" in stdout or "--model.max-model-len" in stdout
