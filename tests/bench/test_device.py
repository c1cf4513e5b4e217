"""The device suite in its tiny form: every section runs here, so that it works where it counts."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import jax.numpy as jnp
import pytest

from benchmarks.device_suite import suite, table, visit
from benchmarks.device_suite.engine import SECTIONS as ENGINE
from benchmarks.device_suite.experts import SECTIONS as EXPERTS
from benchmarks.device_suite.kernels import SECTIONS as KERNELS
from benchmarks.device_suite.kernels import published_machine
from benchmarks.device_suite.linear import SECTIONS as LINEAR
from benchmarks.device_suite.models import MODELS
from benchmarks.device_suite.rehearsal import LIMITS, bring_back
from benchmarks.device_suite.rows import PROFILE, RESULTS, Bench, Options, Planned, Reporter, Results, Row
from benchmarks.device_suite.steps import SECTIONS as STEPS
from jaxserve.models.checkpoint.hf_config import read_config
from jaxserve.models.checkpoint.loader import build
from jaxserve.ops.paged_attention import get_backend

pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")


def _options(out: Path, seconds: float = 600) -> Options:
    return Options(out, out / "work", tiny=True, until=time.time() + seconds)


def _reporter(rows: list[Row]) -> Reporter:
    return Reporter(begin=lambda planned: None, end=rows.append)


def _run(section: str, out: Path) -> list[Row]:
    rows: list[Row] = []
    suite.run_section(section, Bench(section, _options(out), Results(out / RESULTS, tiny=True), _reporter(rows)))
    return rows


@pytest.mark.parametrize(
    "section",
    [
        "ceilings",
        "versions",
        pytest.param("numerics", marks=pytest.mark.slow),
        pytest.param("numerics_weights", marks=pytest.mark.slow),
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
        assert {row["name"].split()[0] for row in rows} == {"triton", "serves"}
        assert all(row["ok"] and row.get("rel_err", 0) < 0.01 for row in rows)
    if section == "numerics_weights":
        assert len(rows) == 6 and all(row["ok"] for row in rows)
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
    assert {row["section"] for row in json.loads((tmp_path / RESULTS).read_text())["rows"]} == {
        "engine-llama-8b",
        "restart-llama-8b",
        "pool-llama-8b",
    }


def test_steps_without_an_engine(tmp_path: Path) -> None:
    rows = {row["name"]: row for row in _run("steps-llama-8b", tmp_path)}
    prompt = ["compile prefill 32", "prefill 32"]
    assert list(rows) == ["start", "compile decode 2", "decode 2 x 20", "profile 2", *prompt]
    assert not [row for row in rows.values() if "error" in row]
    assert rows["prefill 32"]["ms"] > 0 and all(row["answers"] and row["took_s"] >= 0 for row in rows.values())
    assert rows["decode 2 x 20"]["floor_ms"] > 0 and rows["decode 2 x 20"]["dispatch_us"] > 0
    assert rows["profile 2"]["kernels"] and rows["profile 2"]["us"] > 0
    assert json.loads((tmp_path / PROFILE).read_text())["steps-llama-8b decode 2 x 20"]
    assert _run("steps-llama-8b", tmp_path) == []


def test_steps_of_experts_with_windows(tmp_path: Path) -> None:
    rows = {row["name"]: row for row in _run("steps-gpt-oss-20b", tmp_path)}
    assert list(rows) == ["start", "compile decode 2", "decode 2 x 20"]
    assert not [row for row in rows.values() if "error" in row]
    assert rows["decode 2 x 20"]["floor_ms"] > 0


@pytest.mark.slow
def test_a_server_and_its_clients(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.device_suite", "--tiny", "--run", "first", "--out", str(tmp_path)]
    subprocess.run([*command, "--only", "serve-llama-8b"], check=True, timeout=400, cwd=suite.ROOT)
    rows = {row["name"]: row for row in json.loads((tmp_path / RESULTS).read_text())["rows"]}
    assert list(rows) == ["start", "1 x 8 + 4", "3 x 8 + 4", "2 x 20 + 4"]
    assert rows["start"]["seconds"] > 0 and rows["3 x 8 + 4"]["output_tokens"] == 12
    assert not [row for row in rows.values() if "error" in row]


# A section whose cells end their process, as a broken kernel may. What each cell does is its name.
BROKEN = """\
import os, signal, sys, time
from benchmarks.device_suite import suite

