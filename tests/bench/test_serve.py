"""`jaxserve bench serve` as a user calls it: each workload against a server, and what it prints and writes."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from jaxserve.cli import bench
from jaxserve.cli.main import main
from jaxserve.errors import ConfigError

from .conftest import Handler


def _serve(url: str, tmp_path: Path, *flags: str) -> dict[str, Any]:
    path = tmp_path / "report.json"
    assert bench.run(["serve", "--base-url", url, "--json", str(path), *flags]) == 0
    return json.loads(path.read_bytes())


def test_random_prompts_at_a_concurrency(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--num-prompts", "6", "--output-len", "4", "--concurrency", "2", "--warmup", "1", "--ttft-limit", "60000")
    saved = _serve(url, tmp_path, *flags)
    report = saved["report"]
    assert (report["completed"], report["failed"], report["output_tokens"]) == (6, 0, 24)
    assert len(saved["timings"]) == 6 and saved["environment"]["packages"]["jax"]
    assert report["goodput"] == report["request_rate"]
    printed = capsys.readouterr().out
    for words in ("time to first token", "gap between chunks", "end to end", "goodput", '"output_rate"'):
        assert words in printed


def test_a_dataset_at_a_request_rate(url: str, tmp_path: Path) -> None:
    dataset = tmp_path / "prompts.jsonl"
    dataset.write_text('{"prompt": "hello"}\n{"question": "why?"}\n')
    flags = ("--dataset", str(dataset), "--num-prompts", "5", "--output-len", "2", "--request-rate", "50")
    saved = _serve(url, tmp_path, *flags)
    sent = [timing["sent"] for timing in saved["timings"]]
    assert saved["report"]["completed"] == 5 and saved["report"]["goodput"] is None
    assert max(sent) > 0.01 and len(set(sent)) == 5  # one after the other, not all at once


def test_a_trace_keeps_its_times(url: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    rows = ["2024-01-01 00:00:00.0,5,2", "2024-01-01 00:00:01.0,7,3"]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    saved = _serve(f"{url}/v1", tmp_path, "--trace", str(trace), "--num-prompts", "2", "--trace-speed", "5")
    first, second = sorted(timing["sent"] for timing in saved["timings"])
    assert saved["report"]["output_tokens"] == 5
    assert second - first == pytest.approx(0.2, abs=0.15)


def test_a_failed_request_is_the_exit_code(url: str, tmp_path: Path) -> None:
    dataset = tmp_path / "prompts.jsonl"
    dataset.write_text('{"prompt": "bad"}\n')
    assert bench.run(["serve", "--base-url", url, "--dataset", str(dataset), "--num-prompts", "1"]) == 1


def test_chat_needs_text(url: str) -> None:
    with pytest.raises(ConfigError, match="--chat needs --dataset"):
        bench.run(["serve", "--base-url", url, "--chat"])


def test_a_plot(url: str, tmp_path: Path) -> None:
    path = tmp_path / "plot.png"
    words = ["serve", "--base-url", url, "--num-prompts", "2", "--output-len", "2", "--plot", str(path)]
    if importlib.util.find_spec("matplotlib") is None:
        with pytest.raises(ConfigError, match="matplotlib"):
            bench.run(words)
    else:
        assert bench.run(words) == 0 and path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "words",
    [
        ("--concurrency", "-1"),
        ("--concurrency", "0"),
        ("--num-prompts", "0"),
        ("--num-prompts", "many"),
        ("--input-len", "0"),
        ("--output-len", "-3"),
        ("--spread", "nan"),
        ("--spread", "2"),
        ("--vocab-size", "0"),
        ("--request-rate", "0"),
        ("--request-rate", "-5"),
        ("--request-rate", "inf"),
        ("--trace-speed", "0"),
        ("--max-len", "1"),
        ("--warmup", "-1"),
        ("--ttft-limit", "nan"),
        ("--api-key", "schl\u00fcssel"),
    ],
)
def test_a_value_that_cannot_be_meant_is_refused_by_name(
    words: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        bench.run(["serve", *words])
    last = capsys.readouterr().err.splitlines()[-1]
    assert end.value.code == 2 and last.startswith(f"jaxserve bench serve: error: argument {words[0]}: "), last


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--dataset", "none.jsonl"), "cannot read none.jsonl"),
        (("--trace", "none.csv"), "cannot read none.csv"),
        (("--trace", "none.csv", "--request-rate", "5"), "--request-rate has no effect on a trace workload"),
        (("--trace", "none.csv", "--dataset", "a.jsonl"), "--dataset has no effect on a trace workload"),
        (("--dataset", "none.jsonl", "--input-len", "5"), "--input-len has no effect on a dataset workload"),
        (("--max-len", "500"), "--max-len has no effect on a random workload"),
        (("--json", "none/report.json"), "--json: no file can be written at none/report.json"),
        (("--plot", "none/plot.png"), "--plot: no file can be written at none/plot.png"),
        (("--plot", "plot.xyz"), "--plot writes a PNG"),
    ],
)
def test_what_cannot_run_is_told_before_a_request_is_sent(
    url: str, words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Handler.prompts.clear()
    assert main(["bench", "serve", "--base-url", url, *words]) == 2
    shown = capsys.readouterr().err
    assert said in shown and len(shown.splitlines()) == 1 and not Handler.prompts


def test_no_measured_prompt_was_warmed_up(url: str, tmp_path: Path) -> None:
    Handler.prompts.clear()
    _serve(url, tmp_path, "--num-prompts", "3", "--output-len", "1", "--warmup", "4")
    assert len(Handler.prompts) == 7 and len({tuple(prompt) for prompt in Handler.prompts}) == 7
    dataset = tmp_path / "prompts.jsonl"
    dataset.write_text('{"prompt": "hello"}\n')
    Handler.prompts.clear()
    _serve(url, tmp_path, "--dataset", str(dataset), "--num-prompts", "2", "--output-len", "1", "--warmup", "2")
    assert Handler.prompts[2:] == ["hello"] * 2 and "hello" not in Handler.prompts[:2]
