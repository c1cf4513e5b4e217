"""Aider edits a file of a folder of its own, with the model of tests/clients/scripted_model.py."""

import subprocess
import sys
import tempfile
from pathlib import Path

from common import URL, report

QUIET = (
    *("--yes-always", "--no-git", "--no-check-update", "--no-show-release-notes", "--no-show-model-warnings"),
    *("--no-analytics", "--analytics-disable", "--no-pretty", "--no-gitignore", "--no-detect-urls"),
)


def edit(*flags: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "hello.py").write_text("print('hello')\n")
        aider = str(Path(sys.executable).parent / "aider")
        server = ("--openai-api-base", f"{URL}/v1", "--openai-api-key", "none", "--model", "openai/scripted")
        asked = ("--edit-format", "whole", "--message", "Change hello.py: greet from aider.", "hello.py")
        command = [aider, *server, *QUIET, *flags, *asked]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-1000:]
        written = Path(folder, "hello.py").read_text()
        assert written == "print('hello from aider')\n", written + done.stdout[-1500:]


report("aider-chat", {"text": lambda: edit("--no-stream"), "stream": lambda: edit("--stream")})
