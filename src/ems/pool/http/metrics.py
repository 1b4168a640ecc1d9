"""A node's figures as metrics, made at the moment of a scrape.

What always holds: names and units are those of ``docs/reference/metrics.md``, and no label has more values than
:data:`MOST_NAMESPACES`, whatever clients call their namespaces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from heapq import nlargest
from typing import Any

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from ems.pool.layout import FORMAT_VERSION
from ems.pool.protocol.coding import NEWEST_VERSION
from ems.pool.reasons.words import Reason
from ems.pool.service.handling import Measured

Figures = Callable[[], Mapping[str, Any]]

MOST_NAMESPACES = 100
"""Namespaces with series of their own: those with the most bytes."""

_GAUGES = (
    ("bytes_total", "capacity_bytes", "Bytes of shared memory of the pool"),
    ("bytes_touched", "touched_bytes", "Bytes of it that were touched and can be handed out"),
    ("bytes_used", "used_bytes", "Bytes of it that hold pages"),
    ("clients", "clients", "Connected clients"),
    ("leases", "leases", "Leases held by readers"),
    ("pinned", "pinned_pages", "Pages kept from leaving"),
    ("reservations", "reservations", "Reservations held by writers"),
    ("bytes_reserved", "reserved_bytes", "Bytes that are reserved and not committed"),
    ("slots_quarantined", "quarantined_slots", "Slots that are not used any more because bytes in them were wrong"),
    ("slots_resting", "resting_slots", "Slots that wait for a cut-off writer to stop"),
    ("segments", "segments", "Segments of the pool"),
    ("segments_assigned", "assigned_segments", "Segments carved for a namespace"),
    ("uptime_seconds", "uptime_seconds", "Seconds since the node started"),
)
"""Name of the figure, name of the metric, help; so in the tables below."""
_COUNTERS = (
    ("lookups", "lookups", "Lookups answered"),
    ("keys_looked_up", "keys_looked_up", "Keys asked for"),
    ("keys_hit", "keys_hit", "Keys found present in a leading run"),
    ("tails_hit", "tails_hit", "Blocks that are not full, found by their tokens"),
    ("pages_committed", "pages_committed", "Pages stored"),
    ("pages_evicted", "pages_evicted", "Pages evicted"),
    ("pages_aborted", "pages_aborted", "Pages reserved and never committed"),
    ("refused_no_space", "refused_no_space", "Pages refused because all was leased or being written"),
    ("refused_not_touched", "refused_not_touched", "Pages refused because their memory was not touched yet"),
    ("refused_draining", "refused_draining", "Pages refused because the node was being drained"),
    ("refused_share", "refused_share", "Pages refused because their writer held too many that it had not committed"),
    ("already_present", "already_present", "Pages offered that were present already"),
    ("already_writing", "already_writing", "Pages offered that another writer was writing"),
    ("leases_lost", "leases_lost", "Leases ended by their holder's disappearance"),
    ("reservations_lost", "reservations_lost", "Reservations ended by their holder's disappearance"),
    ("reservations_expired", "reservations_expired", "Reservations that were not committed in time"),
    ("pages_corrupt", "pages_corrupt", "Pages whose bytes did not match their checksum, taken out of the pool"),
    ("prefetch_hints", "prefetch_hints", "Hints over HTTP of prompts that an engine will be asked for"),
    ("corrupt_unconfirmed", "corrupt_unconfirmed", "Pages that a reader called corrupt and the node found to be right"),
)
_NAMESPACE_GAUGES = (
    ("pages", "pages", "Pages present"),
    ("writing", "writing_pages", "Pages being written"),
    ("capacity", "slots", "Slots of the namespace"),
    ("page_size", "page_size_bytes", "Bytes of one page"),
)
_TIER_GAUGES = (
    ("tier_bytes", "used_bytes", "Bytes of the tier"),
    ("tier_limit", "limit_bytes", "Bytes that the tier may take, 0 without limit"),
    ("tier_pages", "pages", "Pages in the tier"),
    ("tier_wrong_key", "wrong_key_packs", "Packs left alone that were sealed with another key"),
    ("tier_unreadable", "unreadable_packs", "Packs left alone that this release does not read"),
    ("tier_not_believed", "refused_packs", "Packs left alone that others may have written"),
    ("tier_quarantined_bytes", "quarantined_bytes", "Bytes of damaged packs that were set aside"),
    ("reading", "reading", "Whether the tier is asked for pages"),
    ("writing", "writing", "Whether pages are written to the tier"),
    ("queued_bytes", "queued_bytes", "Bytes that wait to be written to the tier"),
    ("waiting_bytes", "waiting_bytes", "Bytes that wait to be fetched from the tier"),
    ("fetching", "fetches_running", "Reads of the tier under way"),
    ("fetch_seconds", "fetch_fixed_seconds", "Seconds that a read of the tier takes, whatever its size"),
    ("fetch_bytes_per_second", "fetch_bytes_per_second", "Bytes a second that one read of the tier brings"),
)
_TIER_COUNTERS = (
    ("pages_written", "pages_written", "Pages written to the tier"),
    ("pages_fetched", "pages_fetched", "Pages fetched from the tier"),
    ("pages_dropped", "pages_dropped", "Pages not written because too many waited"),
    ("not_offered", "not_offered", "Pages not written because the tier did not work"),
    ("write_failures", "write_failures", "Pages whose writing failed"),
    ("write_corrupt", "write_corrupt", "Pages not written because their bytes in memory were wrong"),
    ("fetch_misses", "fetch_misses", "Pages that the tier was thought to have and had not"),
    ("fetch_corrupt", "fetch_corrupt", "Pages of the tier that did not match their checksums"),
    ("fetches_too_dear", "fetches_too_dear", "Fetches left out because computing is quicker"),
    ("hot_runs_told", "hot_runs_told", "Times that a run of pages was offered to other hosts to copy ahead"),
    ("copied_ahead", "copied_ahead", "Pages copied into memory because they were hot on another host"),
    ("copied_ahead_used", "copied_ahead_used", "Pages of these that were used here before they left memory"),
    ("hung", "hung", "Reads and writes of the tier that took longer than its time-out"),
    ("cuts", "cuts", "Times that the tier was cut out"),
)


class PoolCollector(Collector):
    """Turns the node's figures into metrics at the moment of a scrape; ``names`` are those of namespaces and tiers."""

    def __init__(self, figures: Figures, measured: Measured, *, names: bool = True) -> None:
        self._figures = figures
        self._names = names
        self._measured = measured

    def collect(self) -> Iterator[Metric]:
        figures = self._figures()
        versions = {"version": figures["release"], "protocol": str(NEWEST_VERSION), "format": str(FORMAT_VERSION)}
        yield InfoMetricFamily("ems_build", "1, with the versions as labels", value=versions)
        for figure, name, text in _GAUGES:
            yield GaugeMetricFamily(f"ems_pool_{name}", text, value=figures[figure])
        for figure, name, text in _COUNTERS:
            yield CounterMetricFamily(f"ems_pool_{name}", text, value=figures["counters"][figure])
        yield _misses(figures["misses"])
        rows = figures["namespaces"]
        yield GaugeMetricFamily("ems_pool_namespaces", "Namespaces of the pool", value=len(rows))
        if self._names:
            largest = nlargest(MOST_NAMESPACES, rows, key=lambda row: row["pages"] * row["page_size"])
            yield from _labelled(GaugeMetricFamily, "namespace", _NAMESPACE_GAUGES, largest)
            yield from _labelled(GaugeMetricFamily, "tier", _TIER_GAUGES, figures["tiers"])
            yield from _labelled(CounterMetricFamily, "tier", _TIER_COUNTERS, figures["tiers"])
        yield from self._histograms()

    def _histograms(self) -> Iterator[Metric]:
        durations = HistogramMetricFamily(
            "ems_pool_request_duration_seconds", "Seconds from a request to its answer", labels=["message"]
        )
        for message, seconds in self._measured.seconds.items():
            durations.add_metric([message.__name__], seconds.cumulative(), seconds.total)
        yield durations
        for name, text, taken in (
            ("saved", "Bytes of the pages of each commit", self._measured.saved_bytes),
            ("loaded", "Bytes of the pages that each lookup with a lease found", self._measured.loaded_bytes),
        ):
            yield HistogramMetricFamily(f"ems_pool_{name}_bytes", text, taken.cumulative(), taken.total)


def _misses(counts: Mapping[str, int]) -> Metric:
    misses = CounterMetricFamily(
        "ems_pool_misses", "Lookups that missed something, by why the first missing key is missing", labels=["reason"]
    )
    for reason in Reason:
        if reason.code:
            misses.add_metric([reason.value], counts.get(reason.value, 0))
    return misses


def _labelled(
    kind: type[GaugeMetricFamily | CounterMetricFamily],
    label: str,
    table: Sequence[tuple[str, str, str]],
    rows: Sequence[Mapping[str, Any]],
) -> Iterator[Metric]:
    """The metrics of ``table`` for each of ``rows``, a namespace or a tier as ``label`` says."""
    for figure, name, text in table:
        family = kind(f"ems_pool_{label}_{name}", text, labels=[label])
        for row in rows:
            family.add_metric([row["name"]], float(row.get(figure, 0)))
        yield family
