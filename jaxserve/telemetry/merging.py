"""Metrics of several processes as one: counters, histograms and gauges of the same name and labels are added up."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypedDict

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

_FIRST = ("process_start_time_seconds", "process_max_fds")  # of the main process, which comes first
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


def counted(families: Families) -> Families:
    """Return what stays true of a process that has ended: its counters and histograms."""
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
