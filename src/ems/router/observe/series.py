"""Numbers out of records: what is counted and timed, by the labels of Kthena's metrics.

One look-up finds everything that a request adds to.  What always holds: the number of series is bounded, since only a
model that an engine has answered for has a name of its own, and at most ``MOST_MODELS`` do.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from ems.histogram import Histogram
from ems.router.observe.record import DONE, FAILED, Record

SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
RATIOS: Final = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
UNKNOWN: Final = "unknown"
MOST_MODELS: Final = 256
MOST_SERIES: Final = 16384


class Labels(NamedTuple):
    """What distinguishes series; the names are Kthena's."""

    model: str
    path: str
    status_code: str
    error_type: str
    model_route: str
    backend_type: str
    backend_name: str
    upstream_model: str


class Series:
    """What requests of the same labels add up to."""

    __slots__ = ("decode", "duration", "input_tokens", "output_tokens", "prefill", "requests")

    def __init__(self) -> None:
        self.requests = 0
        self.input_tokens = 0
        self.output_tokens = 0
        self.duration = Histogram(SECONDS)
        self.prefill = Histogram(SECONDS)
        self.decode = Histogram(SECONDS)


class ModelSeries:
    """What requests of one model add up to."""

    __slots__ = (
        "affinity_hits",
        "affinity_misses",
        "cancelled",
        "dequeued",
        "first_token",
        "handoff",
        "match",
        "queued",
    )

    def __init__(self) -> None:
        self.first_token = Histogram(SECONDS)
        self.handoff = Histogram(SECONDS)
        self.queued = Histogram(SECONDS)
        self.match = Histogram(RATIOS)
        self.dequeued = 0
        self.cancelled = 0
        self.affinity_hits = 0
        self.affinity_misses = 0


class AllSeries:
    """One set a router."""

    def __init__(self) -> None:
        self.by_labels: dict[Labels, Series] = {}
        self.by_model: dict[str, ModelSeries] = {}
        self.models: set[str] = set()
        """Models that an engine answered for."""

    def model_of(self, record: Record) -> str:
        model = record.model
        if model in self.models:
            return model
        if 200 <= record.status < 300 and len(self.models) < MOST_MODELS:
            self.models.add(model)
            return model
        return UNKNOWN

    def finished(self, record: Record) -> None:
        status = record.status
        model = self.model_of(record)
        known = model is not UNKNOWN
        labels = Labels(
            model,
            record.path,
            str(status),
            record.error_type or (DONE if status < 400 else FAILED),
            record.route,
            record.backend_type,
            record.backend,
            record.upstream_model if known else "",
        )
        series = self.by_labels.get(labels)
        if series is None:
            if len(self.by_labels) >= MOST_SERIES:
                return
            series = self.by_labels[labels] = Series()
        series.requests += 1
        series.input_tokens += record.input_tokens
        series.output_tokens += record.output_tokens
        series.duration.observe(record.ended - record.arrived)
        if record.prefill_done:
            series.prefill.observe(record.prefill_done - record.prefill_sent)
        if record.decode_sent:
            series.decode.observe(record.ended - record.decode_sent)
        self._of_model(model, record)

    def _of_model(self, model: str, record: Record) -> None:
        series = self.by_model.get(model)
        if series is None:
            series = self.by_model[model] = ModelSeries()
        if record.first_byte and record.status < 400:
            series.first_token.observe(record.first_byte - record.arrived)
            if record.prefill_done:
                series.handoff.observe(record.first_byte - record.prefill_done)
        if record.entered:
            series.dequeued += 1
            series.queued.observe(record.queued)
        elif record.queued:
            series.cancelled += 1
        if record.decode_sent and record.input_tokens:
            series.match.observe(min(1.0, record.prefix_tokens / record.input_tokens))
        if record.affinity is not None:
            if record.affinity:
                series.affinity_hits += 1
            else:
                series.affinity_misses += 1
