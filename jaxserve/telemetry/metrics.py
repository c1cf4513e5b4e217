"""Prometheus metrics, one registry per server: request counters and histograms, and the engine's gauges at scrape time.

Names are `jaxserve:*`. Those that common routers and dashboards read are also exported as `vllm:*`.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, Counter, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from jaxserve.errors import HTTPError, QueueFullError
from jaxserve.scheduler.scheduler_stats import STEP_SIZES
from jaxserve.telemetry.merging import Families, FamilyCollector, merge_families, read_families
from jaxserve.text.output.sequence_text import RequestOutput
from jaxserve.types.draft_counters import DraftCounters
from jaxserve.types.messages import EngineInfo, EngineStats
from jaxserve.types.sampling import BACKGROUND_PRIORITY, SamplingParams

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_LATENCY_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_TOKEN_LATENCY_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.075, 0.15, 0.3, 0.6, 1, 2.5, 5)
_TOKEN_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
_CHOICES_BUCKETS = (1, 2, 5, 10, 20)
_PREEMPTIONS_BUCKETS = (0, 1, 2, 3, 4, 5, 10, 20)
_VLLM_LIMITS = {"max_queued_requests": "max_num_queued_reqs", "max_queued_tokens": "max_num_queued_tokens"}

# our name -> vLLM's names, old and new if vLLM has renamed it
_ALIASES = {
    "jaxserve:num_requests_running": ("vllm:num_requests_running",),
    "jaxserve:num_requests_waiting": ("vllm:num_requests_waiting",),
    "jaxserve:kv_cache_usage": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    "jaxserve:prompt_tokens": ("vllm:prompt_tokens", "vllm:prefix_cache_queries"),
    "jaxserve:generation_tokens": ("vllm:generation_tokens",),
    "jaxserve:cached_tokens": ("vllm:prefix_cache_hits",),
    "jaxserve:preemptions": ("vllm:num_preemptions",),
    "jaxserve:request_success": ("vllm:request_success",),
    "jaxserve:time_to_first_token_seconds": ("vllm:time_to_first_token_seconds",),
    "jaxserve:inter_token_latency_seconds": (
        "vllm:inter_token_latency_seconds",
        "vllm:time_per_output_token_seconds",
    ),
    "jaxserve:e2e_request_latency_seconds": ("vllm:e2e_request_latency_seconds",),
    "jaxserve:request_queue_time_seconds": ("vllm:request_queue_time_seconds",),
    "jaxserve:request_prefill_time_seconds": ("vllm:request_prefill_time_seconds",),
    "jaxserve:request_decode_time_seconds": ("vllm:request_decode_time_seconds",),
    "jaxserve:request_prompt_tokens": ("vllm:request_prompt_tokens",),
    "jaxserve:request_generation_tokens": ("vllm:request_generation_tokens",),
    "jaxserve:request_inference_time_seconds": ("vllm:request_inference_time_seconds",),
    "jaxserve:request_params_n": ("vllm:request_params_n",),
    "jaxserve:request_params_max_tokens": ("vllm:request_params_max_tokens",),
    "jaxserve:request_num_preemptions": ("vllm:request_num_preemptions",),
    "jaxserve:iteration_tokens": ("vllm:iteration_tokens_total",),
    "jaxserve:admission_rejections": ("vllm:admission_rejections",),
    "jaxserve:spec_decode_num_drafts": ("vllm:spec_decode_num_drafts",),
    "jaxserve:spec_decode_num_draft_tokens": ("vllm:spec_decode_num_draft_tokens",),
    "jaxserve:spec_decode_num_accepted_tokens": ("vllm:spec_decode_num_accepted_tokens",),
    "jaxserve:spec_decode_num_accepted_tokens_per_pos": ("vllm:spec_decode_num_accepted_tokens_per_pos",),
}


class EngineReading(NamedTuple):
    """The engine's current numbers. info: None until it was ready for the first time."""

    info: EngineInfo | None
    stats: EngineStats
    restarts: int = 0


EngineReader = Callable[[], EngineReading]


