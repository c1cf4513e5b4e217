"""Prometheus metrics: one registry a server. Request counters and histograms, and the engine's gauges at scrape time.

Names are `jaxserve:*`; those that routers and dashboards of the field read are exported under `vllm:*` as well.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from jaxserve.engine.messages import EngineInfo, EngineStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_LATENCY_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_TOKEN_LATENCY_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.075, 0.15, 0.3, 0.6, 1, 2.5, 5)
_TOKEN_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)

# names in both vocabularies: ours -> vLLM's
_GAUGE_ALIASES = {
    "jaxserve:num_requests_running": "vllm:num_requests_running",
    "jaxserve:num_requests_waiting": "vllm:num_requests_waiting",
    "jaxserve:kv_cache_usage": "vllm:kv_cache_usage_perc",
}
_COUNTER_ALIASES = {
    "jaxserve:prompt_tokens": "vllm:prompt_tokens",
    "jaxserve:generation_tokens": "vllm:generation_tokens",
    "jaxserve:cached_tokens": "vllm:prefix_cache_hits",
    "jaxserve:preemptions": "vllm:num_preemptions",
}

EngineReader = Callable[[], tuple[EngineInfo | None, EngineStats]]


class Metrics:
    """What the API process counts. Every instance has a registry of its own: several servers fit in one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        labels = ["finished_reason"]
        self.http_responses = self._counter("http_responses", "Answers by status.", ["method", "status"])
        self.requests = self._counter("request_success", "Choices that ended, by reason.", labels)
        self.errors = self._counter("request_errors", "Requests that ended with an error, by code.", ["code"])
        self.time_to_first_token = self._histogram("time_to_first_token_seconds", _LATENCY_BUCKETS)
        self.inter_token_latency = self._histogram("inter_token_latency_seconds", _TOKEN_LATENCY_BUCKETS)
        self.request_latency = self._histogram("e2e_request_latency_seconds", _LATENCY_BUCKETS)
        self.request_prompt_tokens = self._histogram("request_prompt_tokens", _TOKEN_BUCKETS)
        self.request_generation_tokens = self._histogram("request_generation_tokens", _TOKEN_BUCKETS)

    def _counter(self, name: str, text: str, labels: list[str]) -> Counter:
        return Counter(f"jaxserve:{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(f"jaxserve:{name}", buckets)
        self.registry.register(histogram)
        return histogram

    def watch_engine(self, read: EngineReader) -> None:
        """Export the engine's own numbers; `read` is called at every scrape."""
        self.registry.register(_EngineCollector(read))

    def count_response(self, scope: Mapping[str, Any], status: int) -> None:
        method = scope["method"] if scope["method"] in ("GET", "POST", "DELETE", "HEAD", "OPTIONS") else "other"
        self.http_responses.labels(method, str(status)).inc()

    def render(self) -> bytes:
        """The text exposition format."""
        return generate_latest(self.registry)


class Histogram(Collector):
    """Written by one thread, so it needs no lock: a tenth of the cost of the library's, and it runs every token."""

    def __init__(self, name: str, buckets: tuple[float, ...]) -> None:
        self._name = name
        self._buckets = buckets
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._buckets, value)] += 1
        self._sum += value

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        names = [*map(str, map(float, self._buckets)), "+Inf"]
        text = self._name.partition(":")[2].replace("_", " ")
        pairs = list(zip(names, accumulate(self._counts), strict=True))
        yield HistogramMetricFamily(self._name, text, buckets=pairs, sum_value=self._sum)


class _EngineCollector(Collector):
    def __init__(self, read: EngineReader) -> None:
        self._read = read

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        info, stats = self._read()
        for name, value in _gauges(info, stats).items():
            yield from _families(GaugeMetricFamily, name, value, _GAUGE_ALIASES)
        for name, value in _counters(stats).items():
            yield from _families(CounterMetricFamily, name, value, _COUNTER_ALIASES)
        if info is not None:
            yield _cache_config(info)


def _families(kind: type[Any], name: str, value: float, aliases: dict[str, str]) -> Iterable[Metric]:
    for each in (name, aliases.get(name)):
        if each is not None:
            yield kind(each, name.partition(":")[2].replace("_", " "), value=value)


def _gauges(info: EngineInfo | None, stats: EngineStats) -> dict[str, float]:
    total = info.num_pages if info is not None else 0
    return {
        "jaxserve:num_requests_running": stats.num_running,
        "jaxserve:num_requests_waiting": stats.num_waiting,
        "jaxserve:kv_cache_usage": stats.num_pages_used / total if total else 0.0,
        "jaxserve:pages_total": total,
        "jaxserve:pages_free": stats.num_pages_free,
        "jaxserve:pages_cached": stats.num_pages_cached,
        **{f"jaxserve:{name}": value for name, value in stats.details.items()},
    }


def _counters(stats: EngineStats) -> dict[str, float]:
    return {
        "jaxserve:engine_steps": stats.steps,
        "jaxserve:prompt_tokens": stats.prompt_tokens,
        "jaxserve:computed_prompt_tokens": stats.computed_prompt_tokens,
        "jaxserve:cached_tokens": stats.cached_tokens,
        "jaxserve:generation_tokens": stats.generation_tokens,
        "jaxserve:preemptions": stats.preemptions,
        "jaxserve:xla_compilations": stats.compiles,
        "jaxserve:host_seconds": stats.host_seconds,
    }


def _cache_config(info: EngineInfo) -> Metric:
    labels = {"block_size": str(info.page_size), "num_gpu_blocks": str(info.num_pages)}
    family = GaugeMetricFamily("vllm:cache_config_info", "pages of the KV cache", labels=list(labels))
    family.add_metric(list(labels.values()), 1)
    return family
