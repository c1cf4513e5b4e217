"""`jaxserve doctor` as a process: what it finds on this machine, and each induced fault as a line of its own."""

import json
import os
import shutil
import socket
import subprocess
import sys
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jaxserve import system
from jaxserve.cli import doctor as host_checks
from jaxserve.cli import doctor_devices
from jaxserve.cli.doctor import Finding, host_findings
from jaxserve.config import Config
from jaxserve.runtime.mesh import make_mesh
from jaxserve.store.database import DirectoryLock
from jaxserve.text.tokenizer import Tokenizer
from tests.models.checkpoints import random_tensors, train_tokenizer, write_checkpoint, write_words
from tests.models.families import STATE_CASES
from tests.models.hostile_directories import copy_demo
from tests.quick import QUICK_FLAGS
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
    [versions] = [finding for finding in report["findings"] if finding["check"] == "versions"]
    assert ("Python 3.12 is recommended" in versions["fix"]) == (sys.version_info < (3, 12))
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
        code, stdout = doctor(tmp_path, *words, CC="no-such-compiler", XLA_FLAGS=QUICK_FLAGS)
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
    code, stdout = doctor(sound, "someone/some-model", "--prot", "0", XLA_FLAGS=QUICK_FLAGS)
    assert code == 1
    assert "bad  config    unknown flag --prot, did you mean --port?" in stdout
    assert "ok   numbers   sums" in stdout
    checked = {line.split()[1] for line in stdout.splitlines() if line.startswith(("ok", "warn", "bad"))}
    assert not checked & {"port", "store", "model"}, stdout  # of the defaults, which were not meant


def findings(**sections: Any) -> dict[str, str]:
    """Checks that need no device, by name: state of the last finding."""
    config = Config.parse({"server": {"port": 0}, **sections})
    return {finding.check: finding.state for finding in host_findings(config)}


def test_a_model_that_must_be_downloaded_needs_the_hub() -> None:
    assert findings(model={"path": "someone/some-model"})["hub"] == "bad"


def test_a_server_without_store_or_cache_can_serve() -> None:
    states = findings(store={"path": None}, runtime={"compile_cache": None})
    assert states["store"] == "warn" and "bad" not in states.values()


def test_a_store_that_a_server_holds_is_named(tmp_path: Path) -> None:
    lock = DirectoryLock(tmp_path)
    assert findings(store={"path": tmp_path})["store"] == "warn"
    lock.release()
    assert findings(store={"path": tmp_path})["store"] == "ok"


def of_model(monkeypatch: pytest.MonkeyPatch, config: Config) -> tuple[str, str]:
    """State and text of the finding about the model, without a check of kernels."""
    monkeypatch.setattr(doctor_devices, "serving_cases", lambda *_, **keys: [])
    monkeypatch.setattr(doctor_devices, "backend_names", lambda platform: [])
    (found,) = (each for each in doctor_devices.findings(config) if each.check == "model")
    return found.state, found.text


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
def test_a_backend_for_other_gpus_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels of mosaic_gpu compile for compute capability 9.0 only, so on an L4 they are not tried."""
    monkeypatch.setattr(doctor_devices, "serving_cases", lambda *_, **keys: [])
    monkeypatch.setattr(doctor_devices, "attention_case", lambda backend, *_: backend.name)
    monkeypatch.setattr(doctor_devices, "_numbers", lambda name, *_, **keys: [Finding("numbers", "ok", name)])
    l4: Any = SimpleNamespace(platform="gpu", devices=[SimpleNamespace(platform="gpu", compute_capability="8.9")])
    found = list(doctor_devices._kernels(Config(), l4))
    assert [finding.text for finding in found if finding.state == "ok"] == ["reference", "xla"]
    (other,) = (finding for finding in found if finding.state != "ok")
    assert other.state == "warn" and "needs a GPU of compute capability 9.0, not 8.9" in other.text


def test_the_weights_are_counted_as_they_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU those of a bfloat16 checkpoint stay bfloat16, so they fit where float32 would not."""
    size = sum(path.stat().st_size for path in Path(DEMO).glob("*.safetensors"))
    monkeypatch.setattr(doctor_devices, "device_memory", lambda devices: int(1.5 * size))
    assert of_model(monkeypatch, Config())[0] == "ok"
    assert of_model(monkeypatch, Config.of(dtype="float32"))[0] == "bad"


