"""What /metrics says, under which names; spans."""

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from jaxserve.api import app as app_module
from jaxserve.config import Config, LoggingSection
from jaxserve.scheduler.scheduler_stats import STEP_SIZES
from jaxserve.telemetry.engine_collector import EngineReading, gauges
from jaxserve.telemetry.tracing import NoTracing, OpenTelemetry, make_tracing
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.types.messages import EngineStats, Outputs
from jaxserve.types.sampling import BACKGROUND_PRIORITY
from jaxserve.types.step import DraftCounters
from tests.scrape import values

from .conftest import LiveServer, reply_with
from .fakes import DEMO, demo_info

TEXT: dict[str, Any] = {"model": "demo", "prompt": "Hi"}
HISTOGRAMS = (
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
    "request_inference_time_seconds",
    "request_params_n",
    "request_params_max_tokens",
    "request_num_preemptions",
)


def scrape(server: LiveServer) -> dict[str, float]:
    """Value by name and labels."""
    return values(server.http.get("/metrics").text)


def test_every_histogram_counts_a_request_once(server: LiveServer) -> None:
    reply_with(server, "short")
    before = scrape(server)
    server.post("/v1/completions", TEXT)
    after = scrape(server)
    for name in HISTOGRAMS:
        gained = after[f"jaxserve:{name}_count"] - before[f"jaxserve:{name}_count"]
        assert gained >= 1 if name == "inter_token_latency_seconds" else gained == 1, name
        assert after[f'vllm:{name}_count{{model_name="demo"}}'] == after[f"jaxserve:{name}_count"]


def test_lines_of_batches_do_not_blur_the_latencies_of_clients(server: LiveServer) -> None:
    before = scrape(server)
    server.post("/v1/completions", TEXT | {"priority": BACKGROUND_PRIORITY})
    after = scrape(server)
    for name in HISTOGRAMS:
        assert after[f"jaxserve:{name}_count"] == before[f"jaxserve:{name}_count"]
        assert after[f"jaxserve:batch_{name}_count"] > before[f"jaxserve:batch_{name}_count"]


def test_the_cache_is_as_full_as_its_fuller_group_of_layers() -> None:
    info = demo_info(Tokenizer.from_directory(DEMO))
    plan = info.memory_plan | {"groups": [{"num_pages": 100}, {"num_pages": 40}]}
    stats = EngineStats(num_pages_used=64, details={"group_1_pages_used": 10.0, "group_2_pages_used": 30.0})
    windowed = msgspec.structs.replace(info, memory_plan=plan)
    assert gauges(EngineReading(info, stats))["jaxserve:kv_cache_usage"] == 0.25
    assert gauges(EngineReading(windowed, stats))["jaxserve:kv_cache_usage"] == 0.75


