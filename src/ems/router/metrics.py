"""What the router has done so far, as plain numbers, and the metrics page, which reads them when somebody asks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from typing import Any, Final, Literal

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from ems.histogram import Histogram
from ems.router.fleet import Fleet, Instance, Role
from ems.version import __version__

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"

Kind = Literal["counter", "gauge", "histogram"]
_FAMILIES: Final[dict[Kind, Any]] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
}

SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
"""Upper bounds of the buckets, in seconds."""


class Prefill(StrEnum):
    """How the prefill of one request ended."""

    DONE = "done"
    REFUSED = "refused"
    """The client's fault; the prefill's answer went to the client."""
    SKIPPED = "skipped"
    """No prefill instance could do it: decode computed the prompt itself."""
    SPARED = "spared"
    """Little was left to compute: decode did it itself."""
    TIMED_OUT = "timed_out"
    """Not done in time: decode computed the prompt itself."""


class Tokenized(StrEnum):
    """How it ended to ask an engine for the token ids of a prompt."""

    DONE = "done"
    FAILED = "failed"
    """It answered something else."""
    BROKEN = "broken"
    LATE = "late"


class Counters:
    """One set a router."""

    def __init__(self) -> None:
        self.running = 0
        """Completion requests that have come and are not answered, those that wait for a place as well."""
        self.answered: Counter[tuple[str, int]] = Counter()
        """Requests by endpoint and status; 499 stands for a client that left before it had an answer."""
        self.prefills: Counter[Prefill] = Counter()
        self.tokenized: Counter[Tokenized] = Counter()
        self.retries: Counter[Role] = Counter()
        self.hints: Mapping[str, int] = {}
        """Prefetch hints, by what became of them."""
        self.disconnects = 0
        """Clients that left before the end."""
        self.breaks = 0
        """Answers that ended early after the first byte."""
        self.first_byte = Histogram(SECONDS)
        """Seconds from a request's arrival to the first byte of its answer."""
        self.prefill_time = Histogram(SECONDS)
        """Seconds of the prefills that were done."""
        self.tokenize_time = Histogram(SECONDS)
        """Seconds until token ids were there, or were done without."""


class RouterCollector(Collector):
    """Turns counters and fleet into metric families, all named ``ems_router_*``, when a page is asked for."""

    def __init__(self, fleet: Fleet, counters: Counters) -> None:
        self._fleet = fleet
        self._counters = counters

    def collect(self) -> Iterator[Metric]:
        counts, fleet = self._counters, self._fleet
        text = "1, with the release as label"
        yield family("gauge", "ems_build_info", text, ("version",), {(__version__,): 1})
        text = "Completion requests by status; 499: the client left first"
        answered = {(endpoint, str(status)): count for (endpoint, status), count in sorted(counts.answered.items())}
        yield family("counter", "ems_router_requests", text, ("endpoint", "status"), answered)
        prefills = {(outcome,): count for outcome, count in sorted(counts.prefills.items())}
        yield family("counter", "ems_router_prefills", "Prefills by how they ended", ("outcome",), prefills)
        tokenized = {(outcome,): count for outcome, count in sorted(counts.tokenized.items())}
        text = "Prompts whose token ids an engine was asked for"
        yield family("counter", "ems_router_tokenizations", text, ("outcome",), tokenized)
        retries = {(role,): counts.retries[role] for role in Role}
        yield family("counter", "ems_router_retries", "Attempts after the first one", ("role",), retries)
        hints = {(outcome,): count for outcome, count in sorted(counts.hints.items())}
        yield family("counter", "ems_router_prefetch_hints", "Hints of prompts to pool nodes", ("outcome",), hints)
        alone: tuple[tuple[Kind, str, str, float | Histogram], ...] = (
            ("gauge", "requests_running", "Completion requests not yet answered, queued ones too", counts.running),
            ("counter", "client_disconnects", "Clients that left before their answer was complete", counts.disconnects),
            ("counter", "broken_answers", "Answers that ended early after the first byte", counts.breaks),
            ("histogram", "time_to_first_byte_seconds", "From a request to its answer's first byte", counts.first_byte),
            ("histogram", "prefill_seconds", "Duration of the prefills that were done", counts.prefill_time),
            ("histogram", "tokenize_seconds", "Time until token ids were there, or done without", counts.tokenize_time),
            ("gauge", "instances_leaving", "Removed instances that still finish requests", len(fleet.leaving())),
        )
        for kind, name, text, value in alone:
            yield family(kind, f"ems_router_{name}", text, (), {(): value})
        for kind, name, text, of in _OF_AN_INSTANCE:
            values = {(role, str(one.address)): of(one) for role in Role for one in fleet.listed(role)}
            yield family(kind, f"ems_router_instance_{name}", text, ("role", "instance"), values)


_OF_AN_INSTANCE: Final[tuple[tuple[Kind, str, str, Callable[[Instance], float]], ...]] = (
    ("gauge", "up", "1 while the instance may get requests", lambda one: float(one.breaker.usable)),
    ("gauge", "requests_running", "Requests on the instance", lambda one: one.own.running),
    ("gauge", "load_tokens", "Estimated tokens on the instance", lambda one: one.own.load),
    ("counter", "requests", "Requests sent to the instance", lambda one: one.served),
    ("counter", "failures", "Failures of the instance", lambda one: one.failures),
)


def family(kind: Kind, name: str, text: str, labels: tuple[str, ...], values: Mapping[Any, float | Histogram]) -> Any:
    """Return a family; ``values`` are by the values of all labels."""
    made = _FAMILIES[kind](name, text, labels=labels)
    for key, value in values.items():
        made.add_metric(key, *((value.cumulative(), value.total) if isinstance(value, Histogram) else (value,)))
    return made
