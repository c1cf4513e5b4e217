"""A prompt that one engine computed goes on in another: the same tokens, and almost nothing is computed again."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxserve import Engine, SamplingParams
from jaxserve.errors import ConflictError, InvalidValueError
from tests.conftest import FEW_PAGES
from tests.waiting import LAST_RESORT

SEEDED = SamplingParams(temperature=0.8, seed=5, max_tokens=8, ignore_eos=True, logprobs=1)


def keys_of(compile_cache: str) -> dict[str, Any]:
    return {"compile_cache": compile_cache} | FEW_PAGES


@pytest.fixture(scope="module")
def engines(compile_cache: str) -> Iterator[tuple[Engine, Engine]]:
    """One for prompts, one for the tokens after them; the second has its evicted pages in the memory of the host."""
    prefill, decode = Engine(**keys_of(compile_cache)), Engine(**keys_of(compile_cache), host_memory="64MiB")
    yield prefill, decode
    prefill.close()
    decode.close()


def prompt_of(number: int, length: int = 200) -> list[int]:
    rng = random.Random(number)
    return [rng.randrange(300, 2000) for _ in range(length)]


def answer(engine: Engine, prompt: list[int]) -> tuple[Any, int]:
    """Tokens and log-probabilities, and how many tokens of the prompt were computed."""
    before = engine.core.stats().computed_prompt_tokens
    [completion] = engine.generate([prompt], SEEDED)[0]
    engine.core.scheduler.check_integrity()
    found = completion.token_ids, [entry.logprob for entry in completion.logprobs or []]
    return found, engine.core.stats().computed_prompt_tokens - before


def prefill(engine: Engine, prompt: list[int], hold_seconds: float = 0.0) -> None:
    engine.add_request(prompt, SamplingParams(max_tokens=1), hold_seconds=hold_seconds)
    while engine.has_unfinished:
        engine.step()


def check_same(found: Any, expected: Any) -> None:
    assert found[0] == expected[0]
    assert found[1] == pytest.approx(expected[1], abs=2e-5)


def test_a_prompt_goes_on_in_another_engine(engines: tuple[Engine, Engine], tmp_path: Path) -> None:
    one, other = engines
    path, size = str(tmp_path / "pages"), one.info.page_size
    for number in range(4):  # the later ones take pages that the first ones had
        prompt = prompt_of(number)
        prefill(one, prompt, hold_seconds=1000.0)
        assert one.handover.write(path, prompt) == 200 // size * size
        assert os.stat(path).st_mode & 0o777 == 0o600
        assert other.handover.read(path) == 200 // size * size
        other.core.scheduler.check_integrity()
        found, computed = answer(other, prompt)
        assert computed == 200 % size or computed <= size
        joint, _ = answer(one, prompt)
        check_same(found, joint)
    assert one.core.scheduler.kv.held.nodes == []


def test_pages_are_held_until_they_are_written(engines: tuple[Engine, Engine], tmp_path: Path) -> None:
    one, _ = engines
    held, lost, path = prompt_of(10), prompt_of(11), str(tmp_path / "pages")
    prefill(one, held, hold_seconds=1000.0)
    prefill(one, lost)
    for number in range(20, 26):
        prefill(one, prompt_of(number))
    assert one.handover.write(path, held) >= 190
    assert one.handover.write(path, lost) == 0, "nobody held them"
    for number in range(20, 26):
        prefill(one, prompt_of(number))
    assert one.handover.write(path, held) == 0, "they were held until then"
    one.core.scheduler.check_integrity()


def test_what_is_not_whole_is_refused_and_computed(engines: tuple[Engine, Engine], tmp_path: Path) -> None:
    one, other = engines
    prompt, path = prompt_of(30), tmp_path / "pages"
    prefill(one, prompt)
    one.handover.write(str(path), prompt)
    whole = path.read_bytes()
    for damaged in (b"", whole[:3], whole[:1000], whole[:-1], whole[:-5000] + b"\xff" + whole[-4999:], b"\xff" * 2000):
        path.write_bytes(damaged)
        with pytest.raises(InvalidValueError, match=r"has no pages|is damaged"):
            other.handover.read(str(path))
    with pytest.raises(InvalidValueError, match="has no pages"):
        other.handover.read(str(tmp_path))
    with pytest.raises(InvalidValueError, match="No such file"):
        one.handover.write(str(tmp_path / "none" / "pages"), prompt)
    path.write_bytes(whole)
    other.core.serving.version = "other weights"
    with pytest.raises(ConflictError, match="of other weights"):
        other.handover.read(str(path))
    other.core.serving.version = one.core.serving.version
    found, computed = answer(other, prompt)
    assert computed == 200
    check_same(found, answer(one, prompt)[0])


@pytest.mark.timeout(280)
def test_pages_of_a_process_that_was_killed(engines: tuple[Engine, Engine], compile_cache: str, tmp_path: Path) -> None:
    _, other = engines
    prompt, path = prompt_of(40), str(tmp_path / "pages")
    keys = keys_of(compile_cache) | {"prompt": prompt}
    command = [sys.executable, "-m", "tests.e2e.prefiller", path, json.dumps(keys)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == str(200 // other.info.page_size * other.info.page_size)
        process.kill()
        process.wait(LAST_RESORT)
    other.handover.read(path)
    found, computed = answer(other, prompt)
    assert computed <= other.info.page_size
    other.core.flush_prefix_cache()
    expected, computed = answer(other, prompt)
    assert computed == 200
    check_same(found, expected)
