"""The device suite in its tiny form: every section runs here, so that it works where it counts."""

from __future__ import annotations

import json
import time
from pathlib import Path

import jax.numpy as jnp
import pytest

from jaxserve.bench import device
from jaxserve.bench.device_engine import MODELS
from jaxserve.bench.device_rows import Bench, Options, Results, Row
from jaxserve.models.loading.hf_config import read_config
from jaxserve.models.loading.loader import build
from jaxserve.ops.paged_attention import get_backend

pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")


def _options(out: Path, seconds: float = 600) -> Options:
    return Options(out, tiny=True, until=time.time() + seconds)


def _run(section: str, out: Path) -> list[Row]:
    rows: list[Row] = []
    device.run_section(section, _options(out), Results(out / device.RESULTS, tiny=True), rows.append)
    return rows


@pytest.mark.parametrize("section", ["ceilings", "numerics", "attention", "write", "linear", "tune"])
def test_kernel_sections(section: str, tmp_path: Path) -> None:
    rows = _run(section, tmp_path)
    assert rows and not [row for row in rows if "error" in row]
    if section == "numerics":
        assert {row["name"].split()[0] for row in rows} == {"xla", "triton", "tpu"}
        assert all(row["ok"] and row["rel_err"] < 0.01 for row in rows)
    if section in ("attention", "linear"):
        assert all(row["us"] > 0 and row["of_roofline"] > 0 for row in rows)
    assert _run(section, tmp_path) == []  # all there: nothing is measured again


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


@pytest.mark.parametrize(("model", "billions"), [("llama-8b", 8.03), ("qwen3-0.6b", 0.596)])
def test_models_have_their_true_shape(model: str, billions: float, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODELS[model]))
    parameters = build(read_config(tmp_path), jnp.dtype("bfloat16")).num_parameters
    assert parameters / 1e9 == pytest.approx(billions, rel=0.01)


def test_one_command_runs_sections_in_processes_of_their_own(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert device.main(["--tiny", "--only", "ceilings", "--out", str(tmp_path)]) == 0
    printed = capfd.readouterr().out
    assert "ceilings" in printed and "GBps=" in printed and "3 rows" in printed
    saved = json.loads((tmp_path / device.RESULTS).read_text())
    assert saved["tiny"] and saved["environment"]["packages"]["jax"]
    assert [row["name"] for row in saved["rows"]] == ["copy", "matmul", "dispatch"]


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
    first = Bench("write", _options(tmp_path, 60), Results(path, tiny=True), lambda row: None)
    _cell(first, ran, "good")
    _cell(first, ran, "bad", error=True)
    _cell(first, ran, "long", estimate=100)
    assert ran == ["good", "bad"] and Results(path, tiny=True).rows["write", "bad"]["error"].endswith("no such kernel")
    second = Bench("write", _options(tmp_path), Results(path, tiny=True), lambda row: None)
    for name in ("good", "bad", "long"):
        _cell(second, ran, name)
    assert ran == ["good", "bad", "bad", "long"]
    assert not [row for row in Results(path, tiny=True).rows.values() if "error" in row]


def test_tiny_and_full_results_are_kept_apart(tmp_path: Path) -> None:
    Results(tmp_path / device.RESULTS, tiny=True).add({"section": "write", "name": "x"})
    with pytest.raises(SystemExit, match="tiny"):
        Results(tmp_path / device.RESULTS, tiny=False)


def test_unknown_section_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        device.main(["--tiny", "--only", "attention,warp", "--out", str(tmp_path)])
