"""OpenTelemetry spans: one per HTTP request and a child span per generation. Off unless an endpoint is configured.

The packages are an extra (`otel`) and imported only if needed. Spans contain counts, times and the request's id, but
no text.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from jaxserve.config import LoggingSection
from jaxserve.errors import ConfigError
from jaxserve.system import install_command
from jaxserve.version import __version__


class RequestSpan(Protocol):
    """The span of an HTTP request."""

    def end_with(self, status: int) -> None:
        """Set the status of the response; 499: the client disconnected before."""
        ...


class Tracing(Protocol):
    def request(
        self, method: str, path: str, request_id: str, headers: Mapping[str, str]
    ) -> contextlib.AbstractContextManager[RequestSpan]:
        """Return a span around an HTTP request. `headers` may name its parent (W3C traceparent)."""
        ...

    def generation(self, request_id: str, seconds: float, usage: Mapping[str, Any]) -> None:
        """Record a child span of the current HTTP request for engine work that ends now."""
        ...


class NoTracing:
    """Used if no spans are wanted."""

    @contextlib.contextmanager
    def request(self, method: str, path: str, request_id: str, headers: Mapping[str, str]) -> Iterator[RequestSpan]:
        yield self

    def generation(self, request_id: str, seconds: float, usage: Mapping[str, Any]) -> None: ...

    def end_with(self, status: int) -> None: ...


class OpenTelemetry:
    """Writes spans to `provider`, an opentelemetry.sdk TracerProvider."""

    def __init__(self, provider: Any) -> None:
        from opentelemetry import propagate, trace  # noqa: PLC0415  optional

        self._tracer = provider.get_tracer("jaxserve", __version__)
        self._extract = propagate.extract
        self._server = trace.SpanKind.SERVER
        self._failed = trace.StatusCode.ERROR

    @contextlib.contextmanager
    def request(self, method: str, path: str, request_id: str, headers: Mapping[str, str]) -> Iterator[RequestSpan]:
        """Open a span around an HTTP request. `headers` may name its parent (W3C traceparent)."""
        attributes = {"http.request.method": method, "url.path": path, "jaxserve.request_id": request_id}
        context = self._extract(dict(headers))
        name = f"{method} {path}" if len(path) < 64 else method
        with self._tracer.start_as_current_span(
            name, context=context, kind=self._server, attributes=attributes
        ) as span:
            yield _Span(span, self._failed)

    def generation(self, request_id: str, seconds: float, usage: Mapping[str, Any]) -> None:
        """Record a child span for engine work that took `seconds` and ends now."""
        now = time.time_ns()
        attributes = {
            "jaxserve.request_id": request_id,
            "gen_ai.operation.name": "text_completion",
            "gen_ai.usage.input_tokens": usage["prompt_tokens"],
            "gen_ai.usage.output_tokens": usage["completion_tokens"],
            "jaxserve.cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
        }
        span = self._tracer.start_span("generate", start_time=now - int(seconds * 1e9), attributes=attributes)
        span.end(now)


class _Span:
    def __init__(self, span: Any, failed: Any) -> None:
        self._span = span
        self._failed = failed

    def end_with(self, status: int) -> None:
        self._span.set_attribute("http.response.status_code", status)
        if status >= 500:
            self._span.set_status(self._failed)


def make_tracing(section: LoggingSection) -> Tracing:
    """Return tracing as configured. Raises ConfigError if spans are wanted and the packages are missing."""
    if section.otlp_endpoint is None:
        return NoTracing()
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # noqa: PLC0415  optional
        from opentelemetry.sdk.resources import Resource  # noqa: PLC0415
        from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
        from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415
    except ImportError:
        raise ConfigError("logging.otlp_endpoint needs OpenTelemetry", fix=install_command("otel")) from None
    provider = TracerProvider(resource=Resource.create({"service.name": "jaxserve", "service.version": __version__}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=section.otlp_endpoint)))
    return OpenTelemetry(provider)
