import json
import subprocess
import sys
import tempfile
from pathlib import Path

from common import DEMO, URL, report

ASKED = ("--request-count", "4", "--concurrency", "2", "--isl", "32", "--osl", "8")


def profile(*flags: str) -> dict:
    """What it measured of four requests, two at once."""
    with tempfile.TemporaryDirectory() as folder:
        command = [str(Path(sys.executable).parent / "aiperf"), "profile", "--model", "demo", "--url", URL]
        command += [*ASKED, "--tokenizer", str(DEMO), "--artifact-dir", folder, "--ui", "none", *flags]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
        assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-1000:]
        [exported] = Path(folder).rglob("profile_export_aiperf.json")
        measured = json.loads(exported.read_text())
    assert measured["request_count"]["avg"] == 4, measured
    assert not (measured.get("error_request_count") or {}).get("avg"), measured
    return measured


def text() -> None:
    profile("--endpoint-type", "chat")


def stream() -> None:
    assert profile("--endpoint-type", "chat", "--streaming")["time_to_first_token"]["avg"] > 0


def embeddings() -> None:
    profile("--endpoint-type", "embeddings")


report("aiperf", {"text": text, "stream": stream, "embeddings": embeddings})
