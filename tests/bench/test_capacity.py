"""`jaxserve bench capacity`: the search over rates, and the command against a server that answers one at a time."""

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest

from jaxserve.bench import capacity
from jaxserve.bench.capacity import Limits, Trial, find_capacity
from jaxserve.bench.load import LoadRequest, LoadTarget, summarize
from jaxserve.cli.main import main

from .conftest import Handler

TARGET = LoadTarget("http://127.0.0.1:1", "m")
LIMITS = Limits(0.5, None, 0.9)


@pytest.mark.parametrize(("holds_to", "first"), [(3.3, 1.0), (3.3, 100.0), (0.07, 1.0), (1000.0, 1.0)])
def test_the_search_closes_in(monkeypatch: pytest.MonkeyPatch, holds_to: float, first: float) -> None:
    async def trial(target: LoadTarget, requests: list[LoadRequest], rate: float, limits: Limits) -> Trial:
        return Trial(rate, rate <= holds_to, 1.0, rate > holds_to, False, summarize([], 1.0))

    async def search() -> list[Trial]:
        found = find_capacity(TARGET, lambda rate, number: [], LIMITS, rate=first, precision=0.1)
        return [each async for each in found]

    monkeypatch.setattr(capacity, "_trial", trial)
    monkeypatch.setattr(capacity, "PAUSE", 0.0)
    trials = asyncio.run(search())
    best = max(each.rate for each in trials if each.holds)
    assert best <= holds_to < best * 1.1 and len({each.rate for each in trials}) == len(trials) < 20


def test_a_trial_that_breaks_off_leaves_no_task(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*args: object, **options: object) -> None:
        raise RuntimeError("broken")

    async def search() -> int:
        with pytest.raises(RuntimeError, match="broken"):
            await anext(find_capacity(TARGET, lambda rate, number: [], LIMITS))
        return len(asyncio.all_tasks())

    monkeypatch.setattr(capacity, "run_load", broken)
    assert asyncio.run(search()) == 1


class OneAtATime(Handler):
    """Takes 30 ms for each request, one after the other."""

    lock = threading.Lock()

    def do_POST(self) -> None:
        with self.lock:
            time.sleep(0.03)
            super().do_POST()


@pytest.fixture(scope="module")
def slow_url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), OneAtATime)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_the_command(slow_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The server answers at most 33 a second, on any machine."""
    report = tmp_path / "capacity.json"
    flags = ["--ttft", "400ms", "--gap", "1s", "--seconds", "0.5", "--request-rate", "64", "--precision", "0.5"]
    flags += ["--output-len", "2", "--num-prompts", "40", "--json", str(report)]
    main(["bench", "capacity", "--base-url", slow_url, *flags])
    saved = json.loads(report.read_bytes())
    rates = [each["rate"] for each in saved["trials"]]
    assert rates[0] == 64 and not saved["trials"][0]["holds"] and saved["trials"][0]["given_up"]
    assert saved["capacity"] < 64 and saved["limits"] == {"ttft": 0.4, "gap": 1.0, "share": 0.9}
    printed = capsys.readouterr().out
    assert "capacity: " in printed and "the first token within 400 ms and a token after it within 1000 ms" in printed


def test_a_server_that_is_too_slow_alone_ends_the_search(url: str, tmp_path: Path) -> None:
    dataset = tmp_path / "prompts.jsonl"
    dataset.write_text('{"prompt": "bad"}\n')
    flags = [
        "--ttft",
        "1s",
        "--seconds",
        "0.1",
        "--request-rate",
        "20",
        "--num-prompts",
        "3",
        "--dataset",
        str(dataset),
    ]
    assert main(["bench", "capacity", "--base-url", url, *flags]) == 1


def test_a_capacity_needs_a_limit(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "capacity", "--base-url", url]) == 2
    assert "--ttft" in capsys.readouterr().err


@pytest.mark.parametrize(("flags", "code"), [((), 1), (("--token-ids",), 0)])
def test_tokens_without_text_are_timed_by_their_ids(
    url: str, tmp_path: Path, flags: tuple[str, ...], code: int
) -> None:
    dataset = tmp_path / "prompts.jsonl"
    dataset.write_text('{"prompt": "silent"}\n')
    assert main(["bench", "serve", "--base-url", url, "--num-prompts", "1", "--dataset", str(dataset), *flags]) == code
