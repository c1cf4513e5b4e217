"""Floors: arithmetic against hand-made numbers, sizes against a real configuration, and a measurement that runs."""

import json
from pathlib import Path

import pytest

from benchmarks import floors
from benchmarks.floors import Machine, ModelSize, decode_floor, measure_machine, model_size, prefill_floor
from benchmarks.make_model import Shape

MACHINE = Machine(bandwidth=100.0, rate=1000.0)
MODEL = ModelSize(parameters=50, kv_values=2)


def test_a_step_is_bound_by_weights_or_by_arithmetic_and_then_reads_the_cache() -> None:
    assert decode_floor(MACHINE, MODEL, rows=1, context=0) == pytest.approx(50 * 4 / 100)
    assert decode_floor(MACHINE, MODEL, rows=100, context=0) == pytest.approx(2 * 50 * 100 / 1000)
    assert decode_floor(MACHINE, MODEL, rows=1, context=25) == pytest.approx(2 + 25 * 2 * 4 / 100)
    assert prefill_floor(MACHINE, MODEL, tokens=30) == pytest.approx(3.0)


@pytest.mark.parametrize("tied", [True, False])
def test_an_embedding_that_is_no_head_is_not_read(tied: bool, tmp_path: Path) -> None:
    shape = Shape(hidden=64, layers=2, heads=4, kv_heads=2, ffn=96, vocab=512)
    (tmp_path / "config.json").write_text(json.dumps(shape.config("float32") | {"tie_word_embeddings": tied}))
    layer = 64 * (64 + 2 * 32 + 64 + 3 * 96) + 2 * 64
    assert model_size(tmp_path) == ModelSize(2 * layer + 64 + 512 * 64, 2 * 2 * 2 * 16)


def test_the_machine_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(floors, "_READ_BYTES", 2**22)
    monkeypatch.setattr(floors, "_SQUARE", 256)
    machine = measure_machine()
    assert machine.bandwidth > 1e8 and machine.rate > 1e8
