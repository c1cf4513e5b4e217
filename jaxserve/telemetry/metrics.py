"""Prometheus metrics, one registry per server: request counters and histograms, and the engine's gauges at scrape time.

Names are `jaxserve:*`. Metrics that common routers and dashboards read are also exported as `vllm:*`. All of these have
the label `model_name`, once the model is known.

A server with several API processes adds up the metrics of the same name and labels (`merge_families`).
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypedDict

from prometheus_client import CollectorRegistry, Counter, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from jaxserve.errors import HTTPError, QueueFullError
from jaxserve.telemetry.engine_collector import EngineCollector, EngineReading
from jaxserve.telemetry.vllm_names import all_names, histograms, text_of
from jaxserve.text.detokenizer import RequestOutput
from jaxserve.types.sampling import BACKGROUND_PRIORITY, SamplingParams

_FIRST = ("process_start_time_seconds", "process_max_fds")  # only the main process counts, which comes first
_COUNTED = ("counter", "histogram")

SampleData = tuple[str, dict[str, str], float]  # name, labels, value


class MetricFamily(TypedDict):
    """One metric as plain data."""

    name: str
    kind: str
    text: str
    samples: list[SampleData]


Families = list[MetricFamily]


def read_families(registry: Collector | CollectorRegistry) -> Families:
    """Return the current values as plain data."""
    return [
        {
            "name": metric.name,
            "kind": metric.type,
            "text": metric.documentation,
            "samples": [(sample.name, sample.labels, sample.value) for sample in metric.samples],
        }
        for metric in registry.collect()
    ]


def named(families: Families, model: str) -> Families:
    """Return the families with the label `model_name` on every sample of ours that lacks it. model: "" adds nothing"""
    if not model:
        return families
    return [
        {**each, "samples": [(name, {"model_name": model} | labels, value) for name, labels, value in each["samples"]]}
        if each["name"].startswith(("jaxserve:", "vllm:"))
        else each
        for each in families
    ]


def counted(families: Families) -> Families:
    """Return the counters and histograms, which still count when their process has ended."""
    return [family for family in families if family["kind"] in _COUNTED and family["name"] not in _FIRST]


def merge_families(readings: Iterable[Families]) -> Families:
    """Add up the metrics of several processes, the main process first."""
    merged: dict[str, MetricFamily] = {}
    values: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
    for families in readings:
        for family in families:
            merged.setdefault(family["name"], family)
            own = values.setdefault(family["name"], {})
            for name, labels, value in family["samples"]:
                key = name, tuple(sorted(labels.items()))
                is_sum = family["name"] not in _FIRST and not name.endswith("_created")
                own[key] = own.get(key, 0.0) + value if is_sum else own.get(key, value)
    return [
        {**family, "samples": [(sample, dict(labels), value) for (sample, labels), value in values[name].items()]}
        for name, family in merged.items()
    ]


class FamilyCollector(CollectorRegistry):
    """A registry of families that were read before."""

    def __init__(self, families: Families) -> None:
        super().__init__()
        self._families = families

    def collect(self) -> Iterable[Metric]:
        for family in self._families:
            metric = Metric(family["name"], family["text"], family["kind"])
            metric.samples = [Sample(*sample) for sample in family["samples"]]
            yield metric


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_LATENCY_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_TOKEN_LATENCY_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.075, 0.15, 0.3, 0.6, 1, 2.5, 5)
_TOKEN_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
_CHOICES_BUCKETS = (1, 2, 5, 10, 20)
_PREEMPTIONS_BUCKETS = (0, 1, 2, 3, 4, 5, 10, 20)
_VLLM_LIMITS = {"max_queued_requests": "max_num_queued_reqs", "max_queued_tokens": "max_num_queued_tokens"}


class Metrics:
    """Metrics of the API process. Each instance has its own registry, so several servers fit in one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)  # memory, descriptors and CPU of the API process
        self.registry.register(_TaskCollector())
        self.model = ""  # the label model_name; known after the engine was ready
        self._read_engine: Callable[[], EngineReading] | None = None
        self.http_responses = self._counter("http_responses", "Answers by status.", ["method", "status"])
        self.requests = self._counter("request_success", "Choices that ended, by reason.", ["finished_reason"])
        self.errors = self._counter("request_errors", "Requests that ended with an error, by code.", ["code"])
        self.unoffered_calls = self._counter(
            "unoffered_tool_calls", "Calls of tools that the request did not offer, sent as text.", []
        )
        self.pictures = self._counter("images", "Images in prompts.", [])
        self.picture_tokens = self._counter("image_tokens", "Prompt tokens of images.", [])
        self.picture_hits = self._counter("image_cache_hits", "Images that were decoded for an earlier request.", [])
        self.picture_worker_ends = self._counter(
            "image_worker_ends", "Images whose decoding ended their worker process.", []
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

    @property
    def labels(self) -> dict[str, str]:
        """The labels of vLLM's names."""
        return {"model_name": self.model}

    def latencies(self, priority: int) -> Latencies:
        """Return the latencies of online requests or of batch requests, which are recorded apart."""
        return self._batch if priority >= BACKGROUND_PRIORITY else self._online

    def _counter(self, name: str, text: str, labels: list[str]) -> Counter:
        return Counter(f"jaxserve:{name}", text, labels, registry=self.registry)

    def watch_engine(self, read: Callable[[], EngineReading]) -> None:
        """Export the engine's numbers; `read` is called at each scrape."""
        self._read_engine = read
        self.registry.register(EngineCollector(lambda: self.model, read))

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

    def families(self) -> Families:
        """Return the current values, all with the model's name."""
        info = self._read_engine().info if self._read_engine is not None else None
        self.model = info.served_names[0] if info is not None else self.model
        return named(read_families(self.registry), self.model)

    def render(self, others: Sequence[Families] = ()) -> bytes:
        """Return the metrics in Prometheus' text format. others: metrics of other processes, which are added"""
        own = self.families()
        return generate_latest(FamilyCollector(merge_families([own, *others]) if others else own))


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
        names = all_names(self._name, self._metrics.labels)
        return histograms(names, self._buckets, self._counts, self._sum)


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
            for name, labels in all_names(metric.name, self._metrics.labels)[1:]:
                keys = list(samples[0].labels) if samples else []
                family = CounterMetricFamily(name, metric.documentation, labels=[*keys, *labels])
                for sample in samples:
                    family.add_metric([*sample.labels.values(), *labels.values()], sample.value)
                yield family


class _TaskCollector(Collector):
    """Number of tasks of the event loop that serves the scrape. If it grows steadily, requests leak tasks."""

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
            yield GaugeMetricFamily(name, text_of(name), value=value)


class _KeyCollector(Collector):
    def __init__(self, read: Callable[[], Iterable[Mapping[str, Any]]]) -> None:
        self._read = read

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        """Yield the counters of each key."""
        keys = list(self._read())
        if not keys:
            return
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
