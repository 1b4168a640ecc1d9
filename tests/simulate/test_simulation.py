"""The simulator against plain accounts of it: everything is counted once, and one host is what `ems bench trace` is."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ems.bench.trace.replay import replay
from ems.bench.trace.traffic import KINDS, made_trace
from ems.config import MIB, POLICIES
from ems.errors import ConfigError
from ems.simulate.cluster import Cluster, Source
from ems.simulate.network import Network
from ems.simulate.plan import CHOICES, Plan
from ems.simulate.report import tables
from ems.simulate.simulation import Simulated, simulate
from ems.simulate.workload import Workload
from tests.kit.examples import examples

BLOCK = MIB
FAST = Network(bandwidth=1e12, persistent_bandwidth=1e11)


def run(plan: Plan, requests: int = 300, kind: str = "conversations") -> Simulated:
    trace = made_trace(kind, requests)
    workload = Workload(trace, plan.copies, plan.sample, plan.spread, plan.seed)
    return simulate(plan, workload, lambda name, done, total: None)


def plan(**settings: object) -> Plan:
    basic = {"page_size": MIB // 4, "pages_per_block": 4, "memory": 200 * BLOCK, "cluster": 300 * BLOCK}
    return msgspec.convert({**basic, "network": FAST, **settings}, Plan, dec_hook=lambda _, value: value)


plans = st.builds(
    plan,
    hosts=st.integers(2, 6),
    copies=st.integers(1, 3),
    seed=st.integers(0, 5),
    memory=st.integers(40, 400).map(lambda blocks: blocks * BLOCK),
    cluster=st.sampled_from([0, 20 * BLOCK, 300 * BLOCK]),
    persistent=st.booleans(),
    policy=st.sampled_from(POLICIES),
    replicas=st.integers(1, 3),
    lose=st.integers(0, 1),
    lose_at=st.just(20.0),
    down=st.sampled_from([0.0, 5.0, 30.0]),
    **{name: st.sampled_from(CHOICES[name]) for name in ("routing", "placement", "write")},
)


@examples(25)
@given(plans)
@pytest.mark.slow
def test_blocks_and_bytes_are_each_counted_once(wanted: Plan) -> None:
    found = run(wanted, requests=150)

    asked = wanted.copies * sum(len(one.keys) for one in made_trace("conversations", 150))
    blocks = [sum(window.blocks[source] for window in found.run.windows) for source in Source]
    assert found.run.blocks == sum(blocks) == asked
    assert sum(found.run.shares.values()) == pytest.approx(1)
    assert found.run.fetched == blocks[Source.OTHER_HOSTS] * BLOCK
    assert found.run.read == blocks[Source.PERSISTENT] * BLOCK
    assert found.run.written % BLOCK == 0
    for name in ("fetched", "written", "read", "persisted"):
        assert sum(getattr(window, name) for window in found.run.windows) == getattr(found.run, name)
    if not wanted.cluster:
        assert (found.run.calls, found.run.fetched, found.run.written) == (0, 0, 0)
    assert (found.loss is None) is (not wanted.lose)


@examples(15)
@given(
    st.sampled_from(sorted(KINDS)), st.sampled_from(POLICIES), st.integers(20, 400), st.sampled_from([0, 100]),
    st.sampled_from(CHOICES["write"]),
)  # fmt: skip
@pytest.mark.slow
def test_one_host_is_the_replay_of_bench_trace(kind: str, policy: str, capacity: int, cluster: int, write: str) -> None:
    wanted = plan(hosts=1, memory=capacity * BLOCK, cluster=cluster * BLOCK, policy=policy, write=write)

    found = run(wanted, kind=kind)

    expected = replay(made_trace(kind, 300), capacity, wanted.policy)
    assert found.run.shares["own_memory"] == expected.hits / expected.blocks
    assert found.run.fetched == found.run.written == 0


@examples(5)
@given(plans)
def test_the_same_seed_gives_the_same_figures(wanted: Plan) -> None:
    first, again = (msgspec.json.encode(run(wanted, requests=100)) for _ in range(2))

    assert first == again


@pytest.mark.slow
def test_another_seed_gives_other_figures() -> None:
    wanted = plan(hosts=4, copies=2, routing="random")

    assert run(wanted).run.shares != run(msgspec.structs.replace(wanted, seed=1)).run.shares


def test_a_cluster_and_a_persistent_tier_save_computing() -> None:
    alone = run(plan(hosts=4, routing="random", cluster=0)).run.shares["computed"]
    together = run(plan(hosts=4, routing="random")).run.shares["computed"]
    above_a_tier = run(plan(hosts=4, routing="random", persistent=True)).run.shares["computed"]

    assert above_a_tier < together < alone


def test_prefix_routing_finds_more_in_own_memory_than_random() -> None:
    shares = {one: run(plan(hosts=4, routing=one)).run.shares["own_memory"] for one in ("prefix", "random")}

    assert shares["prefix"] > 1.5 * shares["random"]


@pytest.mark.slow
def test_a_link_that_is_slower_than_computing_is_hardly_used() -> None:
    slow = Network(bandwidth=BLOCK / 10, compute=0.01)
    quick, slowed = (run(plan(hosts=4, routing="random", network=one), requests=800) for one in (FAST, slow))

    assert slowed.run.shares["other_hosts"] < 0.4 * quick.run.shares["other_hosts"]


def test_what_was_on_a_lost_host_is_computed_once_more() -> None:
    cluster = Cluster(plan(hosts=2, write="never"))
    keys = [bytes([1 + number]) * 16 for number in range(8)]
    cluster.request(0, keys, 0.0)

    cluster.lose([0])
    cluster.back(0)
    first, second = cluster.request(0, keys, 2.0), cluster.request(0, keys, 3.0)

    assert (first.lost_memory, first.blocks[Source.COMPUTED]) == (8, 8)
    assert (second.lost_memory, second.blocks[Source.OWN_MEMORY]) == (0, 8)


def test_a_fetch_from_a_host_that_is_gone_costs_a_time_out_and_is_computed() -> None:
    cluster = Cluster(plan(hosts=2, placement="own-host"))
    keys = [bytes([1 + number]) * 16 for number in range(8)]
    cluster.request(0, keys, 0.0)

    cluster.lose([0])
    tried = cluster.request(1, keys, 1.0)
    cluster.master.unmount(0)

    assert (tried.blocks[Source.COMPUTED], tried.failed, tried.lost_memory) == (8, 1, 8)
    assert tried.seconds >= 1.0
    assert not cluster.master.blocks


def test_a_replica_elsewhere_outlives_its_host() -> None:
    cluster = Cluster(plan(hosts=3, placement="own-host", replicas=2))
    keys = [bytes([1 + number]) * 16 for number in range(8)]
    cluster.request(0, keys, 0.0)

    cluster.lose([0])
    cluster.master.unmount(0)
    served = cluster.request(1, keys, 20.0)

    assert served.blocks[Source.COMPUTED] == 0


def test_what_leaves_memory_goes_to_the_cluster_on_eviction() -> None:
    cluster = Cluster(plan(hosts=2, memory=16 * BLOCK, write="on-eviction"))
    old, new = ([bytes([first + number]) * 16 for number in range(16)] for first in (1, 101))

    cluster.request(0, old, 0.0)
    assert not cluster.master.blocks
    cluster.request(0, new, 1.0)

    assert set(cluster.master.blocks) == set(old)


@pytest.mark.slow
def test_a_sample_has_the_shares_of_all_within_its_errors() -> None:
    whole = plan(hosts=4, copies=24, memory=2400 * BLOCK, cluster=2400 * BLOCK)
    part = msgspec.structs.replace(whole, sample=0.25)

    exact, sampled = (run(one, requests=150).run for one in (whole, part))

    assert exact.errors is None
    assert sampled.errors is not None
    assert abs(sampled.shares["computed"] - exact.shares["computed"]) < 4 * sampled.errors["computed"] + 0.01
    assert sampled.blocks == pytest.approx(exact.blocks, rel=0.15)
    assert sampled.calls == pytest.approx(exact.calls, rel=0.15)


def test_tables_tell_all_of_it() -> None:
    found = run(plan(hosts=3, lose=1, lose_at=10, sample=0.9, copies=3))

    text = "\n".join(line for table in tables(found) for line in table.lines(None))

    assert all(word in text for word in ("own memory", "standard error", "calls of the master", "hits lost", "TB"))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"hosts": 0}, "--hosts is 0"),
        ({"sample": 0.0}, "--sample is 0.0"),
        ({"routing": "nearest"}, "expected one of random, least-loaded, prefix"),
        ({"lose": 16}, "--lose is 16, expected fewer than the 16 hosts"),
        ({"memory": 5}, "have room for one"),
        ({"window": 0}, "--window is 0"),
        ({"seed": -1}, "--seed is -1"),
    ],
)
def test_a_plan_without_sense_is_refused(settings: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        msgspec.structs.replace(Plan(), **settings)


@pytest.mark.parametrize("constant", [{"bandwidth": 0.0}, {"latency": -1.0}, {"compute": float("nan")}])
def test_a_network_without_sense_is_refused(constant: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=f"--{next(iter(constant))} is"):
        Network(**constant)


def test_what_does_not_fit_is_refused_with_a_sample_that_does() -> None:
    with pytest.raises(ConfigError, match="with --sample 0"):
        Plan(hosts=1000, copies=1000).refuse_unfit(longest=200, distinct=180_000, available=1 << 30)
    with pytest.raises(ConfigError, match="longest prompt of 200 blocks"):
        Plan(sample=0.001).refuse_unfit(longest=200, distinct=180_000, available=1 << 40)
    with pytest.raises(ConfigError, match="--lose-at is 1800 and the trace ends after 800 s"):
        Plan(lose=1).refuse_late_loss(800.0)
    Plan(lose=1, lose_at=799.0).refuse_late_loss(800.0)
    Plan().refuse_late_loss(800.0)
