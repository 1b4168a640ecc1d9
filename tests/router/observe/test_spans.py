from __future__ import annotations

from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from ems.router.observe.spans import Spans
from tests.router.observe.records import record, refused

PARENT = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_spans_stand_below_the_clients_and_engines_below_the_routers() -> None:
    exporter = InMemorySpanExporter()
    spans = Spans("http://nowhere", exporter)
    one = record()
    sent = dict(spans.start(one, [(b"traceparent", PARENT), (b"tracestate", b"a=b"), (b"host", b"x")]))
    spans.finish(one)
    spans.close()

    made = {span.name: span for span in exporter.get_finished_spans()}
    assert set(made) == {"POST /v1/completions", "queue", "prefill", "decode"}
    whole = made["POST /v1/completions"]
    assert whole.parent is not None
    assert f"{whole.parent.span_id:016x}" == "b7ad6b7169203331"
    assert sent[b"traceparent"] == f"00-0af7651916cd43dd8448eb211c80319c-{whole.context.span_id:016x}-01".encode()
    assert sent[b"tracestate"] == b"a=b"
    decode = made["decode"]
    assert decode.parent is not None
    assert decode.parent.span_id == whole.context.span_id
    assert decode.start_time is not None
    assert decode.end_time is not None
    assert round((decode.end_time - decode.start_time) / 1e9, 3) == 0.55


def test_a_request_without_parent_begins_a_trace_and_a_refusal_is_an_error() -> None:
    exporter = InMemorySpanExporter()
    spans = Spans("http://nowhere", exporter)
    one = refused()
    assert spans.start(one, [])[0][0] == b"traceparent"
    spans.finish(one)
    spans.finish(one)
    spans.close()

    (made,) = exporter.get_finished_spans()
    assert made.parent is None
    assert not made.status.is_ok