def test_names_that_routers_and_dashboards_read(server: LiveServer) -> None:
    server.post("/v1/completions", TEXT)
    found = scrape(server)
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "gpu_cache_usage_perc"):
        assert f'vllm:{name}{{engine="0",model_name="demo"}}' in found
    for name in ("prompt_tokens", "generation_tokens", "prefix_cache_queries", "prefix_cache_hits", "num_preemptions"):
        assert f'vllm:{name}_total{{engine="0",model_name="demo"}}' in found
    assert 'vllm:request_success_total{finished_reason="stop",model_name="demo"}' in found
    for name in ("jaxserve:xla_compilations_total", "jaxserve:engine_restarts_total", "jaxserve:host_seconds_total"):
        assert name in found
    samples = re.findall(r"^(?:jaxserve|vllm):.*", server.http.get("/metrics").text, re.MULTILINE)
    assert samples and all('model_name="demo"' in each for each in samples)
    assert found["jaxserve:api_tasks"] > 0 and found["process_open_fds"] > 0


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [("max_queued_requests", 1, "max_num_queued_reqs"), ("max_queued_tokens", 4, "max_num_queued_tokens")],
)
def test_why_requests_wait_and_are_refused_and_how_large_the_steps_are(key: str, value: int, reason: str) -> None:
    """vLLM's families, with its labels."""
    config = Config().replace(scheduler={key: value})
    with LiveServer(config) as server:
        before = scrape(server)
        for limit in ("max_num_queued_reqs", "max_num_queued_tokens"):
            assert before[f'vllm:admission_rejections_total{{model_name="demo",reason="{limit}"}}'] == 0
        server.call(server.link.hold.clear)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(server.post, "/v1/completions", TEXT | {"prompt": [5] * 9, "n": 5})
            server.wait(lambda: bool(server.link.running), "the request did not come")
            assert server.post("/v1/completions", TEXT | {"n": 5}).status_code == 429  # of 8 that run and 1 that waits
            server.call(server.link.hold.set)
            assert waiting.result().status_code == 200
        sizes = [1, 1, *[0] * (len(STEP_SIZES) - 1)]
        drafts = DraftCounters(3, 12, [2, 1], 41)
        stats = EngineStats(num_waiting=5, num_compiling=2, step_tokens=9, step_sizes=sizes, drafts=drafts)
        server.call(lambda: server.link._messages.put_nowait(Outputs([], stats)))
        server.wait(lambda: server.engine.stats().num_waiting == 5, "the stats did not come")
        found = scrape(server)
    assert found[f'vllm:admission_rejections_total{{model_name="demo",reason="{reason}"}}'] == 1
    assert found['vllm:num_requests_waiting_by_reason{engine="0",model_name="demo",reason="capacity"}'] == 3
    assert found['vllm:num_requests_waiting_by_reason{engine="0",model_name="demo",reason="deferred"}'] == 2
    assert found['vllm:iteration_tokens_total_bucket{engine="0",le="8.0",model_name="demo"}'] == 2
    assert found['vllm:iteration_tokens_total_sum{engine="0",model_name="demo"}'] == 9
    counts = {"num_drafts": 3, "num_draft_tokens": 12, "num_accepted_tokens": 3}
    assert {name: found[f'vllm:spec_decode_{name}_total{{engine="0",model_name="demo"}}'] for name in counts} == counts
    assert found["jaxserve:spec_decode_num_rest_steps_total"] == 41
    per_position = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    assert found[f'{per_position}{{engine="0",model_name="demo",position="0"}}'] == 2
    assert found[f'{per_position}{{engine="0",model_name="demo",position="1"}}'] == 1


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(app_module, "make_tracing", lambda section: OpenTelemetry(provider))
    yield exporter
    provider.shutdown()


@pytest.mark.parametrize("stream", [False, True])
def test_spans_of_a_request(spans: InMemorySpanExporter, stream: bool) -> None:
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    headers = {"traceparent": f"00-{trace_id}-b7ad6b7169203331-01", "x-request-id": "mine"}
    with LiveServer(Config()) as server:
        reply_with(server, "a few words")
        server.post("/v1/completions", TEXT | {"stream": stream}, headers=headers)
        server.post("/v1/completions", TEXT | {"n": 1000}, headers=headers)
    finished: Any = spans.get_finished_spans()
    request, generation, refused = sorted(finished, key=lambda span: span.start_time)
    assert (request.name, refused.name, generation.name) == (*["POST /v1/completions"] * 2, "generate")
    assert generation.parent.span_id == request.context.span_id
    assert {format(span.context.trace_id, "032x") for span in (generation, request, refused)} == {trace_id}
    assert request.attributes["http.response.status_code"] == 200
    assert request.attributes["jaxserve.request_id"] == "mine"
    assert refused.attributes["http.response.status_code"] == 400
    assert generation.attributes["gen_ai.usage.output_tokens"] > 1
    assert "Hi" not in str([dict(span.attributes or {}) for span in (generation, request)])


def test_spans_are_off_unless_an_endpoint_is_configured() -> None:
    assert isinstance(make_tracing(LoggingSection()), NoTracing)  # type: ignore[call-arg]
    assert isinstance(make_tracing(LoggingSection(otlp_endpoint="http://127.0.0.1:1/v1/traces")), OpenTelemetry)  # type: ignore[call-arg]
