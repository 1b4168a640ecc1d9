"""Numbers out of records: what is counted and timed, by the labels of Kthena's metrics.

One look-up finds everything that a request adds to.  What always holds: the number of series is bounded, since only a
model that a route names, or that an engine has answered for, has a name of its own, and at most ``MOST_MODELS`` of the
latter do.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, NamedTuple

from ems.histogram import Histogram
from ems.router.observe.record import DONE, FAILED, Record

SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
RATIOS: Final = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
UNKNOWN: Final = "unknown"
NONE: Final = "none"
"""What Kthena writes where there is no route, or no instance was asked."""
MOST_MODELS: Final = 256
MOST_SERIES: Final = 16384
_LIMITS: Final = ("input_rate_limit", "output_rate_limit")
"""One kind in metrics, and told apart in the log, as in Kthena."""


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


def _seconds() -> Histogram:
    return Histogram(SECONDS)


@dataclass(slots=True)
class Series:
    """What requests of the same labels add up to."""

    requests: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    entered: int = 0
    cancelled: int = 0
    over_input: int = 0
    over_output: int = 0
    affinity_hits: int = 0
    affinity_misses: int = 0
    duration: Histogram = field(default_factory=_seconds)
    prefill: Histogram = field(default_factory=_seconds)
    decode: Histogram = field(default_factory=_seconds)
    first_token: Histogram = field(default_factory=_seconds)
    handoff: Histogram = field(default_factory=_seconds)
    queued: Histogram = field(default_factory=_seconds)
    match: Histogram = field(default_factory=lambda: Histogram(RATIOS))

    def add(self, record: Record) -> None:
        self.requests += 1
        self.input_tokens += record.input_tokens
        self.output_tokens += record.output_tokens
        if record.error_type in _LIMITS:
            self.over_input += record.error_type == _LIMITS[0]
            self.over_output += record.error_type == _LIMITS[1]
        self.duration.observe(record.ended - record.arrived)
        if record.prefill_done:
            self.prefill.observe(record.prefill_done - record.prefill_sent)
        if record.decode_sent:
            self.decode.observe(record.ended - record.decode_sent)
            if record.input_tokens:
                self.match.observe(min(1.0, record.prefix_tokens / record.input_tokens))
        if record.first_byte and record.status < 400:
            self.first_token.observe(record.first_byte - record.arrived)
            if record.prefill_done:
                self.handoff.observe(
                    max(record.first_byte - record.prefill_done, 0.0)
                )  # asked together, either may be first
        if record.entered:
            self.entered += 1
            self.queued.observe(record.queued)
        elif record.queued:
            self.cancelled += 1
        if record.affinity is not None:
            self.affinity_hits += record.affinity
            self.affinity_misses += not record.affinity


class AllSeries:
    """One set a router."""

    def __init__(self) -> None:
        self.by_labels: dict[Labels, Series] = {}
        self.models: set[str] = set()
        """Models that a route names or an engine answered for."""

    def model_of(self, record: Record) -> str:
        model = record.model
        if model in self.models:
            return model
        if 200 <= record.status < 300 and len(self.models) < MOST_MODELS:
            self.models.add(model)
            return model
        return UNKNOWN

    def finished(self, record: Record) -> None:
        status, model = record.status, self.model_of(record)
        kind = "rate_limit" if record.error_type in _LIMITS else record.error_type
        labels = Labels(
            model,
            record.path,
            str(status),
            kind or (DONE if status < 400 else FAILED),
            record.route or NONE,
            record.backend_type,
            record.backend or NONE,
            NONE if model is UNKNOWN else record.upstream_model or NONE,
        )
        series = self.by_labels.get(labels)
        if series is None:
            if len(self.by_labels) >= MOST_SERIES:
                return
            series = self.by_labels[labels] = Series()
        series.add(record)
