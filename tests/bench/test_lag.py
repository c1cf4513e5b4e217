"""The benchmark of the loops' lag: what is measured, and which requests are named for it."""

import json
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks.held import SLOW, HeldLog, Iterations, read_samples, read_slow, watch_core
from benchmarks.lag import Sent, blame, spread, worst
from benchmarks.stretched import ROUTES, stretched
from tests.conftest import SMALL


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def spend(self, seconds: float, result: Any = None) -> Any:
        self.now += seconds
        return result


def test_a_turn_is_the_hosts_work_without_the_devices() -> None:
    clock, seen = Clock(), list[float]()
    step = SimpleNamespace(sample=lambda mask, late: clock.spend(10), result=lambda: clock.spend(20))
    core = SimpleNamespace(add=lambda *_: clock.spend(1), abort=lambda ids: clock.spend(0.5), has_work=True)
    core.runner = SimpleNamespace(execute=lambda output: clock.spend(40, step), num_compiles=lambda: 7)

    def work() -> None:
        clock.spend(2)
        handle = core.runner.execute(None)
        handle.sample(None)
        handle.result()

    core.step = work
    watch_core(core, Iterations(clock, seen.append))
    clock.spend(100)  # nothing was asked for
    core.add("a")
    core.step()
    clock.spend(0.25)  # what the loop itself does between two steps
    core.has_work = False
    core.step()
    clock.spend(100)
    core.abort(["a"])
    core.step()
    assert seen == [3.0, 2.25, 2.5] and core.runner.num_compiles() == 7


def test_the_log_of_another_process_is_read(tmp_path: Path) -> None:
    log = HeldLog(tmp_path, "api")
    for _ in range(3):
        log.add(SLOW * 2)
    log.add(SLOW / 2)
    log.close()
    assert np.allclose(read_samples(tmp_path, "api"), [SLOW * 2] * 3 + [SLOW / 2])
    assert [slow.seconds for slow in read_slow(tmp_path, "api")] == [SLOW * 2] * 3
    assert spread(read_samples(tmp_path, "api"))["max"] == pytest.approx(SLOW * 2e3)
    assert spread(read_samples(tmp_path, "engine")) == {"samples": 0}


def test_the_request_that_held_a_loop_is_named(tmp_path: Path) -> None:
    sent = [Sent(n, f"/{n}", ("stop",), 10, began=n * 10.0, ended=n * 10.0 + 1.0, status=200) for n in range(3)]
    events = [(10.5, 0.3), (10.9, 0.1), (12.0, 0.2)]  # the last one after the answer
    (tmp_path / "api.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events) + "[1")  # killed
    blame(sent, tmp_path)
    assert [each.held_ms for each in sent] == [{}, {"api": 300.0, "api_after": 200.0}, {}]
    assert [each["path"] for each in worst(sent, "api", 5)] == ["/1"]


def test_stretched_requests_are_the_same_again_and_reach_every_route() -> None:
    made = [stretched(random.Random(number)) for number in range(60)]
    assert made == [stretched(random.Random(number)) for number in range(60)]
    assert {each.path for each in made} == set(ROUTES)
    assert max(len(each.body) for each in made) > 2_000_000


@pytest.mark.slow
def test_a_short_run_with_a_real_server(tmp_path: Path, compile_cache: str) -> None:
    flags = [f"--scheduler.{name.replace('_', '-')} {number}" for name, number in SMALL.items()]
    flags += [f"--runtime.compile-cache {compile_cache}"]
    words = [sys.executable, "-m", "benchmarks.lag", "--seconds", "5", "--json", str(tmp_path / "found")]
    subprocess.run([*words, "--launch", " ".join(flags)], stdout=subprocess.DEVNULL)
    found = json.loads((tmp_path / "found").read_text())
    assert found["requests"] > 0 and not found["failed"] and found["restarts"] == 0
    assert all(found["held_ms"][loop]["samples"] > 100 for loop in ("api", "engine"))
    assert found["other_tenant"]["texts"] == 1