def broken(section, bench):
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

suite.run_section = broken
ours = suite.child_command
suite.child_command = lambda *args: [sys.executable, __file__, *ours(*args)[3:]]
if __name__ == "__main__":
    sys.exit(suite.main(sys.argv[1:]))
"""


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("PYTHONPATH", str(suite.ROOT))
    (tmp_path / "broken.py").write_text(BROKEN)
    words = ["--tiny", "--only", "serve-llama-8b", "--out", str(tmp_path / "out")]  # of a section that needs no jax
    return [sys.executable, str(tmp_path / "broken.py"), *words]


def _saved(tmp_path: Path) -> dict[str, Row]:
    path = tmp_path / "out" / RESULTS
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
    process, choices = subprocess.Popen(broken), tmp_path / "out" / "autotune.tgz"
    try:
        until = time.monotonic() + 300
        while time.monotonic() < until and not (
            choices.exists() and _saved(tmp_path).get("hang", {}).get("error") == "did not finish"
        ):
            time.sleep(0.05)
    finally:
        process.kill()
        process.wait()
    rows = _saved(tmp_path)
    assert rows["good"]["us"] == 1.0 and rows["hang"]["error"] == "did not finish"
    assert tarfile.is_tarfile(choices)  # of the first cell: the section never came to its end


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
    assert suite.main(["--tiny", "--only", "ceilings", "--out", str(tmp_path)]) == 0
    printed = capfd.readouterr().out
    assert "ceilings" in printed and "GBps=" in printed and "4 rows" in printed
    saved = json.loads((tmp_path / RESULTS).read_text())
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
    path, ran = tmp_path / RESULTS, []
    first = Bench("write", _options(tmp_path, 8), Results(path, tiny=True), _reporter([]))
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
    Results(tmp_path / RESULTS, tiny=True).add({"section": "write", "name": "x"})
    with pytest.raises(SystemExit, match="tiny"):
        Results(tmp_path / RESULTS, tiny=False)


def test_the_sections_of_a_tpu(tmp_path: Path) -> None:
    """Each has its measurements, and none is a GPU's. A v5e's 16 GB have room for the model and its cache."""
    for chip, gigabytes in (("v5e", 16), ("v6e", 32)):
        for section in suite.CHIPS[chip]:
            kind, _, of = section.partition("-")
            assert kind in KERNELS | LINEAR | EXPERTS if not of else (kind in STEPS | ENGINE and of in MODELS), section
            assert "mosaic" not in section and kind not in suite.ENVIRONMENTS
            if of:
                (tmp_path / "config.json").write_text(json.dumps(MODELS[of]))
                assert build(read_config(tmp_path), jnp.dtype("bfloat16")).num_bytes < 0.6 * gigabytes * 1e9
    assert suite.main(["--tiny", "--chip", "v6e", "--only", "ceilings", "--out", str(tmp_path)]) == 0
    rows = {row["name"]: row for row in json.loads((tmp_path / RESULTS).read_text())["rows"]}
    assert rows["read"]["of_published"] > 0 and rows["matmul"]["of_published"] > 0
    with pytest.raises(SystemExit):
        suite.main(["--tiny", "--chip", "v5e", "--only", "steps-llama-8b", "--out", str(tmp_path)])


def test_published_rates_by_the_name_of_the_device() -> None:
    v5e, v6e = (published_machine(name) for name in ("TPU v5 lite", "TPU v6 lite"))
    assert v6e.bandwidth / v5e.bandwidth == pytest.approx(2, rel=0.01) and v6e.flops > 4 * v5e.flops
    assert v5e.floor(6.43e9, 2 * 3.2e9) == pytest.approx(7.85e-3, rel=0.01)  # a row of 3B in bfloat16
    assert published_machine("cpu") == published_machine("NVIDIA H200")


def test_unknown_section_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        suite.main(["--tiny", "--only", "attention,warp", "--out", str(tmp_path)])


# --- the minutes of a machine

# Twelve quick cells, and one that waits in a process of its own group as a server does. No jax is imported.
QUICK = """\
import subprocess, sys, time
from benchmarks.device_suite import suite

