"""A stored program that loads and cannot be run: found at the start, named, and compiled again."""

from pathlib import Path

import jax
import pytest

from jaxserve import Engine, SamplingParams
from jaxserve.runtime.compilation import program_cache
from tests.conftest import ONE_ROW
from tests.quick import quick_programs
from tests.runtime.damaged import without_functions

GREEDY = SamplingParams(temperature=0.0, max_tokens=4)


def tokens(cache: Path) -> list[int]:
    with program_cache.unused(), quick_programs(), Engine(compile_cache=str(cache), **ONE_ROW) as engine:
        return engine.generate("Once upon a time", GREEDY)[0][0].token_ids


def test_what_cannot_be_run_is_compiled_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The program that takes a request in, which no step's first run covers."""
    jax.clear_caches()  # a program that an earlier test found in JAX's own cache would not be stored
    expected = tokens(tmp_path)
    [admit] = [path for path in tmp_path.rglob("*.program") if b"jit_admit\x12" in path.read_bytes()]
    damaged = without_functions(admit.read_bytes())
    admit.write_bytes(damaged)
    caplog.clear()
    assert tokens(tmp_path) == expected
    assert "a stored program cannot be run" in caplog.text and "admit, " in caplog.text
    # JAX may keep it in memory, and then it is compiled and not stored, see tests/runtime/test_store.py
    assert not admit.exists() or admit.read_bytes() != damaged
    caplog.clear()
    assert tokens(tmp_path) == expected
    assert "cannot be run" not in caplog.text, "the next start finds programs that can be run"
