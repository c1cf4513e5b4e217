"""A replica's metrics on Ray's own metrics port, by their names with the prefix `ray_`."""

from __future__ import annotations

import asyncio
import re

from prometheus_client import CollectorRegistry
from ray.serve.metrics import Gauge  # pyright: ignore[reportMissingImports]

from jaxserve.telemetry.metrics import read_families

INTERVAL = 5.0  # seconds; Ray's agent collects at this rate


class MetricExport:
    """Writes every sample as a gauge of Serve, which adds deployment and replica as tags. Buckets keep their `le`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._gauges: dict[str, Gauge] = {}

    async def run(self) -> None:
        """Write until cancelled."""
        while True:
            self.write()
            await asyncio.sleep(INTERVAL)

    def write(self) -> None:
        """Write the current values once."""
        for family in read_families(self._registry):
            for name, labels, value in family["samples"]:
                if family["name"].startswith("jaxserve:") and not name.endswith("_created"):
                    self._gauge(name, family["text"], labels).set(value, tags=labels)

    def _gauge(self, name: str, text: str, labels: dict[str, str]) -> Gauge:
        if name not in self._gauges:
            plain = re.sub(r"\W", "_", name)
            self._gauges[name] = Gauge(plain, description=text, tag_keys=tuple(labels))
        return self._gauges[name]
