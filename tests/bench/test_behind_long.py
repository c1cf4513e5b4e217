"""The benchmark of a short request behind long prompts, against a small real server."""

import argparse

import pytest

from benchmarks import behind_long
from benchmarks.behind_long import first_token_seconds, requests_of
from jaxserve.bench.load import LoadRequest, LoadTarget
from jaxserve.errors import ConfigError

OPTIONS = argparse.Namespace(vocab_size=1000, short_len=8, short_output=3, long_len=100, after=0.2)


def test_the_short_request_comes_after_the_long_prompts() -> None:
    *longs, short = requests_of(4, OPTIONS, seed=1)
    assert [len(each.prompt) for each in longs] == [100] * 4 and {each.at for each in longs} == {0.0}
    assert (len(short.prompt), short.at, short.max_tokens) == (8, 0.2, 3)
    (alone,) = requests_of(0, OPTIONS, seed=1)
    assert alone.prompt == short.prompt and alone.at == 0.0


def test_no_two_runs_share_a_prompt() -> None:
    prompts = {tuple(each.prompt) for seed in range(3) for each in requests_of(4, OPTIONS, seed)}
    assert len(prompts) == 3 * 5


def test_a_row_for_each_number_of_long_prompts(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--long-len", "50", "--after", "0", "--repeats", "2", "--long", "1", "3"]
    behind_long.main(["--base-url", url, "--label", "lpm", *sizes])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("| server | long prompts |")
    assert [line.split(" | ")[:2] for line in lines[2:]] == [["| lpm", "1"], ["| lpm", "3"]]
    assert all(float(cell) > 0 for line in lines[2:] for cell in line.strip("| ").split(" | ")[2:])


def test_a_request_that_fails_is_said(url: str) -> None:
    with pytest.raises(ConfigError, match="400"):
        first_token_seconds(LoadTarget(url, "m"), [LoadRequest("bad", None, 1), LoadRequest("a", None, 1)])
