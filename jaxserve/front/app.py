"""The front's application: a few routes about its models; all others are forwarded to a model's process."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import FastAPI
from prometheus_client import generate_latest
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from jaxserve.api import page
from jaxserve.api.body_cost import LONGEST_CONTEXT, BodyLimits, BodySum
from jaxserve.api.http.errors import install_error_handlers
from jaxserve.api.http.middleware import Authentication, BodyLimit, RequestContext
from jaxserve.config import Config
from jaxserve.front import routes
from jaxserve.front.forward_to_models import ForwardToModels
from jaxserve.front.residents import Residents
from jaxserve.telemetry.metrics import Families, FamilyCollector, MetricFamily, Metrics, merge_families, read_families
from jaxserve.telemetry.tracing import NoTracing


def create_front(residents: Residents, config: Config) -> FastAPI:
    """Build the application. The caller runs and stops `residents`."""
    limits = BodyLimits.of(config.server, LONGEST_CONTEXT)
    metrics = FrontMetrics(residents)
    app = FastAPI(
        middleware=_middleware(config, limits, metrics.own),
        redirect_slashes=False,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
    )
    app.state.residents, app.state.metrics = residents, metrics
    install_error_handlers(app)
    app.include_router(routes.router)
    app.include_router(page.router)
    app.router.default = ForwardToModels(residents, limits)
    return app


def _middleware(config: Config, limits: BodyLimits, metrics: Metrics) -> list[Middleware]:
    """List the middleware, outermost first: that of a single server without the gate of its engine."""
    section = config.server
    chain = [
        Middleware(RequestContext, metrics=metrics, tracing=NoTracing(), log_requests=config.logging.requests),
        Middleware(Authentication, config=section, more_admin_paths=routes.MODELS_ADMIN_PATHS),
        Middleware(BodyLimit, limits=lambda: limits, held=BodySum([0.0]), timeout=section.body_timeout),
    ]
    if section.cors_origins:
        headers = {"allow_origins": section.cors_origins, "allow_methods": ["*"], "allow_headers": ["*"]}
        chain.insert(0, Middleware(CORSMiddleware, **headers))
    return chain


class FrontMetrics:
    """The metrics of all loaded models, each with the label `model`, and of the front's own process."""

    def __init__(self, residents: Residents) -> None:
        self.own = Metrics()
        self._residents = residents

    async def render(self) -> bytes:
        """Return them in Prometheus' text format. A model that does not answer is left out."""
        own: Families = [each for each in read_families(self.own.registry) if each["name"].startswith("process_")]
        loaded = [(name, process.metrics()) for name, process in self._residents.loaded_processes()]
        found = await asyncio.gather(*(reading for _, reading in loaded))
        models = [_labelled(families, name) for families, (name, _) in zip(found, loaded, strict=True)]
        return generate_latest(FamilyCollector(merge_families([[*own, self._loaded()], *models])))

    def _loaded(self) -> MetricFamily:
        name = "jaxserve:model_loaded"
        samples: list[Any] = [
            (name, {"model": each.plan.name}, float(each.state == "loaded")) for each in self._residents.all
        ]
        return {"name": name, "kind": "gauge", "text": "whether the model is loaded", "samples": samples}


def _labelled(families: Families, model: str) -> Families:
    return [
        {**family, "samples": [(name, {**labels, "model": model}, value) for name, labels, value in family["samples"]]}
        for family in families
    ]
