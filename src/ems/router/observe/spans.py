"""Spans of requests, by OpenTelemetry: one for the request, and in it one each for the queue, prefill and decode.

Without an endpoint there are none, and a client's ``traceparent`` reaches the engines as it is; with one, the engines
get the router's span as their parent, so that their spans stand below it.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from ems.errors import ConfigError
from ems.http.headers import RawHeaders
from ems.router.observe.record import NEVER, Record

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

_BILLION = 1_000_000_000
CARRIED = ("traceparent", "tracestate")


class Spans:
    """Makes spans and sends them to an OTLP endpoint (or to ``exporter``)."""

    def __init__(self, endpoint: str, exporter: SpanExporter | None = None) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace import SpanKind, Status, StatusCode
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError:
            raise ConfigError("--otlp-traces-endpoint takes OpenTelemetry: install 'ems-kv[tracing]'") from None
        self._provider = TracerProvider(resource=Resource.create({"service.name": "ems-router"}))
        self._provider.add_span_processor(BatchSpanProcessor(exporter or OTLPSpanExporter(endpoint=endpoint)))
        self._tracer = self._provider.get_tracer("ems.router")
        self._propagator = TraceContextTextMapPropagator()
        self._server, self._client = SpanKind.SERVER, SpanKind.CLIENT
        self._failed = Status(StatusCode.ERROR)

    def close(self) -> None:
        self._provider.shutdown()

    def start(self, record: Record, fields: RawHeaders) -> list[tuple[bytes, bytes]]:
        """Begin a request's span; what the engines get of it as headers, in place of the client's."""
        from opentelemetry.trace import set_span_in_context

        carrier = {name.decode("latin-1"): value.decode("latin-1") for name, value in fields if name[:5] == b"trace"}
        parent = self._propagator.extract(carrier)
        span = self._tracer.start_span(f"{record.method} {record.path}", context=parent, kind=self._server)
        record.span = span
        sent: dict[str, str] = {}
        self._propagator.inject(sent, context=set_span_in_context(span, parent))
        return [(name.encode(), sent[name].encode()) for name in CARRIED if name in sent]

    def finish(self, record: Record) -> None:
        from opentelemetry.trace import set_span_in_context

        span: Any = record.span
        record.span = None
        if span is None:
            return
        clock = time.time_ns() - int(record.ended * _BILLION)
        span.set_attributes(
            {
                "http.request.method": record.method,
                "url.path": record.path,
                "http.response.status_code": record.status,
                "gen_ai.request.model": record.model,
                "gen_ai.request.id": record.request_id,
                "gen_ai.usage.input_tokens": record.input_tokens,
                "gen_ai.usage.output_tokens": record.output_tokens,
                "ems.prefix_tokens": record.prefix_tokens,
            }
        )
        if record.error_type:
            span.set_status(self._failed)
            span.set_attribute("error.type", record.error_type)
        inside = set_span_in_context(span)
        parts = (
            ("queue", record.entered - record.queued if record.queued else NEVER, record.entered, ""),
            ("prefill", record.prefill_sent, record.prefill_done or record.decode_sent, record.prefill),
            ("decode", record.decode_sent, record.ended, record.decode),
        )
        for name, began, ended, server in parts:
            if began and ended:
                start = clock + int(began * _BILLION)
                child = self._tracer.start_span(name, context=inside, kind=self._client, start_time=start)
                if server:
                    child.set_attribute("server.address", server)
                child.end(clock + int(ended * _BILLION))
        span.end(clock + int(record.ended * _BILLION))
