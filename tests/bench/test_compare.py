"""The comparison's arithmetic: ratios of rounds, floors, and rounds that are added to those of an earlier call."""

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks import compare
from benchmarks.floors import Machine, ModelSize
from jaxserve.bench.load import LoadReport, Spread

OPTIONS = argparse.Namespace(input_len=10, output_len=4, rounds=2, concurrency=[1, 8])


def _record(turn: int, server: str, concurrency: int, rate: float) -> dict[str, object]:
    return {"round": turn, "server": server, "concurrency": concurrency, "output_rate": rate, "itl_ms": None}


def test_ratios_are_taken_within_a_round() -> None:
    records = [_record(0, "a", 8, 10), _record(0, "b", 8, 5), _record(1, "a", 8, 30), _record(1, "b", 8, 10)]
    records += [_record(2, "a", 8, 99), _record(0, "a", 1, 3), _record(0, "b", 1, 4)]
    assert compare.ratios(records, "a", "b") == {1: (0.75, 0.75, 0.75), 8: (2.0, 2.5, 3.0)}


def test_the_floor_of_a_load() -> None:
    """Two rows: 20 prompt tokens at 100 operations a token, then 4 steps of 0.5 s of weights and the cache."""
    machine, model = Machine(bandwidth=400.0, rate=1000.0), ModelSize(parameters=50, kv_values=0)
    assert compare.floor_rate(machine, model, 2, OPTIONS) == pytest.approx(2 * 4 / (2.0 + 4 * 0.5))


def test_rounds_count_on_and_turn_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    spread = Spread(1, 1, 1, 1, 1)
    report = LoadReport(1, 0, 1, 1, 1, 1, 7.0, 1, None, spread, spread, spread, spread, None)
    started: list[str] = []

    @contextmanager
    def running(server: compare.Server, log: Path) -> Iterator[str]:
        started.append(server.name)
        yield "url"

    monkeypatch.setattr(compare, "running", running)
    monkeypatch.setattr(compare, "measure", lambda url, concurrency, options: report)
    servers = [compare.Server(name, (), {}) for name in ("a", "b")]
    records, saved = [_record(4, "a", 1, 3.0)], []
    compare.compare(servers, OPTIONS, records, lambda: saved.append(json.dumps(records)))
    assert started == ["b", "a", "a", "b"]
    assert [record["round"] for record in records] == [4, 5, 5, 5, 5, 6, 6, 6, 6]
    assert len(saved) == 8
    compare.show_floors(records, Machine(1e9, 1e9), ModelSize(50, 1), OPTIONS)