class Metrics:
    """Metrics of the API process. Each instance has its own registry, so several servers fit in one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)  # memory, descriptors and CPU of the API process
        self.registry.register(_TaskCollector())
        self.model = ""  # label of vLLM's names; known after the engine was ready
        self._read_engine: EngineReader | None = None
        self.http_responses = self._counter("http_responses", "Answers by status.", ["method", "status"])
        self.requests = self._counter("request_success", "Choices that ended, by reason.", ["finished_reason"])
        self.errors = self._counter("request_errors", "Requests that ended with an error, by code.", ["code"])
        self.unoffered_calls = self._counter(
            "unoffered_tool_calls", "Calls of tools that the request did not offer, sent as text.", []
        )
        self._rejections = self._counter(
            "admission_rejections", "Requests refused because the queue was full, by limit.", ["reason"]
        )
        for limit in _VLLM_LIMITS.values():
            self._rejections.labels(limit)
        self._online = Latencies(self, "")
        self._batch = Latencies(self, "batch_")
        self.registry.register(_Copy(self, self.requests))
        self.registry.register(_Copy(self, self._rejections))

    def latencies(self, priority: int) -> Latencies:
        """Return the latencies of online requests or of batch requests, which are recorded apart."""
        return self._batch if priority >= BACKGROUND_PRIORITY else self._online

    def _counter(self, name: str, text: str, labels: list[str]) -> Counter:
        return Counter(f"jaxserve:{name}", text, labels, registry=self.registry)

    def watch_engine(self, read: EngineReader) -> None:
        """Export the engine's numbers; `read` is called at each scrape."""
        self._read_engine = read
        self.registry.register(_EngineCollector(self, read))

    def watch_keys(self, read: Callable[[], Iterable[Mapping[str, Any]]]) -> None:
        """Export the counts of each API key; `read` is called at each scrape. The field `name` is the label."""
        self.registry.register(_KeyCollector(read))

    def watch_gauges(self, read: Callable[[], Mapping[str, float]]) -> None:
        """Export gauges by name; `read` is called at each scrape."""
        self.registry.register(_GaugeCollector(read))

    def count_error(self, error: HTTPError) -> None:
        """Count a request that ended with an error."""
        self.errors.labels(error.code or error.type).inc()
        if isinstance(error, QueueFullError) and error.limit:
            self._rejections.labels(_VLLM_LIMITS[error.limit]).inc()

    def count_response(self, scope: Mapping[str, Any], status: int) -> None:
        method = scope["method"] if scope["method"] in ("GET", "POST", "DELETE", "HEAD", "OPTIONS") else "other"
        self.http_responses.labels(method, str(status)).inc()

    def render(self, others: Sequence[Families] = ()) -> bytes:
        """Return the metrics in Prometheus' text format. others: of other processes, to be added"""
        info = self._read_engine().info if self._read_engine is not None else None
        self.model = info.served_names[0] if info is not None else self.model
        if not others:
            return generate_latest(self.registry)
        return generate_latest(FamilyCollector(merge_families([read_families(self.registry), *others])))


