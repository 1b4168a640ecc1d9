"""A node's figures as metrics, made at the moment of a scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

Figures = Callable[[], Mapping[str, Any]]

_GAUGES = {
    "bytes_total": "Bytes of shared memory of the pool",
    "bytes_touched": "Bytes of it that were touched and can be handed out",
    "bytes_used": "Bytes of it that hold pages",
    "clients": "Connected clients",
    "leases": "Leases held by readers",
    "pinned": "Pages kept from leaving",
    "reservations": "Reservations held by writers",
    "slots_quarantined": "Slots that are not used any more because bytes in them were wrong",
    "slots_resting": "Slots that wait for a cut-off writer to end",
    "segments": "Segments of the pool",
    "segments_assigned": "Segments carved for a namespace",
    "uptime_seconds": "Seconds since the node started",
}
_COUNTERS = {
    "lookups": "Lookups answered",
    "keys_looked_up": "Keys asked for",
    "keys_hit": "Keys found present in a leading run",
    "tails_hit": "Blocks that are not full, found by their tokens",
    "pages_committed": "Pages stored",
    "pages_evicted": "Pages evicted",
    "pages_aborted": "Pages reserved and never committed",
    "refused_no_space": "Pages refused because all was leased or being written",
    "refused_not_touched": "Pages refused because their memory was not touched yet",
    "refused_draining": "Pages refused because the node was being drained",
    "already_present": "Pages offered that were present already",
    "already_writing": "Pages offered that another writer was writing",
    "leases_lost": "Leases ended by their holder's disappearance",
    "reservations_lost": "Reservations ended by their holder's disappearance",
    "pages_corrupt": "Pages whose bytes did not match their checksum, taken out of the pool",
    "corrupt_unconfirmed": "Pages that a reader reported as corrupt and the node found to be right",
}
_NAMESPACE_GAUGES = {
    "pages": "Pages present",
    "writing": "Pages being written",
    "capacity": "Slots of the namespace",
    "page_size": "Bytes of one page",
}
_TIER_GAUGES = {
    "tier_bytes": "Bytes of the tier",
    "tier_limit": "Bytes that the tier may take, 0 without limit",
    "tier_pages": "Pages in the tier",
    "reading": "Whether the tier is asked for pages",
    "writing": "Whether pages are written to the tier",
    "queued_bytes": "Bytes that wait to be written to the tier",
    "waiting_bytes": "Bytes that wait to be fetched from the tier",
    "fetching": "Reads of the tier under way",
    "fetch_seconds": "Seconds that a read of the tier takes, whatever its size",
    "fetch_bytes_per_second": "Bytes a second that one read of the tier brings",
}
_TIER_COUNTERS = {
    "pages_written": "Pages written to the tier",
    "pages_fetched": "Pages fetched from the tier",
    "pages_dropped": "Pages not written because too many waited",
    "not_offered": "Pages not written because the tier did not work",
    "write_failures": "Pages whose writing failed",
    "write_corrupt": "Pages not written because their bytes in memory were wrong",
    "fetch_misses": "Pages that the tier was thought to have and had not",
    "fetch_corrupt": "Pages of the tier that did not match their checksums",
    "fetches_too_dear": "Fetches left out because computing is quicker",
    "hung": "Reads and writes of the tier that took longer than its time-out",
    "cuts": "Times that the tier was cut out",
}


class PoolCollector(Collector):
    """Turns the node's figures into metrics at the moment of a scrape."""

    def __init__(self, figures: Figures) -> None:
        self._figures = figures

    def collect(self) -> Iterator[Metric]:
        figures = self._figures()
        yield from _tier_metrics(figures["tiers"])
        for name, text in _GAUGES.items():
            yield GaugeMetricFamily(f"ems_pool_{name}", text, value=figures[name])
        for name, text in _COUNTERS.items():
            yield CounterMetricFamily(f"ems_pool_{name}", text, value=figures["counters"][name])
        misses = CounterMetricFamily(
            "ems_pool_misses",
            "Lookups that missed something, by why the first missing key is missing",
            labels=["reason"],
        )
        for reason, count in figures["misses"].items():
            misses.add_metric([reason], count)
        yield misses
        for name, text in _NAMESPACE_GAUGES.items():
            family = GaugeMetricFamily(f"ems_pool_namespace_{name}", text, labels=["namespace"])
            for namespace in figures["namespaces"]:
                family.add_metric([namespace["name"]], namespace[name])
            yield family


def _tier_metrics(tiers: Sequence[Mapping[str, Any]]) -> Iterator[Metric]:
    for name, text in _TIER_GAUGES.items():
        gauge = GaugeMetricFamily(f"ems_pool_tier_{name.removeprefix('tier_')}", text, labels=["tier"])
        for tier in tiers:
            gauge.add_metric([tier["name"]], float(tier.get(name, 0)))
        yield gauge
    for name, text in _TIER_COUNTERS.items():
        counter = CounterMetricFamily(f"ems_pool_tier_{name}", text, labels=["tier"])
        for tier in tiers:
            counter.add_metric([tier["name"]], tier[name])
        yield counter
