"""Each fact that would break a deployment is found, with something to do, and a host that is well has no finding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ems.config import GIB
from ems.doctor.facts import Cluster, Connection, Device, Facts, Memory, Model, Shared
from ems.doctor.findings import Finding, Host, judge

CLUSTER = Cluster("/etc/mooncake.json", protocol="tcp", memory=GIB, masters=("10.0.0.1:50088",), seals={"": "3f9a12cd"})
SERVED = ("0.23", "0.34")


def device(number: int, **changed: Any) -> Device:
    well: dict[str, Any] = {"link": "UP", "health": "Success", "address": f"10.20.0.{number}", "tls": False}
    return Device(number, "Ascend 910B3", **well | changed)


def host(**changed: Any) -> Facts:
    well: dict[str, Any] = {
        "host": "one",
        "kind": "cpu",
        "pool": 8 * GIB,
        "shared": Shared("/dev/shm/ems", total=32 * GIB, free=32 * GIB),
        "memory": Memory(64 * GIB, 48 * GIB, 0, None),
        "ports": {9410: ""},
        "versions": {"ems": "0.1.0", "vllm": "0.32.0", "mooncake": "0.3.13"},
        "clock_synchronised": True,
    }
    return Facts(**well | changed)


def ascend(**changed: Any) -> Facts:
    versions = {"vllm": "0.32.0", "vllm_ascend": "0.32.0rc1", "torch": "2.13.0+cpu", "torch_npu": "2.13.0.post1"}
    well: dict[str, Any] = {
        "kind": "ascend",
        "devices": (device(0), device(1)),
        "hccn": {0: "10.20.0.0", 1: "10.20.0.1"},
        "versions": versions,
    }
    return host(**well | changed)


def wrong(facts: Facts, *others: Facts) -> list[Finding]:
    return [one for one in judge(Host(facts, others, SERVED)) if one.level != "ok"]


def other(facts: Facts, **changed: Any) -> Facts:
    """Another host that is well beside ``facts``."""
    devices = tuple(msgspec.structs.replace(one, address=f"10.20.1.{one.number}") for one in facts.devices)
    return msgspec.structs.replace(facts, **{"host": "two", "devices": devices} | changed)


@pytest.mark.parametrize(
    "facts",
    [
        host(),
        ascend(),
        host(kind="cuda", devices=(Device(0, "H100"),), rdma={"mlx5_0/1": "ACTIVE"}),
        host(cluster=CLUSTER, connections=(Connection("10.0.0.1:50088", "master", clock_ahead=0.4),)),
        host(pool=40 * GIB, shared=Shared("/dev/shm/ems", total=64 * GIB, free=24 * GIB, in_use=40 * GIB)),
        host(versions={}),
    ],
    ids=["cpu", "ascend", "cuda", "cluster", "pool-of-before", "nothing-installed"],
)
def test_a_host_that_is_well_has_no_finding(facts: Facts) -> None:
    assert wrong(facts) == []
    assert wrong(facts, other(facts)) == []


CASES: dict[str, tuple[Facts, str, str, str]] = {
    "no tool": (
        host(device_problem="/dev/davinci_manager is there, and npu-smi lists no device"),
        "error",
        "devices",
        "",
    ),
    "link down": (ascend(devices=(device(0, link="DOWN"), device(1))), "error", "links", "device 0: DOWN"),
    "link unknown": (ascend(devices=(device(0, link=""), device(1))), "warning", "links", "device 0: unknown"),
    "fault": (ascend(devices=(device(0), device(1, health="Fault"))), "error", "links", "device 1: Fault"),
    "not probed": (ascend(devices=(device(0), device(1, health="Init"))), "warning", "links", "device 1: Init"),
    "nvlink": (
        host(kind="cuda", devices=(Device(3, "H100", inactive_nvlinks=2),)),
        "error",
        "links",
        "2 NVLinks of GPU 3",
    ),
    "rdma port": (host(rdma={"mlx5_0/1": "DOWN"}), "warning", "links", "mlx5_0/1: DOWN"),
    "no rdma": (host(cluster=msgspec.structs.replace(CLUSTER, protocol="rdma")), "error", "links", "no RDMA port"),
    "no hccn.conf": (ascend(hccn=None), "error", "addresses", "/etc/hccn.conf is not there"),
    "not in hccn.conf": (ascend(hccn={0: "10.20.0.0"}), "error", "addresses", "device 1 has 10.20.0.1"),
    "no address": (ascend(devices=(device(0, address=""), device(1))), "error", "addresses", "device 0 has none"),
    "own tls differs": (
        ascend(devices=(device(0, tls=True), device(1))),
        "error",
        "TLS switches",
        "on for one/0, off for one/1",
    ),
    "tls unknown": (ascend(devices=(device(0, tls=None), device(1))), "warning", "TLS switches", "one/0"),
    "peer": (host(connections=(Connection("two:9410", "host", "timed out"),)), "error", "connections", "two:9410"),
    "master": (host(connections=(Connection("m:1", "master", "refused"),)), "error", "connections", "m:1"),
    "device ping": (
        ascend(connections=(Connection("0 -> 10.20.1.0", "device", "no answer"),)),
        "error",
        "connections",
        "0 ->",
    ),
    "folder": (host(shared=Shared("/data", "/data is not in memory")), "error", "folder", "not in memory"),
    "shm": (host(shared=Shared("/dev/shm/ems", total=GIB, free=GIB)), "error", "shared memory", "room for 1.0 GiB"),
    "memory": (host(memory=Memory(64 * GIB, 4 * GIB, 0, None)), "error", "memory", "4.0 GiB are free, 8.0 GiB"),
    "lent": (
        host(memory=Memory(9 * GIB, int(8.5 * GIB), 0, None), cluster=CLUSTER),
        "error",
        "memory",
        "9.0 GiB are wanted",
    ),
    "huge": (host(memory=Memory(64 * GIB, 4 * GIB, 32 * GIB, None)), "error", "memory", "32.0 GiB are set aside"),
    "memlock": (ascend(memory=Memory(64 * GIB, 48 * GIB, 0, 65536)), "error", "locked memory", "64.0 KiB"),
    "port": (host(ports={9410: "Address already in use"}), "error", "ports", "9410: Address already in use"),
    "model": (host(model=Model("/models/m", ("it has no weights",))), "error", "model", "/models/m: it has no weights"),
    "old vllm": (host(versions={"vllm": "0.22.1"}), "error", "versions", "vllm is 0.22.1"),
    "new vllm": (host(versions={"vllm": "0.34.0"}), "error", "versions", "before 0.34"),
    "torch_npu": (ascend(versions={"torch": "2.13.0", "torch_npu": "2.9.0"}), "error", "versions", "torch_npu 2.9.0"),
    "no torch_npu": (ascend(versions={"vllm": "0.32.0"}), "error", "versions", "without vllm_ascend"),
    "no mooncake": (host(cluster=CLUSTER, versions={}), "error", "versions", "no Mooncake"),
    "clock": (host(clock_synchronised=False), "warning", "clock", "time server"),
    "skew": (
        host(connections=(Connection("two:1", "host", clock_ahead=-9.0),)),
        "error",
        "clock",
        "two:1 differs by -9 s",
    ),
    "mistyped setting": (
        host(cluster=msgspec.structs.replace(CLUSTER, unused=("global_segment_sise", "use_ascend_direct"))),
        "warning",
        "mooncake.json",
        "/etc/mooncake.json says global_segment_sise, which means nothing",
    ),
    "file": (host(cluster=Cluster("/etc/mooncake.json", "it is no JSON")), "error", "mooncake.json", "no JSON"),
    "protocol": (
        host(cluster=msgspec.structs.replace(CLUSTER, protocol="ascend")),
        "error",
        "mooncake.json",
        "this host has no NPU",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_would_break_a_deployment_is_found_with_something_to_do(case: str) -> None:
    facts, level, about, what = CASES[case]
    (found,) = wrong(facts)
    assert (found.level, found.about) == (level, about)
    assert what in found.what
    assert found.to_do


OTHERS: dict[str, tuple[Callable[[Facts], Facts], str, str]] = {
    "tls": (
        lambda facts: other(facts, devices=(device(0, address="10.20.1.0", tls=True), device(1, address="10.20.1.1"))),
        "TLS switches",
        "on for two/0, off for one/0",
    ),
    "address": (
        lambda facts: other(facts, devices=(device(0),)),
        "addresses",
        "10.20.0.0 is the address of one/0, two/0",
    ),
    "mooncake": (lambda facts: other(facts, versions={"mooncake": "0.3.12"}), "versions", "0.3.12 on two"),
    "master": (
        lambda facts: other(facts, cluster=msgspec.structs.replace(CLUSTER, masters=("10.0.0.2:50088",))),
        "mooncake.json",
        "two has another master",
    ),
    "seal": (
        lambda facts: other(facts, cluster=sealed({"": "00000001"})),
        "mooncake.json",
        "the seal is 3f9a12cd here and 00000001 on two",
    ),
    "no seal there": (
        lambda facts: other(facts, cluster=sealed({})),
        "mooncake.json",
        "this host has a seal and two has none",
    ),
    "seals of tenants there": (
        lambda facts: other(facts, cluster=sealed({"a": "3f9a12cd", "b": "00000001"})),
        "mooncake.json",
        "the seal for b is 3f9a12cd here and 00000001 on two",
    ),
}


def sealed(seals: dict[str, str] | None, problem: str = "", unseen: str = "") -> Cluster:
    return msgspec.structs.replace(CLUSTER, seals=seals, seal_problem=problem, seal_unseen=unseen)


def test_seals_of_tenants_that_differ_are_named_and_a_tenant_of_one_host_is_nothing_wrong() -> None:
    here = host(cluster=sealed({"a": "1", "b": "2", "here": "3"}), versions={"mooncake": "0.3.13"})
    there = other(here, cluster=sealed({"a": "1", "b": "9", "there": "3"}))
    (found,) = wrong(here, there)
    assert "the seal for b is 2 here and 9 on two" in found.what


@pytest.mark.parametrize(
    ("cluster", "said"),
    [
        (sealed({}), "what anybody put into the cluster is believed"),
        (sealed(None, unseen="no right"), "not known: no right"),
    ],
)
def test_what_has_no_seal_or_one_that_nobody_could_look_at_is_a_warning(cluster: Cluster, said: str) -> None:
    (found,) = wrong(host(cluster=cluster, versions={"mooncake": "0.3.13"}))
    assert (found.level, found.about) == ("warning", "mooncake.json")
    assert said in found.what


@pytest.mark.parametrize(
    ("cluster", "tenants", "said"),
    [
        (sealed({}), True, "a node with tenants does not start so"),
        (sealed(None, "too short"), False, "used: too short"),
    ],
)
def test_a_seal_with_which_no_node_starts_is_an_error(cluster: Cluster, tenants: bool, said: str) -> None:
    (found,) = wrong(host(cluster=cluster, versions={"mooncake": "0.3.13"}, tenants=tenants))
    assert (found.level, found.about) == ("error", "mooncake.json")
    assert said in found.what


def test_a_seal_that_nobody_could_look_at_is_not_compared() -> None:
    here = host(cluster=CLUSTER, versions={"mooncake": "0.3.13"})
    (found,) = wrong(here, other(here, cluster=sealed(None, unseen="no right")))
    assert found.level == "warning"
    assert "the seal of two was not seen there" in found.what


@pytest.mark.parametrize("here_has_one", [False, True])
def test_a_cluster_that_one_report_alone_has_is_said_not_to_be_compared(*, here_has_one: bool) -> None:
    facts = host(cluster=CLUSTER, versions={"mooncake": "0.3.13"})
    without = msgspec.structs.replace(facts, cluster=None)
    here, there = (facts, without) if here_has_one else (without, facts)
    (found,) = wrong(here, other(there))
    assert (found.level, found.about) == ("warning", "mooncake.json")
    assert f"the report of {'two' if here_has_one else 'this host'} says nothing of a cluster" in found.what


def test_a_file_of_another_host_that_makes_no_sense_is_not_another_master() -> None:
    here = host(cluster=CLUSTER, versions={"mooncake": "0.3.13"})
    assert wrong(here, other(here, cluster=Cluster("/etc/mooncake.json", "it is no JSON"))) == []


def test_what_a_node_that_runs_has_lent_is_not_wanted_once_more() -> None:
    memory = Memory(64 * GIB, 4 * GIB, 0, None)
    shared = Shared("/s", total=64 * GIB, free=0, in_use=8 * GIB)
    facts = host(cluster=msgspec.structs.replace(CLUSTER, memory=16 * GIB), pool=8 * GIB, memory=memory, shared=shared)
    facts = msgspec.structs.replace(facts, versions={"mooncake": "0.3.13"})
    assert [one.about for one in wrong(facts)] == ["memory"]
    assert wrong(msgspec.structs.replace(facts, node_runs=True)) == []


@pytest.mark.parametrize("case", OTHERS)
def test_hosts_that_do_not_fit_together_are_found(case: str) -> None:
    make, about, what = OTHERS[case]
    here = ascend(cluster=CLUSTER, versions={"mooncake": "0.3.13"})
    (found,) = wrong(here, make(here))
    assert (found.level, found.about) == ("error", about)
    assert what in found.what


def test_another_release_of_ems_on_another_host_is_a_warning() -> None:
    (found,) = wrong(host(), other(host(), versions={"ems": "0.2.0"}))
    assert (found.level, found.about) == ("warning", "versions")


def test_hosts_without_registered_memory_may_lock_little() -> None:
    assert wrong(host(memory=Memory(64 * GIB, 48 * GIB, 0, 65536), cluster=CLUSTER)) == []


@given(free=st.integers(0, 64 * GIB), in_use=st.integers(0, 64 * GIB), pool=st.integers(1, 64 * GIB))
def test_a_pool_fits_exactly_if_the_room_is_as_large(free: int, in_use: int, pool: int) -> None:
    facts = host(pool=pool, shared=Shared("/s", total=128 * GIB, free=free, in_use=in_use))
    found = [one for one in wrong(facts) if one.about == "shared memory"]
    assert bool(found) == (pool > free + in_use)


def test_every_check_that_looked_says_what_it_saw() -> None:
    found = judge(Host(ascend(cluster=CLUSTER, versions=ascend().versions | {"mooncake": "0.3.13"}), (), SERVED))
    assert {one.level for one in found} == {"ok"}
    assert all(one.what for one in found)
