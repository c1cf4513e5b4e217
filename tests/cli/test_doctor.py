"""`jaxserve doctor` as a process: what it finds on this machine, and each induced fault as a line of its own."""

import json
import os
import shutil
import socket
import subprocess
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from jaxserve.cli.doctor import host_findings
from jaxserve.config import Config
from tests.waiting import LAST_RESORT

DEMO = Path(str(files("jaxserve") / "assets" / "demo"))


def doctor(home: Path, *words: str, **environ: str) -> tuple[int, str]:
    """Exit code and stdout, with caches and store in `home`."""
    own = {"HF_HUB_OFFLINE": "1", "HOME": str(home), "XDG_CACHE_HOME": str(home / "cache")}
    done = subprocess.run(
        [sys.executable, "-m", "jaxserve", "doctor", *words],
        env=os.environ | own | environ,
        capture_output=True,
        text=True,
        timeout=LAST_RESORT,
        check=False,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home in which the C kernels are compiled once."""
    return tmp_path_factory.mktemp("home")


def test_a_sound_machine(sound: Path) -> None:
    code, stdout = doctor(sound, "--json", "--port", "0")
    report = json.loads(stdout)
    found = {(finding["check"], finding["text"].partition(":")[0]) for finding in report["findings"]}
    assert code == 0 and report["ok"], stdout
    assert {finding["check"] for finding in report["findings"]} >= {
        *("versions", "config", "memory", "disk", "port", "store", "caches", "hub", "devices", "numbers", "model"),
    }
    numbers = {text for check, text in found if check == "numbers"}
    assert {"sums", "matrix products", "sampler", "attention xla", "attention reference"} <= numbers


def test_faults_are_lines_and_the_exit_code(tmp_path: Path) -> None:
    """All at once: no compiler, an unusable cache, a taken port, a store that is a file, weights cut off."""
    model = tmp_path / "model"
    shutil.copytree(DEMO, model)
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    (tmp_path / "store").write_text("")
    (tmp_path / "cache").write_text("")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        words = (str(model), "--port", str(port), "--store.path", str(tmp_path / "store"))
        code, stdout = doctor(tmp_path, *words, CC="no-such-compiler")
    lines = stdout.splitlines()
    assert code == 1, stdout
    bad = {line.split()[1]: line for line in lines if line.startswith("bad ")}
    assert set(bad) == {"port", "store", "model"}, stdout
    assert f"cannot listen on 127.0.0.1:{port}" in bad["port"]
    assert "truncated" in bad["model"] and "download the checkpoint again" in bad["model"]
    assert all(" -> " in line for line in bad.values())
    warned = {line.split()[1] for line in lines if line.startswith("warn")}
    assert warned >= {"caches", "kernels"}, stdout
    assert lines[-1] == f"3 of {len(lines) - 2} findings must be mended"


def test_a_wrong_flag_does_not_end_the_other_checks(sound: Path) -> None:
    code, stdout = doctor(sound, "someone/some-model", "--prot", "0")
    assert code == 1
    assert "bad  config    unknown flag --prot, did you mean --port?" in stdout
    assert "ok   numbers   sums" in stdout


def findings(**sections: Any) -> dict[str, str]:
    """Checks that need no device, by name: state of the last finding."""
    config = Config.parse({"server": {"port": 0}, **sections})
    return {finding.check: finding.state for finding in host_findings(config)}


def test_a_model_that_must_be_downloaded_needs_the_hub() -> None:
    assert findings(model={"path": "someone/some-model"})["hub"] == "bad"


def test_a_server_without_store_or_cache_can_serve() -> None:
    states = findings(store={"path": None}, runtime={"compile_cache": None})
    assert states["store"] == "warn" and "bad" not in states.values()