class Latencies:
    """Histograms of one kind of requests, in seconds and tokens."""

    def __init__(self, metrics: Metrics, prefix: str) -> None:
        def histogram(name: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(metrics, f"jaxserve:{prefix}{name}", buckets)

        self._first_token = histogram("time_to_first_token_seconds", _LATENCY_BUCKETS)
        self.inter_token = histogram("inter_token_latency_seconds", _TOKEN_LATENCY_BUCKETS)
        self._total = histogram("e2e_request_latency_seconds", _LATENCY_BUCKETS)
        self._queue = histogram("request_queue_time_seconds", _LATENCY_BUCKETS)
        self._prefill = histogram("request_prefill_time_seconds", _LATENCY_BUCKETS)
        self._decode = histogram("request_decode_time_seconds", _LATENCY_BUCKETS)
        self._inference = histogram("request_inference_time_seconds", _LATENCY_BUCKETS)
        self._choices = histogram("request_params_n", _CHOICES_BUCKETS)
        self._max_tokens = histogram("request_params_max_tokens", _TOKEN_BUCKETS)
        self._preemptions = histogram("request_num_preemptions", _PREEMPTIONS_BUCKETS)
        self._prompt_tokens = histogram("request_prompt_tokens", _TOKEN_BUCKETS)
        self._generation_tokens = histogram("request_generation_tokens", _TOKEN_BUCKETS)

    def first_token(self, seconds: float, queued: float, prefill: float) -> None:
        """Record the first token of a choice: seconds since the request arrived, and the parts spent in the engine."""
        self._first_token.observe(seconds)
        self._queue.observe(queued)
        self._prefill.observe(prefill)

    def finished(
        self, output: RequestOutput, params: SamplingParams, seconds: float, decode: float, queued: float
    ) -> None:
        """Record the end of a choice. seconds: since arrival; decode: since its first token; queued: in the queue."""
        self._total.observe(seconds)
        self._decode.observe(decode)
        self._inference.observe(max(0.0, seconds - queued))
        self._prompt_tokens.observe(output.num_prompt_tokens)
        self._generation_tokens.observe(output.num_output_tokens)
        self._preemptions.observe(output.num_preemptions)
        if params.max_tokens is not None:
            self._max_tokens.observe(params.max_tokens)
        if output.index == 0:
            self._choices.observe(params.n)


class Histogram(Collector):
    """A histogram written by one thread. Used for every token: without a lock it costs a tenth of the library's."""

    def __init__(self, metrics: Metrics, name: str, buckets: tuple[float, ...]) -> None:
        self._metrics = metrics
        self._name = name
        self._buckets = buckets
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0
        metrics.registry.register(self)

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._buckets, value)] += 1
        self._sum += value

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        return _histograms(self._metrics, self._name, self._buckets, self._counts, self._sum)


def _histograms(
    metrics: Metrics, name: str, buckets: Sequence[float], counts: Sequence[int], total: float
) -> Iterable[Metric]:
    """Yield a histogram under all its names. counts: per bucket, not cumulative; one more entry than buckets."""
    bounds = [*map(str, map(float, buckets)), "+Inf"]
    pairs = list(zip(bounds, accumulate(counts), strict=True))
    for each, labels in _names(metrics, name):
        family = HistogramMetricFamily(each, _text(name), labels=list(labels))
        family.add_metric(list(labels.values()), pairs, total)
        yield family


class _Copy(Collector):
    """Exports a counter under its other names."""

    def __init__(self, metrics: Metrics, counter: Counter) -> None:
        self._metrics = metrics
        self._counter = counter

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        """Yield the counter under each of its other names."""
        for metric in self._counter.collect():
            samples = [sample for sample in metric.samples if sample.name.endswith("_total")]
            for name, labels in _names(self._metrics, metric.name)[1:]:
                keys = list(samples[0].labels) if samples else []
                family = CounterMetricFamily(name, metric.documentation, labels=[*keys, *labels])
                for sample in samples:
                    family.add_metric([*sample.labels.values(), *labels.values()], sample.value)
                yield family


class _TaskCollector(Collector):
    """Number of tasks of the event loop that serves the scrape. It should stay flat: growth means that requests leak
    tasks.
    """

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        try:
            count = len(asyncio.all_tasks())
        except RuntimeError:  # scraped outside of an event loop
            return
        yield GaugeMetricFamily("jaxserve:api_tasks", "tasks of the API process", value=count)


class _GaugeCollector(Collector):
    def __init__(self, read: Callable[[], Mapping[str, float]]) -> None:
        self._read = read

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        for name, value in self._read().items():
            yield GaugeMetricFamily(name, _text(name), value=value)


class _KeyCollector(Collector):
    def __init__(self, read: Callable[[], Iterable[Mapping[str, Any]]]) -> None:
        self._read = read

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        """Yield the counters of each key."""
        keys = list(self._read())
        live = GaugeMetricFamily("jaxserve:key_requests_live", "requests in hand of an API key", labels=["key"])
        counters = {
            name: CounterMetricFamily(f"jaxserve:key_{name}", f"{name.replace('_', ' ')} of an API key", labels=["key"])
            for name in ("requests", "prompt_tokens", "cached_tokens", "completion_tokens", "refused")
        }
        for key in keys:
            live.add_metric([key["name"]], key["num_live"])
            for name, family in counters.items():
                family.add_metric([key["name"]], key[name])
        yield live
        yield from counters.values()