@pytest.mark.parametrize(("memory", "state"), [(2**20, "warn"), (2**30, "ok")])
def test_states_that_eat_the_cache_are_named(
    memory: int, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hf = STATE_CASES["lfm2"]
    directory = write_words(write_checkpoint(tmp_path, hf, random_tensors(hf)), hf["vocab_size"])
    monkeypatch.setattr(doctor_devices, "device_memory", lambda devices: memory)
    config = Config.of(str(directory), max_num_seqs=1000)
    (found,) = (each for each in doctor_devices._model(config, make_mesh("cpu")) if each.check == "states")
    assert found.state == state and "and 2000 are" in found.text


def test_the_split_that_auto_chooses_is_told() -> None:
    told = [each.text for each in doctor_devices._model(Config.of(tensor="auto"), make_mesh("cpu"))]
    assert told[0].startswith("mesh: tensor 1, expert 1: 1 of 1 devices, ") and "of weights" in told[1]


def test_what_launch_refuses_of_a_model_is_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    state, text = of_model(monkeypatch, Config.of(max_model_len=9999999))
    assert state == "bad" and text.startswith("model.max_model_len is 9999999")
    state, text = of_model(monkeypatch, Config.of(quantize_head=True))
    assert state == "bad" and text.startswith("model.quantize_head is for weights")


def test_the_hub_is_looked_for_where_a_download_would(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    monkeypatch.setattr(host_checks.constants, "HF_HUB_OFFLINE", False)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        monkeypatch.setattr(host_checks.constants, "ENDPOINT", "https://hub.invalid")
        monkeypatch.setenv("HTTPS_PROXY", f"http://{address}")
        (found,) = host_checks.hub(Config().model)
        assert found.state == "ok" and found.text.startswith("the proxy 127.0.0.1 on the way to hub.invalid is reached")
        monkeypatch.setenv("NO_PROXY", "hub.invalid")
        (found,) = host_checks.hub(Config().model)
        assert found.state == "warn" and found.text.startswith("hub.invalid is not reached")
        monkeypatch.setattr(host_checks.constants, "ENDPOINT", f"http://{address}")
        (found,) = host_checks.hub(Config().model)
        assert found.state == "ok" and found.text.startswith(f"{address} is reached")


def test_the_memory_is_at_most_the_containers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text(f"{2**30}\n")
    monkeypatch.setattr(system, "_CGROUP_LIMITS", (tmp_path / "memory.max",))
    (found,) = host_checks.host_memory()
    assert found.state == "warn" and found.text == "1.0 of 1.0 GiB are free"


def test_doctor_names_tokens_that_transformers_reads_otherwise(tmp_path: Path) -> None:
    backend = train_tokenizer("bytes")
    backend.add_special_tokens(["<|turn|>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    [found] = doctor_devices.beside_transformers(tmp_path, Tokenizer.from_directory(tmp_path))
    assert found.state == "ok" and "added tokens" in found.text
    other = Tokenizer.from_directory(tmp_path)
    other.backend.add_tokens(["<only here>"])
    [found] = doctor_devices.beside_transformers(tmp_path, other)
    assert found.state == "warn" and "'<only here>' is" in found.text and "there None" in found.text
    (tmp_path / "tokenizer_config.json").write_text("[]")
    [found] = doctor_devices.beside_transformers(tmp_path, other)
    assert found.state == "warn" and "nothing is compared" in found.text


def test_doctor_names_what_is_left_aside(tmp_path: Path) -> None:
    directory = copy_demo(tmp_path / "model")
    (directory / "adapter_model.safetensors").write_bytes(b"")
    found = list(doctor_devices._model(Config.of(str(directory)), None))
    assert ["adapter_model.safetensors is not read" in each.text for each in found if each.state == "warn"] == [True]