def cells(section, bench):
    for number in range(12):
        bench.cell(f"cell {number}", 1, lambda: measure(bench, number), answers="Is it there?")

def measure(bench, number):
    time.sleep(0.05)
    (bench.options.work / suite.AUTOTUNE / f"choice {number}").write_text("x" * 10_000)
    return {"us": 1.0}

suite.run_section = cells
ours = suite.child_command
suite.child_command = lambda *args: [sys.executable, __file__, *ours(*args)[3:]]
if __name__ == "__main__":
    sys.exit(suite.main(sys.argv[1:]))
"""


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of what came back, in place of the repository's."""
    monkeypatch.setattr(visit, "FOLDER", tmp_path / "folder")
    monkeypatch.setattr(visit, "KEPT", tmp_path / "kept")
    return tmp_path / "kept"


def test_ten_kills_leave_the_record_whole(tmp_path: Path, kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the moment, what comes back can be read, has all rows of before, and the next run goes on from there."""
    monkeypatch.setenv("PYTHONPATH", str(suite.ROOT))
    script, out, moments = tmp_path / "quick.py", tmp_path / "out", random.Random(45)
    script.write_text(QUICK)
    command = [sys.executable, str(script), "--tiny", "--only", "serve-llama-8b", "--chip", "gpu", "--out", str(out)]
    command += ["--run", "first", "--work", str(tmp_path / "work")]
    began = time.monotonic()
    subprocess.run([*command, "--seconds", "0"], check=True, timeout=300)  # measures nothing: the cost of a start
    longest = 2 * (time.monotonic() - began) + 1
    seen: set[str] = set()
    for _ in range(10):
        with subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL) as process:
            time.sleep(moments.uniform(0, longest))
            os.killpg(process.pid, signal.SIGKILL)
        wrong = visit.take_back(out)
        assert [text for text in wrong if not text.endswith("did not come back")] == []
        saved = json.loads((kept / RESULTS).read_text())["rows"] if (kept / RESULTS).exists() else []
        whole = {row["name"] for row in saved if row.get("us") == 1.0}
        assert seen <= whole and all(row["error"] == "did not finish" for row in saved if row["name"] not in whole)
        seen = whole
    subprocess.run(command, check=True, timeout=300)
    rows = json.loads((out / RESULTS).read_text())["rows"]
    assert len(rows) == 12 and all(row["us"] == 1.0 and row["answers"] for row in rows)
    assert visit.take_back(out) == [f"{PROFILE} did not come back"]
    with tarfile.open(kept / "autotune.tgz") as archive:
        assert sum(member.isfile() for member in archive) == 12


def test_what_a_killed_suite_started_ends_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A section that would run on would keep the device's memory from the next run."""
    monkeypatch.setenv("PYTHONPATH", str(suite.ROOT))
    script, pids = tmp_path / "quick.py", tmp_path / "pids"
    waiting = f"""
def cells(section, bench):
    server = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], stdin=subprocess.DEVNULL)
    with open({str(pids)!r} + ".part", "w") as file:
        print(os.getpid(), server.pid, file=file)
    os.replace({str(pids)!r} + ".part", {str(pids)!r})
    time.sleep(600)

suite.run_section = lambda section, bench: None if isinstance(bench, suite.PlanningBench) else cells(section, bench)
"""
    script.write_text("import os\n" + QUICK.replace("suite.run_section = cells\n", waiting))
    words = ["--tiny", "--run", "first", "--only", "serve-llama-8b", "--out", str(tmp_path)]
    with subprocess.Popen([sys.executable, str(script), *words]) as process:
        until = time.monotonic() + 300
        while not pids.exists() and time.monotonic() < until:
            time.sleep(0.05)
        process.kill()
    started = [int(word) for word in pids.read_text().split()]
    until = time.monotonic() + 60
    while (left := [pid for pid in started if _runs(pid)]) and time.monotonic() < until:
        time.sleep(0.05)
    assert not left


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_the_first_run_fits_into_its_eight_minutes(capsys: pytest.CaptureFixture[str]) -> None:
    assert suite.main(["--run", "first", "--plan"]) == 0
    lines = capsys.readouterr().out.splitlines()
    cells = suite.plan(suite.FIRST)
    assert [name for name, _ in itertools.groupby(cell.section for cell in cells)] == list(suite.FIRST)
    assert suite.needed(cells) <= suite.SECONDS["first"] and all(cell.answers.endswith("?") for cell in cells)
    names = {(cell.section, cell.name) for cell in cells if not cell.optional}
    assert {(line.section, line.cell) for line in table.LINES} - names <= {
        ("serve_again-llama-8b", "warm start"),
        ("serve-llama-8b", "32 x 1000 + 100"),
    }
    assert len(lines) == len(cells) + 4 and "dropped first" in lines[-1] and "steps-gpt-oss-20b" in lines[-1]


@pytest.mark.parametrize("name", suite.ALL_SECTIONS)
def test_every_section_can_be_planned(name: str) -> None:
    """The plan is made of what is measured: no cell is left out, and none needs the device for its name."""
    family = "gpu" if name in suite.CHIPS["gpu"] else "tpu"
    cells = suite.plan([name], family=family)
    assert cells and len({cell.name for cell in cells}) == len(cells)


def test_an_optional_cell_leaves_the_time_of_what_comes_after(tmp_path: Path) -> None:
    results, ran = Results(tmp_path / RESULTS, tiny=False), []
    options = Options(tmp_path, tmp_path, False, time.time() + 100, kept=95)
    bench = Bench("write", options, results, _reporter([]))

    def measure() -> Row:
        ran.append(1)
        return {}

    assert not bench.cell("optional", 10, measure, optional=True) and ran == []
    assert bench.cell("needed", 10, measure) and ran == [1]
    cells = [Planned("write", "needed", "?", 10, 60, False), Planned("attention", "later", "?", 20, 60, False)]
    assert suite.needed(cells) == 30 + 2 * suite.PROCESS_SECONDS
    assert suite.needed(cells, results) == 20 + suite.PROCESS_SECONDS


def test_the_second_run_is_decided_by_the_first(tmp_path: Path) -> None:
    """It begins with what is missing, and goes on without a kernel that was wrong or ended its process."""
    results = Results(tmp_path / RESULTS, tiny=False)
    assert suite.second_sections(results, tiny=False) == [*suite.FIRST, *suite.SECOND]
    for cell in suite.plan(suite.FIRST):
        results.rows[cell.section, cell.name] = {"section": cell.section, "name": cell.name}
    assert suite.second_sections(results, tiny=False) == list(suite.SECOND)
    del results.rows["serve-llama-8b", "500 x 30 + 500"]
    assert suite.second_sections(results, tiny=False)[0] == "serve-llama-8b"
    assert suite.attention_of(results) == "auto"
    decode = results.rows["numerics", "triton llama decode"]
    for bad in ({"ok": False}, {"error": "did not finish in 60 s", "ended_process": True}):
        results.rows["numerics", "triton llama decode"] = decode | bad
        assert suite.attention_of(results) == "xla"
    results.rows["numerics", "triton llama decode"] = decode
    for rows in (1, 128, 512):
        results.rows["steps-llama-8b", f"compile decode {rows}"]["error"] = "INTERNAL: ptxas"
    assert suite.attention_of(results) == "xla"


def test_again_keeps_the_first_figures(tmp_path: Path) -> None:
    """A second compilation comes from a cache, and its seconds say nothing."""
    bench = Bench("write", _options(tmp_path), Results(tmp_path / RESULTS, tiny=True), _reporter([]))
    assert bench.again("compile", 0, lambda: {"seconds": 20.0}) and bench.again("compile", 0, lambda: {"seconds": 0.1})
    assert bench.results.get("write", "compile", "seconds") == 20.0


def _came(back: Path, names: list[str]) -> Path:
    back.mkdir()
    rows = [{"section": "ceilings", "name": name} for name in names]
    (back / RESULTS).write_text(json.dumps({"tiny": True, "rows": rows}))
    (back / PROFILE).write_text("{}")
    with tarfile.open(back / "autotune.tgz", "w:gz"):
        pass
    return back


def test_what_comes_back_cut_off_or_shorter_changes_nothing(tmp_path: Path, kept: Path) -> None:
    assert visit.take_back(_came(tmp_path / "first", ["copy", "read"])) == []
    before = {path.name: path.read_bytes() for path in kept.iterdir()}
    shorter = _came(tmp_path / "second", ["copy"])
    (shorter / PROFILE).write_text("{")
    (shorter / "autotune.tgz").write_bytes(b"\x1f\x8b")
    assert len(visit.take_back(shorter)) == 3
    assert {path.name: path.read_bytes() for path in kept.iterdir()} == before


def test_a_visit_makes_both_runs_at_once(tmp_path: Path, kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visit, "CARRY", visit.ROOT / "build" / "nothing")
    machine = tmp_path / "machine.py"
    machine.write_text(
        "import pathlib, sys, json\n"
        "back, seconds, command = sys.argv[1:]\n"
        "rows = [{'section': 'ceilings', 'name': command}]\n"
        f"kept = pathlib.Path({str(kept / RESULTS)!r})\n"
        "rows += json.loads(kept.read_text())['rows'] if kept.exists() else []\n"
        "pathlib.Path(back, 'device.json').write_text(json.dumps({'tiny': True, 'rows': rows}))\n"
    )
    visit.Visit(f"{sys.executable} {machine} {{back}} {{seconds}} {{command}}", 15.0, ("--tiny",)).run()
    names = [row["name"] for row in json.loads((kept / RESULTS).read_text())["rows"]]
    there = "sh benchmarks/device_suite/there.sh"
    assert names == [f"{there} second 180 --tiny", f"{there} first 480 --tiny"]


def test_the_table_has_published_marks_beside_ours(tmp_path: Path) -> None:
    rows = [
        {"section": "serve-llama-8b", "name": "100 x 30 + 500", "tok_s": 14_700.0},
        {
            "section": "serve-llama-8b",
            "name": "500 x 30 + 500",
            "error": "RuntimeError: 3 of 500 requests failed\nmore",
        },
        {"section": "numerics", "name": "triton llama decode", "ok": True},
        {"section": "numerics", "name": "triton llama mixed", "ok": False},
    ]
    text = table.markdown({"tiny": False, "rows": rows})
    assert "| 8B bfloat16 over HTTP, 100 clients | 14,700 tokens/s | - | 9,800 tokens/s (H100, SGLang) | 1.50 |" in text
    assert "500 clients | failed | - | 20,000 tokens/s" in text and "not measured | - | 235 ms" in text
    assert "Numbers: 1 of 2 checks" in text and "- wrong: numerics triton llama mixed" in text
    assert "1.50" not in table.markdown({"tiny": True, "rows": rows})  # a tiny model beside a mark says nothing
    page = tmp_path / "page.md"
    page.write_text(f"before\n{table.BEGIN}\nold\n{table.END}\nafter\n")
    table.write(page, text)
    assert page.read_text() == f"before\n{table.BEGIN}\n{text}\n{table.END}\nafter\n"
    page.write_text("no place")
    with pytest.raises(ValueError, match="device table"):
        table.write(page, text)
    assert table.BEGIN in (suite.ROOT / "BENCHMARKS.md").read_text(encoding="utf-8")


def test_a_machine_gives_back_few_and_small_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, back = tmp_path / "out", tmp_path / "back"
    (out / "a" / "b" / "c").mkdir(parents=True)
    for name in ("device.json", "odd name", "a/b/there", "a/b/c/deep"):
        (out / name).write_text("x")
    (out / "large").write_bytes(bytes(LIMITS.bytes + 1))
    left_out = bring_back(out, back)
    assert sorted(text.partition(" (")[0] for text in left_out) == ["a/b/c/deep", "large", "odd name"]
    assert (back / "a/b/there").exists() and (back / "device.json").exists()
    for number in range(9):
        (out / f"z{number}").write_text("x")
    assert len(bring_back(out, back)) == 3 + 3


def test_the_old_path_says_where_the_suite_is() -> None:
    command = [sys.executable, "-m", "jaxserve.bench.device"]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=suite.ROOT, timeout=300)
    assert ended.returncode == 1 and "python -m benchmarks.device_suite" in ended.stderr
