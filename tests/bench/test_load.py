"""The load generator against a small real server: what it times and counts, and what it says of failures."""

import asyncio

import pytest

from jaxserve.bench.load import LoadRequest, LoadTarget, Timing, find_model, run_load, summarize, table
from jaxserve.errors import ConfigError

from .conftest import Handler


def test_every_request_is_counted(url: str) -> None:
    assert asyncio.run(find_model(url)) == "m"
    requests = [LoadRequest("a", None, n) for n in (1, 2, 5)] + [LoadRequest("bad", None, 1)]
    done: list[Timing] = []
    timings, seconds = asyncio.run(run_load(LoadTarget(url, "m"), requests, concurrency=2, on_done=done.append))
    report = summarize(timings, seconds, ttft_limit=60.0)
    assert (report.completed, report.failed, report.output_tokens, report.prompt_tokens) == (3, 1, 8, 9)
    assert report.first_error is not None and report.first_error.startswith("400")
    assert report.goodput == pytest.approx(report.request_rate)
    assert len(done) == 4
    assert "failed 1" in table(report)


def test_a_limit_that_none_keeps_means_no_goodput(url: str) -> None:
    timings, seconds = asyncio.run(run_load(LoadTarget(url, "m"), [LoadRequest("a", None, 3)], concurrency=None))
    assert summarize(timings, seconds, ttft_limit=0.0).goodput == 0


@pytest.mark.parametrize(("token_ids", "error"), [(True, None), (False, "no token arrived")])
def test_a_token_without_text_is_seen_when_ids_are_asked_for(url: str, token_ids: bool, error: str | None) -> None:
    target = LoadTarget(url, "m", token_ids=token_ids)
    (timing,), _ = asyncio.run(run_load(target, [LoadRequest("silent", None, 3)], concurrency=None))
    assert (timing.error, len(timing.token_times)) == (error, 3 if token_ids else 0)


def test_tokens_of_reasoning_are_timed(url: str) -> None:
    target = LoadTarget(url, "m", chat=True)
    (timing,), _ = asyncio.run(run_load(target, [LoadRequest("think", None, 3)], concurrency=None))
    assert (timing.error, len(timing.token_times)) == (None, 3)


@pytest.mark.parametrize(("prompt", "times"), [("ends", 3), ("silent end", 1)])
def test_the_chunk_that_ends_an_answer_is_no_token_of_its_own(url: str, prompt: str, times: int) -> None:
    (timing,), _ = asyncio.run(run_load(LoadTarget(url, "m"), [LoadRequest(prompt, None, 3)], concurrency=None))
    assert (timing.error, len(timing.token_times)) == (None, times)


@pytest.mark.parametrize(
    ("prompt", "said"), [("cut", "before its end"), ("uncounted", "no usage"), ("html", "JSONDecodeError")]
)
def test_a_stream_that_is_not_whole_is_a_failure(url: str, prompt: str, said: str) -> None:
    (timing,), _ = asyncio.run(run_load(LoadTarget(url, "m"), [LoadRequest(prompt, None, 3)], concurrency=None))
    assert timing.error is not None and said in timing.error


def test_an_address_that_is_none_is_a_failure() -> None:
    (timing,), _ = asyncio.run(run_load(LoadTarget("http://[::1", "m"), [LoadRequest("a", None, 3)], concurrency=None))
    assert timing.error is not None


@pytest.mark.parametrize("address", ["http://127.0.0.1:9", "http://[::1", "127.0.0.1:9", "ftp://x"])
def test_no_server_is_said(address: str) -> None:
    with pytest.raises(ConfigError, match="no OpenAI-compatible server"):
        asyncio.run(find_model(address))


@pytest.mark.parametrize("answer", [b"[]", b'{"data": []}', b'{"data": null}', b"<html>"])
def test_what_lists_no_model_is_said(answer: bytes, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Handler, "models", answer)
    with pytest.raises(ConfigError, match="no OpenAI-compatible server"):
        asyncio.run(find_model(url))


def test_figures_are_arithmetic() -> None:
    timing = Timing(sent=1.0, token_times=[1.5, 1.6, 1.9], output_tokens=3, prompt_tokens=2, ended=2.0)
    report = summarize([timing], 2.0)
    assert report.ttft_ms is not None and report.tpot_ms is not None and report.itl_ms is not None
    assert report.ttft_ms.median == 500.0
    assert report.tpot_ms.mean == pytest.approx(200.0)
    assert report.itl_ms.max == pytest.approx(300.0)
    assert report.output_rate == 1.5
    assert report.goodput is None
