"""The connector's figures in vLLM's own log and metrics.

Workers tell their loads and saves, the scheduler side its lookups; vLLM adds them up (:class:`EmsStats`), logs them
every few seconds and turns them into Prometheus metrics (:class:`EmsPromMetrics`).
"""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from ems.pool.reasons.words import Reason
from ems.version import __version__
from ems.vllm.reporting.explain import Tally

_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


class Transferred(msgspec.Struct, frozen=True, array_like=True):
    """One load or save of one worker that ended, in blocks of the request.

    Of all workers that move parts of the same blocks a ``leading`` one stands for them; bytes are the worker's own.
    ``failed`` blocks of a load hold nothing.
    """

    load: bool
    leading: bool
    blocks: int
    failed: int
    bytes: int
    seconds: float


class PoolState(msgspec.Struct, frozen=True):
    """How things stand on the scheduler side."""

    pool_usable: bool
    compute_tokens_per_second: float
    load_tokens_per_second: float
    refused: int


@dataclass
class EmsStats(KVConnectorStats):
    """Figures of one interval; ``data`` is plain, because it travels between processes."""

    def __post_init__(self) -> None:
        if not self.data:
            self.reset()

    def reset(self) -> None:
        self.data: dict[str, Any] = {
            "transfers": [], "lookups": 0, "asked_tokens": 0, "hit_tokens": 0, "misses": {}, "state": {},
        }  # fmt: skip

    @classmethod
    def of_worker(cls, transfers: Iterable[Transferred]) -> EmsStats:
        stats = cls()
        stats.data["transfers"] = msgspec.to_builtins(list(transfers))
        return stats

    @classmethod
    def of_scheduler(cls, tally: Tally, state: PoolState | None) -> EmsStats | None:
        """What the scheduler side has to tell: lookups, and how things stand where that has changed."""
        if not tally.decided and not tally.misses and state is None:
            return None
        stats = cls()
        stats.data.update(
            lookups=len(tally.decided),
            asked_tokens=sum(asked for asked, _ in tally.decided),
            hit_tokens=sum(found for _, found in tally.decided),
            misses=dict(tally.misses),
            state={} if state is None else msgspec.to_builtins(state),
        )
        return stats

    def is_empty(self) -> bool:
        return not (self.data["transfers"] or self.data["lookups"] or self.data["misses"] or self.data["state"])

    def aggregate(self, other: KVConnectorStats) -> EmsStats:
        data = other.data
        self.data["transfers"] = [*self.data["transfers"], *data["transfers"]]
        for name in ("lookups", "asked_tokens", "hit_tokens"):
            self.data[name] += data[name]
        self.data["misses"] = dict(Counts(self.data["misses"]) + Counts(data["misses"]))
        self.data["state"] = data["state"] or self.data["state"]
        return self

    def reduce(self) -> dict[str, int | float]:
        transfers = transfers_of(self.data)
        asked, state = self.data["asked_tokens"], self.data["state"]
        figures: dict[str, int | float] = {
            **_averages("load", [one for one in transfers if one.load]),
            **_averages("save", [one for one in transfers if not one.load]),
            "EMS failed load blocks": sum(one.failed for one in transfers if one.leading),
            "EMS lookups": self.data["lookups"],
            "EMS hit rate (%)": round(100 * self.data["hit_tokens"] / asked, 1) if asked else 0.0,
            **{f"EMS misses {reason}": count for reason, count in sorted(self.data["misses"].items())},
        }
        if state:
            figures["EMS compute (tokens/s)"] = round(state["compute_tokens_per_second"])
            figures["EMS loads refused"] = state["refused"]
            figures["EMS pool usable"] = int(state["pool_usable"])
        return figures


def transfers_of(data: Mapping[str, Any]) -> list[Transferred]:
    return msgspec.convert(data["transfers"], list[Transferred])


def _averages(name: str, transfers: list[Transferred]) -> dict[str, int | float]:
    leading = [one for one in transfers if one.leading]
    count, seconds = len(leading), sum(one.seconds for one in transfers)
    if not count or not seconds:
        return {f"EMS {name}s": count}
    milliseconds = [one.seconds * 1000 for one in leading]
    return {
        f"EMS {name}s": count,
        f"EMS {name} blocks avg": round(sum(one.blocks for one in leading) / count, 1),
        f"EMS {name} ms avg": round(sum(milliseconds) / count, 2),
        f"EMS {name} ms min": round(min(milliseconds), 2),
        f"EMS {name} ms max": round(max(milliseconds), 2),
        f"EMS {name} GB/s": round(sum(one.bytes for one in transfers) / seconds / 1e9, 2),
    }


