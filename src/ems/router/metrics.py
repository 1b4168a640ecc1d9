"""What the router has done so far, as plain numbers, and the metrics page, which reads them when somebody asks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from enum import StrEnum
from typing import Any, Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from ems.histogram import Histogram
from ems.router.fleet import Fleet, Instance, Role
from ems.version import __version__

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"

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


class Counters:
    """One set a router."""

    def __init__(self) -> None:
        self.running = 0
        """Completion requests that are being served."""
        self.answered: Counter[tuple[str, int]] = Counter()
        """Requests by endpoint and status; 499 stands for a client that left before it had an answer."""
        self.prefills: Counter[Prefill] = Counter()
        self.retries: Counter[Role] = Counter()
        self.disconnects = 0
        """Clients that left before the end."""
        self.breaks = 0
        """Answers that ended early after the first byte."""
        self.first_byte = Histogram(SECONDS)
        """Seconds from a request's arrival to the first byte of its answer."""
        self.prefill_time = Histogram(SECONDS)
        """Seconds of the prefills that were done."""


class RouterCollector(Collector):
    """Turns counters and fleet into metric families, all named ``ems_router_*``, when a page is asked for."""

    def __init__(self, fleet: Fleet, counters: Counters) -> None:
        self._fleet = fleet
        self._counters = counters

    def collect(self) -> Iterator[Metric]:
        counters, fleet = self._counters, self._fleet
        build = GaugeMetricFamily("ems_build_info", "1, with the release as label", labels=("version",))
        build.add_metric((__version__,), 1)
        yield build
        yield GaugeMetricFamily("ems_router_requests_running", "Completion requests being served", counters.running)
        text, labels = "Completion requests by status; 499: the client left first", ("endpoint", "status")
        requests = CounterMetricFamily("ems_router_requests", text, labels=labels)
        for (endpoint, status), count in sorted(counters.answered.items()):
            requests.add_metric((endpoint, str(status)), count)
        prefills = CounterMetricFamily("ems_router_prefills", "Prefills by how they ended", labels=("outcome",))
        for outcome, count in sorted(counters.prefills.items()):
            prefills.add_metric((outcome,), count)
        retries = CounterMetricFamily("ems_router_retries", "Attempts after the first one", labels=("role",))
        for role in Role:
            retries.add_metric((role,), counters.retries[role])
        yield from (requests, prefills, retries)
        text = "Clients that left before their answer was complete"
        yield CounterMetricFamily("ems_router_client_disconnects", text, counters.disconnects)
        text = "Answers that ended early after the first byte"
        yield CounterMetricFamily("ems_router_broken_answers", text, counters.breaks)
        text = "From a request to its answer's first byte"
        yield _histogram("ems_router_time_to_first_byte_seconds", text, counters.first_byte)
        yield _histogram("ems_router_prefill_seconds", "Duration of the prefills that were done", counters.prefill_time)
        yield from self._instances()
        text = "Removed instances that still finish requests"
        yield GaugeMetricFamily("ems_router_instances_leaving", text, len(fleet.leaving()))

    def _instances(self) -> Iterator[Metric]:
        for kind, name, text, value in _OF_AN_INSTANCE:
            family = kind(f"ems_router_instance_{name}", text, labels=("role", "instance"))
            for role in Role:
                for instance in self._fleet.listed(role):
                    family.add_metric((role, str(instance.address)), value(instance))
            yield family


_OF_AN_INSTANCE: Final[tuple[tuple[Any, str, str, Callable[[Instance], float]], ...]] = (
    (GaugeMetricFamily, "up", "1 while the instance may get requests", lambda one: float(one.breaker.usable)),
    (GaugeMetricFamily, "requests_running", "Requests on the instance", lambda one: one.running),
    (GaugeMetricFamily, "load_tokens", "Estimated tokens on the instance", lambda one: one.load),
    (CounterMetricFamily, "requests", "Requests sent to the instance", lambda one: one.served),
    (CounterMetricFamily, "failures", "Failures of the instance", lambda one: one.failures),
)


def _histogram(name: str, text: str, histogram: Histogram) -> HistogramMetricFamily:
    return HistogramMetricFamily(name, text, buckets=histogram.cumulative(), sum_value=histogram.total)
