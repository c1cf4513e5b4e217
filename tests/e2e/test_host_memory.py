"""Evicted pages in the memory of the host and in a file: the same tokens, found again after a restart."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve import Engine, SamplingParams
from jaxserve.errors import ConfigError
from tests.conftest import FEW_PAGES
from tests.waiting import wait_until

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
NUM_PAGES = FEW_PAGES["num_pages"]


def make(compile_cache: str, **keys: Any) -> Engine:
    return Engine(compile_cache=compile_cache, **FEW_PAGES, **keys)


def prompts(engine: Engine, count: int = 8, length: int = 200) -> list[list[int]]:
    """Together several times the pages of the device."""
    rng = random.Random(1)
    return [[rng.randrange(4, engine.info.vocab_size) for _ in range(length)] for _ in range(count)]


def ask(engine: Engine, texts: list[list[int]]) -> list[list[int]]:
    """Ask one after the other, so that each prompt takes the pages of others."""
    found = [engine.generate(text, GREEDY)[0][0].token_ids for text in texts]
    engine.core.scheduler.check_integrity()
    return found


def computed(engine: Engine) -> int:
    return engine.core.stats().computed_prompt_tokens


def test_pages_are_loaded_instead_of_computed(compile_cache: str) -> None:
    engine = make(compile_cache, host_memory="64MiB")
    texts = prompts(engine)
    first, before = ask(engine, texts), computed(engine)
    assert ask(engine, texts) == first
    stats = engine.core.stats()
    assert computed(engine) - before <= len(texts) * engine.info.page_size, "all but the ends was loaded"
    assert stats.details["host_pages_loaded"] > NUM_PAGES and stats.compiles == 0
    plan = engine.info.memory_plan
    assert plan["num_host_pages"] * plan["host_page_bytes"] <= 64 * 2**20
    engine.close()


def test_a_new_engine_finds_the_pages_in_the_file(compile_cache: str, tmp_path: Path) -> None:
    keys = {"host_memory": "64MiB", "disk": str(tmp_path / "pages")}
    engine = make(compile_cache, **keys)
    texts = prompts(engine)
    expected = ask(engine, texts)
    with pytest.raises(ConfigError, match="another server uses this directory"):
        make(compile_cache, **keys)
    engine.close()

    engine = make(compile_cache, **keys)
    file = engine.runner.host.files[0]
    assert file is not None and len(file.to_check) > NUM_PAGES
    wait_until(lambda: len(file.checked) == len(file.to_check), "every page is checked")
    assert ask(engine, texts) == expected
    assert computed(engine) < 0.6 * sum(map(len, texts)), "the pages that were never evicted are gone"
    engine.close()

    (path,) = (tmp_path / "pages").iterdir()
    data = np.fromfile(path, np.uint8)
    data[-engine.runner.plan.host_page_bytes * engine.runner.plan.num_host_pages :] ^= 1
    data.tofile(path)
    engine = make(compile_cache, **keys)
    assert ask(engine, texts) == expected
    assert computed(engine) == sum(map(len, texts)) and engine.core.stats().details["host_pages_loaded"] == 0
    engine.close()


def test_a_flush_empties_the_file_at_once_and_later_pages_are_kept(compile_cache: str, tmp_path: Path) -> None:
    keys = {"host_memory": "64MiB", "disk": str(tmp_path / "pages")}
    engine = make(compile_cache, **keys)
    texts = prompts(engine)
    expected = ask(engine, texts)
    engine.core.flush_prefix_cache()
    engine.close()
    engine.close()

    engine = make(compile_cache, **keys)  # `close` has unlocked the file
    assert engine.runner.host.files[0] is not None and engine.runner.host.files[0].to_check == []
    ask(engine, texts)
    engine.core.flush_prefix_cache()
    assert ask(engine, texts) == expected
    engine.close()

    engine = make(compile_cache, **keys)
    assert len(engine.runner.host.files[0].to_check) > NUM_PAGES
    wait_until(lambda: len(engine.runner.host.files[0].checked) == len(engine.runner.host.files[0].to_check), "checked")
    assert ask(engine, texts) == expected and engine.core.stats().details["host_pages_loaded"] > NUM_PAGES
    engine.close()


def test_no_page_of_other_weights_is_found(compile_cache: str, tmp_path: Path) -> None:
    keys = {"host_memory": "64MiB", "disk": str(tmp_path / "pages")}
    engine = make(compile_cache, **keys)
    texts = prompts(engine)
    expected, leaves = ask(engine, texts), [np.asarray(leaf) for leaf in engine.runner.leaves]
    engine.update_weights([(leaf * 1.5).astype(leaf.dtype) for leaf in leaves])
    other, count = ask(engine, texts), computed(engine)
    assert count == 2 * sum(map(len, texts)) and other != expected
    assert ask(engine, texts) == other, "from pages of the new weights"
    engine.close()

    engine = make(compile_cache, **keys)
    assert ask(engine, texts) == expected and engine.core.stats().details["host_pages_loaded"] == 0
    engine.close()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"host_memory": "1GB", "prefix_cache": False}, r"host_memory: .*needs cache\.prefix_cache"),
        ({"disk": "/tmp"}, r"disk: .*needs cache\.host_memory"),
        ({"host_memory": "1 lot"}, "such as 8GiB"),
        ({"host_memory": "1KiB"}, "one page takes"),
        ({"host_memory": "1000TiB"}, "the machine has"),
    ],
)
def test_what_cannot_be_is_named(compile_cache: str, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(compile_cache, **keys)