_COUNTERS = {
    "loaded_blocks": "Blocks that were loaded from the pool",
    "loaded_bytes": "Bytes that were loaded from the pool, over all workers",
    "failed_load_blocks": "Blocks that were promised, could not be loaded and were computed",
    "saved_blocks": "Blocks that were stored in the pool",
    "saved_bytes": "Bytes that were stored in the pool, over all workers",
    "lookups": "Requests for which it was decided what to load from the pool",
    "lookup_tokens": "Tokens of their prompts that the engine's own cache did not have",
    "hit_tokens": "Tokens of these that were to be loaded from the pool",
    "refused_loads": "Loads that were not made because computing is quicker",
}

_GAUGES = {
    "pool_usable": "Whether the pool is asked (1) or stayed away from until it is well again (0)",
    "compute_tokens_per_second": "Tokens of prompts that the engine computes in a second",
    "load_tokens_per_second": "Tokens whose state a worker loads in a second",
}
"""Fields of a :class:`PoolState` that are metrics."""


class EmsPromMetrics(KVConnectorPromMetrics):
    """The metrics ``vllm:ems_...``, one child an engine."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Mapping[type, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._types, self._labels, self._values = metric_types, labelnames, per_engine_labelvalues
        took = "Seconds that a worker's {} of a request's blocks took"
        self._seconds = {
            load: self._metric(Histogram, f"{name}_seconds", took.format(name), buckets=list(_SECONDS))
            for load, name in ((True, "load"), (False, "save"))
        }
        self._counters = {name: self._metric(Counter, name, text) for name, text in _COUNTERS.items()}
        self._refused = dict.fromkeys(per_engine_labelvalues, 0)
        """How many refused loads each engine's scheduler side has told of."""
        build = metric_types[Gauge](
            name="vllm:ems_build_info",
            documentation="1, with the release of EMS as label",
            labelnames=[*labelnames, "version"],
            multiprocess_mode="mostrecent",
        )
        for values in per_engine_labelvalues.values():
            build.labels(*values, __version__).set(1)
        misses = metric_types[Counter](
            name="vllm:ems_misses",
            documentation="Requests for which nothing was loaded, or whose load failed, by reason",
            labelnames=[*labelnames, "reason"],
        )
        self._misses = {
            (engine, reason.value): misses.labels(*values, reason.value)
            for engine, values in per_engine_labelvalues.items()
            for reason in Reason
        }
        self._gauges = {
            name: self._metric(Gauge, name, text, multiprocess_mode="mostrecent") for name, text in _GAUGES.items()
        }

    def _metric(self, kind: type, name: str, documentation: str, **more: object) -> dict[int, Any]:
        """The child of each engine."""
        metric = self._types[kind](
            name=f"vllm:ems_{name}", documentation=documentation, labelnames=self._labels, **more
        )
        return {engine: metric.labels(*values) for engine, values in self._values.items()}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        data = transfer_stats_data
        for one in transfers_of(data):
            self._seconds[one.load][engine_idx].observe(one.seconds)
            self._count("loaded_bytes" if one.load else "saved_bytes", engine_idx, one.bytes)
            if one.leading:
                self._count("loaded_blocks" if one.load else "saved_blocks", engine_idx, one.blocks)
                self._count("failed_load_blocks", engine_idx, one.failed)
        for name, key in (("lookups", "lookups"), ("lookup_tokens", "asked_tokens"), ("hit_tokens", "hit_tokens")):
            self._count(name, engine_idx, data[key])
        for reason, count in data["misses"].items():
            self._misses[engine_idx, reason].inc(count)
        for name, value in data["state"].items():
            if name in self._gauges:
                self._gauges[name][engine_idx].set(value)
        if data["state"]:
            refused = data["state"]["refused"]
            self._count("refused_loads", engine_idx, refused - self._refused[engine_idx])
            self._refused[engine_idx] = refused

    def _count(self, name: str, engine: int, amount: int) -> None:
        if amount:
            self._counters[name][engine].inc(amount)
