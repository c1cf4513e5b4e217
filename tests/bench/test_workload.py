"""Workloads are what they say, from a seed."""

from pathlib import Path

import pytest

from jaxserve.bench.load import dataset_workload, poisson, random_workload, trace_workload, warm_up_workload
from jaxserve.errors import ConfigError


def test_random_prompts_have_the_asked_lengths() -> None:
    requests = random_workload(20, input_len=10, output_len=4, vocab_size=300)
    assert {len(r.prompt) for r in requests} == {10}
    assert {r.max_tokens for r in requests} == {4}
    assert all(150 <= token < 300 for r in requests for token in r.prompt if isinstance(token, int))
    assert requests == random_workload(20, input_len=10, output_len=4, vocab_size=300)


def test_spread_stays_within_its_bounds() -> None:
    lengths = [len(r.prompt) for r in random_workload(200, input_len=100, output_len=1, vocab_size=99, spread=0.5)]
    assert 50 <= min(lengths) < 70 < 130 < max(lengths) <= 150


def test_poisson_arrivals_have_the_asked_rate() -> None:
    timed = poisson(random_workload(2000, input_len=1, output_len=1, vocab_size=9), rate=50.0)
    times = [r.at for r in timed if r.at is not None]
    assert times == sorted(times)
    assert times[-1] == pytest.approx(2000 / 50, rel=0.1)


def test_a_dataset_is_read_by_any_of_its_usual_keys(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"turns": ["a", "b"]}\n\n{"question": "q"}\n{"messages": [{"content": "m"}]}\n')
    assert {str(r.prompt) for r in dataset_workload(path, 50, output_len=3)} == {"a", "q", "m"}
    path.write_text('{"other": 1}\n')
    with pytest.raises(ConfigError, match="no line with a prompt"):
        dataset_workload(path, 1, output_len=3)


def test_a_trace_gives_times_and_lengths(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,5,7\n2023-11-16 18:17:04.4799600,5000,7\n2023-11-16 18:17:05.0,1,1\n"
    )
    requests = trace_workload(path, 2, vocab_size=50, speed=2.0, max_len=64)
    assert [(r.num_prompt_tokens, r.max_tokens) for r in requests] == [(5, 7), (62, 1)]
    assert [r.at for r in requests] == [0.0, pytest.approx(0.25)]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot read"),
        (b'{"prompt": "\xff"}', "not UTF-8"),
        (b'{"prompt": "a"}\n{"prompt": "b', "line 2 of .* no JSON object"),
        (b"[1]", "line 1 of .* no JSON object"),
        (b'{"messages": [{}]}', "no line with a prompt"),
    ],
)
def test_a_dataset_that_is_none_is_told(content: bytes | None, said: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=said):
        dataset_workload(path, 1, output_len=3)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (None, "cannot read"),
        ("a,b\n1,2\n", "line 2 of .* no row"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9,5,7\n2023-11-16 18:1", "line 3 of .* no row"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9,5,7\n", "has 1 requests"),
    ],
)
def test_a_trace_that_is_none_is_told(rows: str | None, said: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    if rows is not None:
        path.write_text(rows)
    with pytest.raises(ConfigError, match=said):
        trace_workload(path, 2, vocab_size=50, max_len=64)


def test_a_warm_up_has_the_lengths_and_not_the_prompts() -> None:
    requests = poisson(random_workload(3, input_len=40, output_len=4, vocab_size=300, spread=0.5), rate=1.0)
    others = warm_up_workload(requests, 5, vocab_size=300)
    assert [len(r.prompt) for r in others] == [len(requests[n % 3].prompt) for n in range(5)]
    assert {r.at for r in others} == {None} and others[3].prompt != others[0].prompt
    assert not {tuple(r.prompt[:8]) for r in requests} & {tuple(r.prompt[:8]) for r in others}
