"""The engines' metrics, read for each scrape: summed under our names, one sample for each engine under vLLM's."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from jaxserve.client.replicas import ReplicaState
from jaxserve.scheduler.scheduler_stats import STEP_SIZES
from jaxserve.telemetry.vllm_names import aliases, histograms, text_of
from jaxserve.types.messages import EngineInfo, EngineStats
from jaxserve.types.step import DraftCounters


class EngineReading(NamedTuple):
    """The current numbers of all engines together and of each. info: None until all were ready once"""

    info: EngineInfo | None
    stats: EngineStats
    restarts: int = 0
    replicas: Sequence[ReplicaState] = ()


class EngineCollector(Collector):
    """Reads the numbers of the engines for each scrape. model: returns the model's name, a label of vLLM's names"""

    def __init__(self, model: Callable[[], str], read: Callable[[], EngineReading]) -> None:
        self._model = model
        self._read = read

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        """Yield the gauges and counters, read now."""
        reading = self._read()
        for kind, values in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
            for name, value in values(reading).items():
                yield kind(name, text_of(name), value=value)
            yield from self._of_each(kind, values, reading.replicas)
        yield from _step_sizes("jaxserve:iteration_tokens", {}, reading.stats)
        if reading.stats.drafts is not None:
            yield from _drafts(reading.stats.drafts)
        yield from _states(reading.replicas)
        for replica in reading.replicas:
            yield from self._of_one(replica)

    def _labels(self, engine: int) -> dict[str, str]:
        return {"engine": str(engine), "model_name": self._model()}

    def _of_each(
        self,
        kind: type[Any],
        values: Callable[[EngineReading], Mapping[str, float]],
        replicas: Sequence[ReplicaState],
    ) -> Iterable[Metric]:
        """Yield the numbers that vLLM has too, one sample for each engine."""
        found = {each.engine: values(EngineReading(each.info, each.stats, each.restarts)) for each in replicas}
        for name in next(iter(found.values()), {}):
            for alias in aliases(name):
                family = kind(alias, text_of(name), labels=["engine", "model_name"])
                for engine, numbers in found.items():
                    family.add_metric([*self._labels(engine).values()], numbers.get(name, 0.0))
                yield family

    def _of_one(self, replica: ReplicaState) -> Iterable[Metric]:
        labels, stats = self._labels(replica.engine), replica.stats
        for name in aliases("jaxserve:iteration_tokens"):
            yield from _step_sizes(name, labels, stats)
        yield _waiting_by_reason(labels, stats)
        if stats.drafts is not None:
            yield from _drafts(stats.drafts, labels)
        if replica.info is not None:
            yield _cache_config(replica.info, replica.engine)
            if replica.info.lora_slots:
                yield _lora_requests(replica.info.lora_slots, labels, stats)
                yield from _of_adapters(labels, stats)


def _step_sizes(name: str, labels: Mapping[str, str], stats: EngineStats) -> Iterable[Metric]:
    counts = stats.step_sizes or [0] * (len(STEP_SIZES) + 1)
    yield from histograms([(name, labels)], STEP_SIZES, counts, stats.step_tokens)


def _drafts(drafts: DraftCounters, labels: Mapping[str, str] | None = None) -> Iterable[Metric]:
    """Yield the counters of speculation, under vLLM's names if `labels` name an engine, else under ours."""
    prefix, own = "jaxserve:spec_decode_", labels or {}
    for name in (f"{prefix}{each}" for each in ("num_drafts", "num_draft_tokens", "num_accepted_tokens")):
        for each in (name,) if labels is None else aliases(name):
            family = CounterMetricFamily(each, text_of(name), labels=list(own))
            family.add_metric([*own.values()], getattr(drafts, name.removeprefix(prefix)))
            yield family
    if labels is None:
        name = f"{prefix}num_rest_steps"
        yield CounterMetricFamily(name, text_of(name), value=drafts.num_rest_steps)
    name = f"{prefix}num_accepted_tokens_per_pos"
    for each in (name,) if labels is None else aliases(name):
        family = CounterMetricFamily(each, text_of(name), labels=["position", *own])
        for position, count in enumerate(drafts.accepted_per_pos):
            family.add_metric([str(position), *own.values()], count)
        yield family


