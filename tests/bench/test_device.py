"""The device suite in its tiny form: every section runs here, so that it works where it counts."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import jax.numpy as jnp
import pytest

from jaxserve.bench import device
from jaxserve.bench.device_engine import MODELS
from jaxserve.bench.device_engine import SECTIONS as ENGINE
from jaxserve.bench.device_experts import SECTIONS as EXPERTS
from jaxserve.bench.device_kernels import SECTIONS as KERNELS
from jaxserve.bench.device_kernels import published_machine
from jaxserve.bench.device_linear import SECTIONS as LINEAR
from jaxserve.bench.device_rows import Bench, Options, Reporter, Results, Row
from jaxserve.bench.device_steps import SECTIONS as STEPS
from jaxserve.models.loading.config.hf_config import read_config
from jaxserve.models.loading.loader import build
from jaxserve.ops.paged_attention import get_backend

pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")


def _options(out: Path, seconds: float = 600) -> Options:
    return Options(out, out / "work", tiny=True, until=time.time() + seconds)


def _reporter(rows: list[Row]) -> Reporter:
    return Reporter(begin=lambda name, limit: None, end=rows.append)


def _run(section: str, out: Path) -> list[Row]:
    rows: list[Row] = []
    device.run_section(section, _options(out), Results(out / device.RESULTS, tiny=True), _reporter(rows))
    return rows


@pytest.mark.parametrize(
    "section",
    [
        "ceilings",
        pytest.param("numerics", marks=pytest.mark.slow),
        "attention",
        "write",
        "linear",
        "tune",
        "experts",
        "latent",
    ],
)
def test_kernel_sections(section: str, tmp_path: Path) -> None:
    rows = _run(section, tmp_path)
    assert rows and not [row for row in rows if "error" in row]
    if section == "numerics":
        assert {row["name"].split()[0] for row in rows} == {"xla", "triton", "tpu"}
        assert all(row["ok"] and row["rel_err"] < 0.01 for row in rows)
    if section in ("attention", "linear"):
        assert all(row["us"] > 0 and row["of_roofline"] > 0 for row in rows)
    assert _run(section, tmp_path) == []  # all there: nothing is measured again


@pytest.mark.slow  # the other sections and the steps are run below and above
def test_engine_sections(tmp_path: Path) -> None:
    rows = {row["name"]: row for row in _run("engine-llama-8b", tmp_path)}
    assert not [row for row in rows.values() if "error" in row or "skipped" in row]
    assert rows["cold start"]["programs"] > 5 and rows["cold start"]["attention"] == get_backend("auto", "cpu").name
    assert rows["decode 2 x 20"]["floor_ms"] > 0 and rows["prefill 32"]["tok_s"] > 0
    assert rows["2 requests of 4"]["compiles"] == 0
    (warm,) = _run("restart-llama-8b", tmp_path)
    assert warm["name"] == "warm start" and warm["programs"] == rows["cold start"]["programs"]
    small = {row["name"]: row for row in _run("pool-llama-8b", tmp_path)}
    assert small["8 requests of 8"]["tok_s"] > 0
    assert {row["section"] for row in json.loads((tmp_path / device.RESULTS).read_text())["rows"]} == {
        "engine-llama-8b",
        "restart-llama-8b",
        "pool-llama-8b",
    }


def test_steps_without_an_engine(tmp_path: Path) -> None:
    rows = {row["name"]: row for row in _run("steps-llama-8b", tmp_path)}
    assert list(rows) == ["start", "compile decode 2", "decode 2 x 20", "profile 2"]
    assert not [row for row in rows.values() if "error" in row]
    assert rows["decode 2 x 20"]["floor_ms"] > 0 and rows["decode 2 x 20"]["dispatch_us"] > 0
    assert rows["profile 2"]["kernels"] and rows["profile 2"]["us"] > 0
    assert _run("steps-llama-8b", tmp_path) == []


# A section whose cells end their process, as a broken kernel may. What each cell does is its name.
BROKEN = """\
import os, signal, sys, time
from jaxserve.bench import device, device_kernels

def broken(bench):
    for name, limit in (("good", 30), ("hang", 2), ("after", 30), ("crash", 30), ("raise", 30), ("last", 30)):
        bench.cell(name, 0, lambda: do(name), limit=limit)

def do(name):
    if name == "hang":
        time.sleep(20)
    if name == "crash":
        print("no such address", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)
    if name == "raise":
        raise RuntimeError("no such kernel")
    return {"us": 1.0}

