"""Figures on their way: through other processes, added up, as a line of the log and as metrics."""

from __future__ import annotations

import json
import pickle
from collections import Counter as Counts
from typing import Any
from unittest.mock import Mock

import msgspec
import prometheus_client
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from ems.pool.reasons.words import Reason
from ems.vllm.connector import EmsStoreConnector
from ems.vllm.metadata import StepReport
from ems.vllm.reporting.explain import Tally
from ems.vllm.reporting.stats import EmsStats, PoolState, Transferred, transfers_of
from tests.metric_rules import broken_rules, families, listed

LOAD = Transferred(load=True, leading=True, blocks=8, failed=0, bytes=8_000_000, seconds=0.002)
OTHER_RANK = Transferred(load=True, leading=False, blocks=8, failed=0, bytes=8_000_000, seconds=0.004)
FAILED = Transferred(load=True, leading=True, blocks=2, failed=6, bytes=2_000_000, seconds=0.004)
SAVE = Transferred(load=False, leading=True, blocks=3, failed=0, bytes=3_000_000, seconds=0.001)
STATE = PoolState(pool_usable=True, compute_tokens_per_second=5000.4, load_tokens_per_second=1e6, refused=2)


def worker(*transfers: Transferred) -> EmsStats:
    return EmsStats.of_worker(transfers)


def scheduler(tally: Tally, state: PoolState | None = None) -> EmsStats:
    stats = EmsStats.of_scheduler(tally, state)
    assert stats is not None
    return stats


def lookups(*decided: tuple[int, int], **misses: int) -> Tally:
    return Tally(list(decided), Counts(misses))


def test_nothing_is_told_when_nothing_happened() -> None:
    assert EmsStats.of_scheduler(Tally(), None) is None
    assert EmsStats().is_empty()


def test_figures_survive_the_way_between_processes() -> None:
    stats = worker(LOAD, SAVE).aggregate(scheduler(lookups((100, 48), absent=1), STATE))
    again = EmsStoreConnector.build_kv_connector_stats(json.loads(json.dumps(stats.data)))

    assert again == stats
    assert pickle.loads(pickle.dumps(stats)) == stats  # noqa: S301 - the way that the engine takes
    assert transfers_of(again.data) == [LOAD, SAVE]
    assert EmsStoreConnector.build_kv_connector_stats() == EmsStats()


def test_the_line_of_the_log() -> None:
    stats = worker(LOAD, FAILED).aggregate(worker(OTHER_RANK, SAVE))
    stats = stats.aggregate(scheduler(lookups((100, 50), (100, 0), absent=1), STATE))

    assert stats.reduce() == {
        "EMS loads": 2,
        "EMS load blocks avg": 5.0,
        "EMS load ms avg": 3.0,
        "EMS load ms min": 2.0,
        "EMS load ms max": 4.0,
        "EMS load GB/s": 1.8,
        "EMS saves": 1,
        "EMS save blocks avg": 3.0,
        "EMS save ms avg": 1.0,
        "EMS save ms min": 1.0,
        "EMS save ms max": 1.0,
        "EMS save GB/s": 3.0,
        "EMS failed load blocks": 6,
        "EMS lookups": 2,
        "EMS hit rate (%)": 25.0,
        "EMS misses absent": 1,
        "EMS compute (tokens/s)": 5000,
        "EMS loads refused": 2,
        "EMS pool usable": 1,
    }


def test_the_line_of_an_interval_without_transfers() -> None:
    line = scheduler(lookups(pool_down=1)).reduce()

    assert line["EMS loads"] == line["EMS saves"] == line["EMS hit rate (%)"] == 0
    assert line["EMS misses pool_down"] == 1


@given(st.lists(st.lists(st.sampled_from([LOAD, OTHER_RANK, FAILED, SAVE]), min_size=1, max_size=4), max_size=6))
def test_adding_up_loses_nothing_and_keeps_the_order(rounds: list[list[Transferred]]) -> None:
    total = EmsStats()
    for transfers in rounds:
        total = total.aggregate(worker(*transfers))

    assert transfers_of(total.data) == [one for transfers in rounds for one in transfers]