class _EngineCollector(Collector):
    def __init__(self, metrics: Metrics, read: EngineReader) -> None:
        self._metrics = metrics
        self._read = read

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        """Yield the engine's gauges and counters, read now."""
        reading = self._read()
        for name, value in _gauges(reading).items():
            yield from self._families(GaugeMetricFamily, name, value)
        for name, value in _counters(reading).items():
            yield from self._families(CounterMetricFamily, name, value)
        yield from self._step_sizes(reading.stats)
        yield self._waiting_by_reason(reading.stats)
        if reading.stats.drafts is not None:
            yield from self._drafts(reading.stats.drafts)
        if reading.info is not None:
            yield _cache_config(reading.info)

    def _step_sizes(self, stats: EngineStats) -> Iterable[Metric]:
        counts = stats.step_sizes or [0] * (len(STEP_SIZES) + 1)
        yield from _histograms(self._metrics, "jaxserve:iteration_tokens", STEP_SIZES, counts, stats.step_tokens)

    def _drafts(self, counters: DraftCounters) -> Iterable[Metric]:
        for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
            yield from self._families(CounterMetricFamily, f"jaxserve:spec_decode_{name}", getattr(counters, name))
        name = "jaxserve:spec_decode_num_accepted_tokens_per_pos"
        for each, labels in _names(self._metrics, name):
            family = CounterMetricFamily(each, _text(name), labels=["position", *labels])
            for position, count in enumerate(counters.accepted_per_pos):
                family.add_metric([str(position), *labels.values()], count)
            yield family

    def _waiting_by_reason(self, stats: EngineStats) -> Metric:
        """Split the waiting requests by vLLM's reasons: capacity, and deferred for those that could not run with free
        capacity.
        """
        labels = ["model_name", "reason"]
        family = GaugeMetricFamily("vllm:num_requests_waiting_by_reason", "requests that wait", labels=labels)
        family.add_metric([self._metrics.model, "capacity"], stats.num_waiting - stats.num_compiling)
        family.add_metric([self._metrics.model, "deferred"], stats.num_compiling)
        return family

    def _families(self, kind: type[Any], name: str, value: float) -> Iterable[Metric]:
        for each, labels in _names(self._metrics, name):
            family = kind(each, _text(name), labels=list(labels))
            family.add_metric(list(labels.values()), value)
            yield family


def _names(metrics: Metrics, name: str) -> list[tuple[str, dict[str, str]]]:
    """Yield all names of a metric, each with its labels."""
    return [(name, {}), *((alias, {"model_name": metrics.model}) for alias in _ALIASES.get(name, ()))]


def _text(name: str) -> str:
    return name.partition(":")[2].replace("_", " ")


def _gauges(reading: EngineReading) -> dict[str, float]:
    info, stats = reading.info, reading.stats
    total = info.num_pages if info is not None else 0
    windowed = info.memory_plan.get("num_window_pages", 0) if info is not None else 0
    in_windows = stats.details.get("window_pages_used", 0.0) / windowed if windowed else 0.0
    return {
        "jaxserve:num_requests_running": stats.num_running,
        "jaxserve:num_requests_waiting": stats.num_waiting,
        "jaxserve:kv_cache_usage": max(stats.num_pages_used / total if total else 0.0, in_windows),
        "jaxserve:cache_hit_rate": stats.cached_tokens / stats.prompt_tokens if stats.prompt_tokens else 0.0,
        "jaxserve:pages_total": total,
        "jaxserve:pages_free": stats.num_pages_free,
        "jaxserve:pages_cached": stats.num_pages_cached,
        **{f"jaxserve:{name}": value for name, value in stats.details.items()},
    }


def _counters(reading: EngineReading) -> dict[str, float]:
    stats = reading.stats
    return {
        "jaxserve:engine_restarts": reading.restarts,
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
    labels = {
        "block_size": str(info.page_size),
        "num_gpu_blocks": str(info.num_pages),
        "kv_cache_size_tokens": str(info.num_kv_tokens),
        "kv_cache_max_concurrency": f"{info.memory_plan.get('max_concurrency', 0.0):.2f}",
    }
    family = GaugeMetricFamily("vllm:cache_config_info", "pages of the KV cache", labels=list(labels))
    family.add_metric(list(labels.values()), 1)
    return family