device_kernels.SECTIONS["write"] = broken
device.python_command = lambda module, *words: [sys.executable, __file__, *words]
sys.exit(device.main(sys.argv[1:]))
"""


@pytest.fixture
def broken(tmp_path: Path) -> list[str]:
    (tmp_path / "broken.py").write_text(BROKEN)
    return [sys.executable, str(tmp_path / "broken.py"), "--tiny", "--only", "write", "--out", str(tmp_path / "out")]


def _saved(tmp_path: Path) -> dict[str, Row]:
    path = tmp_path / "out" / device.RESULTS
    return {row["name"]: row for row in json.loads(path.read_text())["rows"]} if path.exists() else {}


def test_a_hang_and_a_crash_cost_one_cell_each(broken: list[str], tmp_path: Path) -> None:
    for _ in range(2):  # the second time nothing is run that ended a process
        subprocess.run(broken, check=True, timeout=300)
        rows = _saved(tmp_path)
        assert [name for name, row in rows.items() if "error" not in row] == ["good", "after", "last"]
        assert rows["hang"]["error"] == "did not finish in 2 s"
        assert rows["crash"]["error"].startswith("ended with code -11") and "no such address" in rows["crash"]["error"]
        assert rows["raise"]["error"] == "RuntimeError: no such kernel"


def test_a_killed_suite_has_told_what_it_was_doing(broken: list[str], tmp_path: Path) -> None:
    suite = subprocess.Popen(broken)
    try:
        until = time.monotonic() + 300
        while _saved(tmp_path).get("hang", {}).get("error") != "did not finish" and time.monotonic() < until:
            time.sleep(0.05)
    finally:
        suite.kill()
        suite.wait()
    rows = _saved(tmp_path)
    assert rows["good"]["us"] == 1.0 and rows["hang"]["error"] == "did not finish"


@pytest.mark.slow
def test_a_cell_that_the_end_cuts_off_is_measured_next_time(broken: list[str], tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text(BROKEN.replace('("hang", 2)', '("hang", 60)'))
    subprocess.run([*broken, "--seconds", "8"], check=True, timeout=300)
    assert _saved(tmp_path)["hang"]["error"] == "the time was over" and "after" not in _saved(tmp_path)
    script.write_text(BROKEN.replace("time.sleep(20)", "pass"))
    subprocess.run(broken, check=True, timeout=300)
    assert "error" not in _saved(tmp_path)["hang"]


@pytest.mark.parametrize(("model", "billions"), [("llama-8b", 8.03), ("llama-3b", 3.21), ("qwen3-0.6b", 0.596)])
def test_models_have_their_true_shape(model: str, billions: float, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODELS[model]))
    parameters = build(read_config(tmp_path), jnp.dtype("bfloat16")).num_parameters
    assert parameters / 1e9 == pytest.approx(billions, rel=0.01)


def test_one_command_runs_sections_in_processes_of_their_own(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert device.main(["--tiny", "--only", "ceilings", "--out", str(tmp_path)]) == 0
    printed = capfd.readouterr().out
    assert "ceilings" in printed and "GBps=" in printed and "4 rows" in printed
    saved = json.loads((tmp_path / device.RESULTS).read_text())
    assert saved["tiny"] and saved["environment"]["packages"]["jax"]
    assert [row["name"] for row in saved["rows"]] == ["copy", "read", "matmul", "dispatch"]
    assert (tmp_path / "autotune.tgz").stat().st_size > 0


def _cell(bench: Bench, ran: list[str], name: str, estimate: float = 0, error: bool = False) -> None:
    def measure() -> Row:
        ran.append(name)
        if error:
            raise RuntimeError("no such kernel")
        return {"us": 1.0}

    bench.cell(name, estimate, measure)


def test_goes_on_where_it_was_cut(tmp_path: Path) -> None:
    """What failed runs again, what worked does not, and what would not fit into the time is left for the next run."""
    path, ran = tmp_path / device.RESULTS, []
    first = Bench("write", _options(tmp_path, 60), Results(path, tiny=True), _reporter([]))
    _cell(first, ran, "good")
    _cell(first, ran, "bad", error=True)
    _cell(first, ran, "long", estimate=100)
    assert ran == ["good", "bad"] and Results(path, tiny=True).rows["write", "bad"]["error"].endswith("no such kernel")
    second = Bench("write", _options(tmp_path), Results(path, tiny=True), _reporter([]))
    for name in ("good", "bad", "long"):
        _cell(second, ran, name)
    assert ran == ["good", "bad", "bad", "long"]
    assert not [row for row in Results(path, tiny=True).rows.values() if "error" in row]


def test_tiny_and_full_results_are_kept_apart(tmp_path: Path) -> None:
    Results(tmp_path / device.RESULTS, tiny=True).add({"section": "write", "name": "x"})
    with pytest.raises(SystemExit, match="tiny"):
        Results(tmp_path / device.RESULTS, tiny=False)


def test_the_sections_of_a_tpu(tmp_path: Path) -> None:
    """Each has its measurements, and none is a GPU's. A v5e's 16 GB have room for the model and its cache."""
    for chip, gigabytes in (("v5e", 16), ("v6e", 32)):
        for section in device.CHIPS[chip]:
            kind, _, of = section.partition("-")
            assert kind in KERNELS | LINEAR | EXPERTS if not of else (kind in STEPS | ENGINE and of in MODELS), section
            assert "mosaic" not in section and kind not in device._ENVIRONMENTS
            if of:
                (tmp_path / "config.json").write_text(json.dumps(MODELS[of]))
                assert build(read_config(tmp_path), jnp.dtype("bfloat16")).num_bytes < 0.6 * gigabytes * 1e9
    assert device.main(["--tiny", "--chip", "v6e", "--only", "ceilings", "--out", str(tmp_path)]) == 0
    rows = {row["name"]: row for row in json.loads((tmp_path / device.RESULTS).read_text())["rows"]}
    assert rows["read"]["of_published"] > 0 and rows["matmul"]["of_published"] > 0
    with pytest.raises(SystemExit):
        device.main(["--tiny", "--chip", "v5e", "--only", "steps-llama-8b", "--out", str(tmp_path)])


def test_published_rates_by_the_name_of_the_device() -> None:
    v5e, v6e = (published_machine(name) for name in ("TPU v5 lite", "TPU v6 lite"))
    assert v6e.bandwidth / v5e.bandwidth == pytest.approx(2, rel=0.01) and v6e.flops > 4 * v5e.flops
    assert v5e.floor(6.43e9, 2 * 3.2e9) == pytest.approx(7.85e-3, rel=0.01)  # a row of 3B in bfloat16
    assert published_machine("cpu") == published_machine("NVIDIA H200")


def test_unknown_section_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        device.main(["--tiny", "--only", "attention,warp", "--out", str(tmp_path)])