def test_the_latest_state_stays() -> None:
    later = PoolState(pool_usable=False, compute_tokens_per_second=0.0, load_tokens_per_second=0.0, refused=3)
    stats = scheduler(lookups(), STATE).aggregate(scheduler(lookups(), later)).aggregate(worker(LOAD))

    assert stats.data["state"]["refused"] == 3
    assert stats.data["state"]["pool_usable"] is False


def test_added_figures_do_not_change_where_they_came_from() -> None:
    first, second = worker(LOAD), worker(SAVE)
    first.aggregate(second)

    assert transfers_of(second.data) == [SAVE]


class Metrics:
    """The connector's metrics of two engines in a registry of their own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.registry = CollectorRegistry()
        types: dict[type, Any] = {kind: self._made(kind) for kind in (Counter, Gauge, Histogram)}
        config = Mock()
        values: dict[int, list[object]] = {0: ["tiny", "0"], 1: ["tiny", "1"]}
        self.prom = EmsStoreConnector.build_prom_metrics(config, types, ["model_name", "engine"], values)

    def _made(self, kind: type) -> Any:
        return lambda **options: kind(**options, registry=self.registry)

    def value(self, name: str, engine: str = "0", **labels: str) -> float | None:
        return self.registry.get_sample_value(name, {"model_name": "tiny", "engine": engine, **labels})


@pytest.fixture
def metrics(monkeypatch: pytest.MonkeyPatch) -> Metrics:
    return Metrics(monkeypatch)


def test_every_figure_becomes_a_metric_of_its_engine(metrics: Metrics) -> None:
    stats = worker(LOAD, OTHER_RANK, FAILED, SAVE)
    stats = stats.aggregate(scheduler(lookups((100, 50), (100, 0), absent=1), STATE))
    metrics.prom.observe(stats.data, 1)
    metrics.prom.observe(stats.data, 1)

    expected = {
        "vllm:ems_load_seconds_count": 6,
        "vllm:ems_save_seconds_count": 2,
        "vllm:ems_loaded_blocks_total": 20,
        "vllm:ems_loaded_bytes_total": 36_000_000,
        "vllm:ems_failed_load_blocks_total": 12,
        "vllm:ems_saved_blocks_total": 6,
        "vllm:ems_saved_bytes_total": 6_000_000,
        "vllm:ems_lookups_total": 4,
        "vllm:ems_lookup_tokens_total": 400,
        "vllm:ems_hit_tokens_total": 100,
        "vllm:ems_pool_usable": 1,
        "vllm:ems_compute_tokens_per_second": 5000.4,
        "vllm:ems_load_tokens_per_second": 1e6,
        "vllm:ems_refused_loads_total": 2,
    }
    assert {name: metrics.value(name, "1") for name in expected} == expected
    assert metrics.value("vllm:ems_misses_total", "1", reason="absent") == 2
    assert metrics.value("vllm:ems_lookups_total", "0") == 0


def test_every_reason_has_its_counter_from_the_start(metrics: Metrics) -> None:
    assert {metrics.value("vllm:ems_misses_total", reason=reason.value) for reason in Reason} == {0.0}


def test_names_follow_the_rules_and_all_are_in_the_reference(metrics: Metrics) -> None:
    page = prometheus_client.generate_latest(metrics.registry).decode()
    page = "\n".join(line for line in page.splitlines() if "_created" not in line)

    assert broken_rules(page, prefix="vllm:ems_") == []
    assert families(page) == listed("vllm:ems_")


def test_refused_loads_are_counted_once(metrics: Metrics) -> None:
    for refused in (2, 2, 5):
        state = msgspec.structs.replace(STATE, refused=refused)
        metrics.prom.observe(scheduler(lookups(), state).data, 1)

    assert metrics.value("vllm:ems_refused_loads_total", "1") == 5


def test_reports_of_several_workers_are_added_up() -> None:
    one = StepReport({"r": 1}, [LOAD], {"PoolTimeout": 1})
    both = one.aggregate(StepReport({"r": 1, "s": 1}, [OTHER_RANK], {"PoolTimeout": 1, "StaleReference": 1}))

    assert both == StepReport({"r": 2, "s": 1}, [LOAD, OTHER_RANK], {"PoolTimeout": 2, "StaleReference": 1})
    assert pickle.loads(pickle.dumps(both)) == both  # noqa: S301 - the way that the engine takes
