"""The metrics page's part about requests: Kthena's names and labels, so that its dashboards work, and some of our own.

What Kthena has no name for is called ``ems_router_*``.  Everything is read from series and records when a page is asked
for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from ems.histogram import Histogram
from ems.router.admission.limits import Kind
from ems.router.observe.record import Record
from ems.router.observe.series import UNKNOWN, AllSeries, Labels, ModelSeries, Series

PREFIX: Final = "kthena_router_"
EVERYBODY: Final = "_all"
_DURATION = ("model", "path", "status_code", "model_route", "backend_type", "backend_name", "upstream_model")
_TOKENS = ("model", "path", "token_type", "model_route", "backend_type", "backend_name", "upstream_model")
_PHASE = ("model", "path", "status_code")
_UPSTREAM = ("model_server", "model_route", "backend_type", "backend_name", "upstream_model")


class RequestCollector(Collector):
    """Turns series into metric families."""

    def __init__(
        self, series: AllSeries, active: Iterable[Record], exceeded: Callable[[], dict[tuple[str, Kind], int]] = dict
    ) -> None:
        self._series = series
        self._active = active
        self._exceeded = exceeded

    def collect(self) -> Iterator[Metric]:
        yield from self._requests()
        yield from self._now()
        yield from self._limits()
        yield from self._queue()
        yield from self._own()

    def _requests(self) -> Iterator[Metric]:
        series = self._series.by_labels
        family = CounterMetricFamily(f"{PREFIX}requests", "Requests by how they ended", labels=Labels._fields)
        for labels, one in series.items():
            family.add_metric(labels, one.requests)
        yield family
        yield _merged("request_duration_seconds", "Duration of requests", _DURATION, series, "duration")
        for phase in ("prefill", "decode"):
            yield _merged(f"request_{phase}_duration_seconds", f"Duration of {phase}", _PHASE, series, phase)
        tokens: Counter[tuple[str, ...]] = Counter()
        for labels, one in series.items():
            for kind, count in (("input", one.input_tokens), ("output", one.output_tokens)):
                tokens[labels.model, labels.path, kind, *labels[4:]] += count
        yield _counter("tokens", "Tokens of prompts (estimated) and of answers", _TOKENS, tokens)

    def _now(self) -> Iterator[Metric]:
        active = list(self._active)
        yield GaugeMetricFamily(f"{PREFIX}active_requests", "Requests being served", len(active))
        downstream: Counter[tuple[str, ...]] = Counter((self._name(one.model),) for one in active)
        yield _gauge("active_downstream_requests", "Requests being served", ("model",), downstream)
        upstream: Counter[tuple[str, ...]] = Counter(
            (one.server, one.route, one.backend_type, one.backend, one.upstream_model) for one in active if one.hops
        )
        yield _gauge("active_upstream_requests", "Requests that an engine works on", _UPSTREAM, upstream)

    def _limits(self) -> Iterator[Metric]:
        exceeded: Counter[tuple[str, ...]] = Counter()
        for (model, kind), count in self._exceeded().items():
            exceeded[self._name(model), kind, ""] += count
        text = "Requests refused by a limit of tokens"
        yield _counter("rate_limit_exceeded", text, ("model", "limit_type", "path"), exceeded)

    def _queue(self) -> Iterator[Metric]:
        active = list(self._active)
        waiting: Counter[tuple[str, ...]] = Counter(
            (self._name(one.model), EVERYBODY) for one in active if not one.entered
        )
        running: Counter[tuple[str, ...]] = Counter((self._name(one.model),) for one in active if one.entered)
        models = self._series.by_model
        labels = ("model", "user_id")
        yield _gauge("fairness_queue_size", "Requests that wait for a place", labels, waiting)
        yield _gauge("fairness_queue_inflight", "Requests that have a place", ("model",), running)
        text = "Time in the queue"
        family = HistogramMetricFamily(f"{PREFIX}fairness_queue_duration_seconds", text, labels=labels)
        for model, one in models.items():
            family.add_metric((model, EVERYBODY), one.queued.cumulative(), one.queued.total)
        yield family
        dequeued: Counter[tuple[str, ...]] = Counter()
        cancelled: Counter[tuple[str, ...]] = Counter()
        for model, one in models.items():
            dequeued[model, EVERYBODY] = one.dequeued
            cancelled[model, EVERYBODY] = one.cancelled
        yield _counter("fairness_queue_dequeue", "Requests that were given a place", labels, dequeued)
        yield _counter("fairness_queue_cancelled", "Requests that left the queue without one", labels, cancelled)

    def _own(self) -> Iterator[Metric]:
        models = self._series.by_model
        yield _of_models(f"{PREFIX}prefix_cache_match_ratio", "Share of prompts found in caches", models, "match")
        name = "ems_router_time_to_first_token_seconds"
        yield _of_models(name, "From a request to its answer's first byte, answered ones", models, "first_token")
        name = "ems_router_handoff_seconds"
        yield _of_models(name, "From a prefill's answer to decode's first byte", models, "handoff")
        yield _of_models("ems_router_queue_seconds", "Time in the queue", models, "queued")
        text = "Requests of a session by whether they came to where it was before"
        family = CounterMetricFamily("ems_router_affinity_requests", text, labels=("model", "outcome"))
        for model, one in models.items():
            family.add_metric((model, "hit"), one.affinity_hits)
            family.add_metric((model, "miss"), one.affinity_misses)
        yield family

    def _name(self, model: str) -> str:
        return model if model in self._series.models else UNKNOWN


def _merged(name: str, text: str, labels: tuple[str, ...], series: dict[Labels, Series], attribute: str) -> Metric:
    """A histogram of the series with fewer labels than they have."""
    places = [Labels._fields.index(label) for label in labels]
    summed: dict[tuple[str, ...], Histogram] = {}
    for full, one in series.items():
        part: Histogram = getattr(one, attribute)
        key = tuple(full[place] for place in places)
        whole = summed.get(key)
        if whole is None:
            whole = summed[key] = Histogram(part.bounds)
        whole.counts = [before + more for before, more in zip(whole.counts, part.counts, strict=True)]
        whole.total += part.total
    family = HistogramMetricFamily(f"{PREFIX}{name}", text, labels=labels)
    for key, whole in summed.items():
        family.add_metric(key, whole.cumulative(), whole.total)
    return family


def _of_models(name: str, text: str, models: dict[str, ModelSeries], attribute: str) -> Metric:
    family = HistogramMetricFamily(name, text, labels=("model",))
    for model, one in models.items():
        histogram: Histogram = getattr(one, attribute)
        family.add_metric((model,), histogram.cumulative(), histogram.total)
    return family


def _counter(name: str, text: str, labels: tuple[str, ...], counts: Counter[tuple[str, ...]]) -> Metric:
    family = CounterMetricFamily(f"{PREFIX}{name}", text, labels=labels)
    for key, count in counts.items():
        family.add_metric(key, count)
    return family


def _gauge(name: str, text: str, labels: tuple[str, ...], counts: Counter[tuple[str, ...]]) -> Metric:
    family = GaugeMetricFamily(f"{PREFIX}{name}", text, labels=labels)
    for key, count in counts.items():
        family.add_metric(key, count)
    return family