def _states(replicas: Sequence[ReplicaState]) -> Iterable[Metric]:
    """Yield the metrics of each engine that vLLM does not have: whether it serves, its sequences, its restarts."""
    alive = GaugeMetricFamily("jaxserve:engine_alive", "whether an engine serves", labels=["engine"])
    live = GaugeMetricFamily("jaxserve:engine_requests_live", "sequences that an engine was sent", labels=["engine"])
    role = GaugeMetricFamily("jaxserve:engine_role", "what an engine does", labels=["engine", "role"])
    for replica in replicas:
        alive.add_metric([str(replica.engine)], replica.alive)
        live.add_metric([str(replica.engine)], replica.num_live)
        role.add_metric([str(replica.engine), replica.role], 1)
    yield alive
    yield live
    yield role


def _lora_requests(slots: int, labels: Mapping[str, str], stats: EngineStats) -> Metric:
    """Name the adapters of running and waiting requests in labels, as vLLM does for gateways. The value is the time."""
    running = ",".join(each.name for each in stats.adapters if each.num_running)
    waiting = ",".join(each.name for each in stats.adapters if each.num_waiting)
    own = {"max_lora": str(slots), "running_lora_adapters": running, "waiting_lora_adapters": waiting, **labels}
    family = GaugeMetricFamily("vllm:lora_requests_info", "adapters of running and waiting requests", labels=list(own))
    family.add_metric([*own.values()], time.time())
    return family


def _of_adapters(labels: Mapping[str, str], stats: EngineStats) -> Iterable[Metric]:
    """Yield the running and waiting requests of each adapter."""
    for state, counts in (
        ("running", {each.name: each.num_running for each in stats.adapters}),
        ("waiting", {each.name: each.num_waiting for each in stats.adapters}),
    ):
        name = f"jaxserve:adapter_requests_{state}"
        family = GaugeMetricFamily(name, f"requests of an adapter that are {state}", labels=["adapter", *labels])
        for adapter, count in counts.items():
            family.add_metric([adapter, *labels.values()], count)
        yield family


def _waiting_by_reason(labels: Mapping[str, str], stats: EngineStats) -> Metric:
    """Split the waiting requests by vLLM's reasons: capacity, or deferred if free capacity would not help."""
    name = "vllm:num_requests_waiting_by_reason"
    family = GaugeMetricFamily(name, "requests that wait", labels=[*labels, "reason"])
    family.add_metric([*labels.values(), "capacity"], stats.num_waiting - stats.num_compiling)
    family.add_metric([*labels.values(), "deferred"], stats.num_compiling)
    return family


def gauges(reading: EngineReading) -> dict[str, float]:
    """Return the gauges of one engine by name."""
    info, stats = reading.info, reading.stats
    total = info.num_pages if info is not None else 0
    groups = info.memory_plan.get("groups", ()) if info is not None else ()
    used = [stats.details.get(f"group_{index}_pages_used", 0.0) for index in range(1, 1 + len(groups))]
    of_groups = [count / group["num_pages"] for count, group in zip(used, groups, strict=True)]
    return {
        "jaxserve:num_requests_running": stats.num_running,
        "jaxserve:num_requests_waiting": stats.num_waiting,
        "jaxserve:kv_cache_usage": max(stats.num_pages_used / total if total else 0.0, *of_groups, 0.0),
        "jaxserve:cache_hit_rate": stats.cached_tokens / stats.prompt_tokens if stats.prompt_tokens else 0.0,
        "jaxserve:pages_total": total,
        "jaxserve:pages_free": stats.num_pages_free,
        "jaxserve:pages_cached": stats.num_pages_cached,
        **{f"jaxserve:{name}": value for name, value in stats.details.items() if not name.startswith("group_")},
    }


def counters(reading: EngineReading) -> dict[str, float]:
    """Return the counters of one engine by name."""
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


def _cache_config(info: EngineInfo, engine: int) -> Metric:
    labels = {
        "engine": str(engine),
        "block_size": str(info.page_size),
        "num_gpu_blocks": str(info.num_pages),
        "kv_cache_size_tokens": str(info.num_kv_tokens),
        "kv_cache_max_concurrency": f"{info.memory_plan.get('max_concurrency', 0.0):.2f}",
    }
    family = GaugeMetricFamily("vllm:cache_config_info", "pages of the KV cache", labels=list(labels))
    family.add_metric(list(labels.values()), 1)
    return family
