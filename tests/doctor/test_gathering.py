"""Facts are read from this machine, from files below a root, and from tools behind a seam."""

from __future__ import annotations

import errno
import json
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ems.config import GIB, MIB, NodeConfig
from ems.doctor.facts import Connection
from ems.doctor.gathering import Wanted, connect, gather, read_cluster, run_command
from ems.pool.tiers.settings import TierConfig
from tests.doctor.recorded import ascend_host, cuda_host, no_tools


@pytest.fixture
def listening() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


def node(tmp_path: Path, **changed: Any) -> NodeConfig:
    well: dict[str, Any] = {"directory": tmp_path / "pool", "socket": tmp_path / "pool/node.sock", "allow_disk": True}
    return NodeConfig(**well | {"size": 64 * MIB, "http_port": None} | changed)


def test_a_host_without_accelerator_has_its_memory_told(tmp_path: Path) -> None:
    facts = gather(Wanted(node=node(tmp_path)), no_tools, tmp_path)
    assert (facts.kind, facts.devices, facts.hccn, facts.rdma) == ("cpu", (), None, {})
    assert facts.pool == 64 * MIB
    assert facts.memory.total >= facts.memory.available > 0
    assert facts.shared.problem == ""
    assert facts.shared.total >= facts.shared.free > 0
    assert not (tmp_path / "pool").exists()  # nothing was changed
    assert facts.versions["ems"]


def test_an_ascend_host_has_devices_and_their_addresses(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/hccn.conf").write_text("address_0=10.20.0.10\naddress_1=10.20.0.11\n")
    facts = gather(Wanted(node=node(tmp_path), device_addresses=("10.20.1.10",) * 3), ascend_host(), tmp_path)
    assert facts.kind == "ascend"
    assert facts.hccn == {one.number: one.address for one in facts.devices}
    assert [one.to for one in facts.connections] == ["0 -> 10.20.1.10", "1 -> 10.20.1.10", "0 -> 10.20.1.10"]


def test_a_cuda_host_has_gpus_and_the_ports_of_its_network(tmp_path: Path) -> None:
    port = tmp_path / "sys/class/infiniband/mlx5_0/ports/1"
    port.mkdir(parents=True)
    (port / "state").write_text("4: ACTIVE\n")
    facts = gather(Wanted(node=node(tmp_path)), cuda_host, tmp_path)
    assert facts.kind == "cuda"
    assert len(facts.devices) == 2
    assert facts.rdma == {"mlx5_0/1": "ACTIVE"}


@pytest.mark.parametrize("device", ["davinci_manager", "nvidiactl"])
def test_devices_whose_tool_is_missing_are_a_problem(tmp_path: Path, device: str) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / device).touch()
    assert device in gather(Wanted(node=node(tmp_path)), no_tools, tmp_path).device_problem


def test_a_control_group_may_have_less_memory_than_the_host(tmp_path: Path) -> None:
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text(f"{512 * MIB}\n")
    (group / "memory.current").write_text(f"{500 * MIB}\n")
    memory = gather(Wanted(node=node(tmp_path)), no_tools, tmp_path).memory
    assert (memory.total, memory.available) == (512 * MIB, 12 * MIB)


def test_huge_pages_are_counted_of_all_sizes(tmp_path: Path) -> None:
    for size, count in (("2048", 8), ("1048576", 1)):
        folder = tmp_path / f"sys/kernel/mm/hugepages/hugepages-{size}kB"
        folder.mkdir(parents=True)
        (folder / "nr_hugepages").write_text(f"{count}\n")
    assert gather(Wanted(node=node(tmp_path)), no_tools, tmp_path).memory.reserved_huge_pages == GIB + 16 * MIB


def test_a_port_that_somebody_has_is_found(tmp_path: Path, listening: int) -> None:
    facts = gather(Wanted(node=node(tmp_path, http_port=listening)), no_tools, tmp_path)
    assert facts.ports == {listening: "Address already in use"}


def test_a_node_that_runs_may_have_its_port(tmp_path: Path, listening: int) -> None:
    (tmp_path / "pool").mkdir()
    with socket.socket(socket.AF_UNIX) as control:
        control.bind(str(tmp_path / "pool/node.sock"))
        control.listen()
        facts = gather(Wanted(node=node(tmp_path, http_port=listening)), no_tools, tmp_path)
    assert facts.node_runs
    assert facts.ports == {}


def test_a_folder_of_somebody_else_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "pool").mkdir()
    (tmp_path / "pool/letter.txt").write_text("mine")
    assert "letter.txt" in gather(Wanted(node=node(tmp_path)), no_tools, tmp_path).shared.problem


def test_hosts_that_refuse_are_there_and_masters_that_refuse_are_not(free_port: int, listening: int) -> None:
    refusing, answering = f"127.0.0.1:{free_port}", f"127.0.0.1:{listening}"
    assert connect(refusing, "host") == Connection(refusing, "host")
    assert connect(answering, "master") == Connection(answering, "master")
    assert connect(refusing, "master").problem == "Connection refused"


def test_a_command_that_is_missing_fails_or_says_something() -> None:
    assert run_command(["ems-no-such-command"]) is None
    assert run_command([sys.executable, "-c", "raise SystemExit(3)"]) is None
    assert run_command([sys.executable, "-c", "print('here')"]) == "here\n"


FILE = {"metadata_server": "P2PHANDSHAKE", "protocol": "tcp", "master_server_address": "127.0.0.1:50088"}


def tier(file: Path, seal_key: Path | None = None) -> TierConfig:
    return TierConfig(kind="mooncake", place=str(file), seal_key=seal_key)


@pytest.mark.parametrize(
    ("changed", "memory"),
    [
        ({"global_segment_size": "1GB", "local_buffer_size": "512MB"}, GIB),
        ({"global_segment_size": 1 << 30, "local_buffer_size": "1048576KB"}, GIB),
        ({"global_segment_size": 0, "local_buffer_size": "1GB"}, 0),
    ],
)
def test_sizes_of_mooncake_are_read_as_they_stand(tmp_path: Path, changed: dict[str, object], memory: int) -> None:
    (tmp_path / "m.json").write_text(json.dumps(FILE | changed))
    cluster = read_cluster(tier(tmp_path / "m.json"), {})
    assert (cluster.problem, cluster.memory, cluster.masters) == ("", memory, ("127.0.0.1:50088",))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "no JSON"),
        ("[]", "no JSON object"),
        (json.dumps(FILE | {"global_segment_size": "1 elephant"}), "is '1 elephant', expected"),
        (json.dumps(FILE | {"protocol": "pigeon"}), "expected one of tcp, rdma, ascend"),
        (json.dumps(FILE | {"master_server_address": "somewhere"}), "is 'somewhere', expected host:port"),
    ],
)
def test_what_makes_no_sense_in_a_file_for_mooncake_is_said(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "m.json").write_text(text)
    assert said in read_cluster(tier(tmp_path / "m.json"), {}).problem


def test_a_file_that_is_not_there_is_said(tmp_path: Path) -> None:
    problem = read_cluster(tier(tmp_path / "m.json"), {}).problem
    assert (
        problem == f"{tmp_path}/m.json cannot be read: No such file or directory; name a file with Mooncake's settings"
    )


def test_an_address_that_is_not_this_hosts_is_said(tmp_path: Path) -> None:
    for address, said in (("192.0.2.1", "where other hosts do not reach this one"), ("127.0.0.1", "")):
        (tmp_path / "m.json").write_text(json.dumps(FILE | {"local_hostname": address}))
        assert said in read_cluster(tier(tmp_path / "m.json"), {}).problem
    assert read_cluster(tier(tmp_path / "m.json"), {}).problem == ""


def test_servers_of_etcd_are_asked_each_and_a_file_leaves_no_word_to_the_environment(tmp_path: Path) -> None:
    """As with a node, which reads one of them."""
    (tmp_path / "m.json").write_text(json.dumps(FILE | {"master_server_address": "etcd://a:2379;b:2379"}))
    cluster = read_cluster(tier(tmp_path / "m.json"), {"MOONCAKE_MASTER": "c:1", "MOONCAKE_PROTOCOL": "rdma"})
    assert (cluster.masters, cluster.protocol) == (("a:2379", "b:2379"), "tcp")


def test_without_a_file_a_node_reads_the_environment(tmp_path: Path) -> None:
    (tmp_path / "m.json").write_text(json.dumps(FILE))
    named = TierConfig(kind="mooncake", place="")
    assert read_cluster(named, {"MOONCAKE_CONFIG_PATH": str(tmp_path / "m.json")}).masters == ("127.0.0.1:50088",)
    assert read_cluster(named, {"MOONCAKE_MASTER": "c:1"}).masters == ("c:1",)


def test_the_seal_of_a_cluster_is_told_apart_and_its_secret_not_shown(tmp_path: Path) -> None:
    (tmp_path / "m.json").write_text(json.dumps(FILE))
    seen = []
    for name in ("one", "same", "other"):
        key = tmp_path / name
        key.write_text("the secret of the other" if name == "other" else "the secret of both")
        key.chmod(0o600)
        seen.append(read_cluster(tier(tmp_path / "m.json", key), {}).seals)
    assert seen[0] == seen[1] != seen[2]
    assert "secret" not in str(seen)


def test_a_key_that_cannot_be_used_is_said(tmp_path: Path) -> None:
    (tmp_path / "m.json").write_text(json.dumps(FILE))
    (tmp_path / "key").write_text("the secret that all may read")
    (tmp_path / "key").chmod(0o644)
    cluster = read_cluster(tier(tmp_path / "m.json", tmp_path / "key"), {})
    assert "chmod 600" in cluster.seal_problem
    assert cluster.problem == ""


def test_the_seal_of_a_file_for_mooncake_alone_is_not_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m.json").write_text(json.dumps(FILE))
    monkeypatch.delenv("EMS_SEAL_KEY", raising=False)
    cluster = read_cluster(tier(tmp_path / "m.json"), {}, tier_known=False)
    assert (cluster.seals, cluster.seal_unseen) == (None, "no tier of the node is known")
    assert read_cluster(tier(tmp_path / "m.json"), {}).seals == {}

    key = tmp_path / "key"
    key.write_text("the secret of both")
    key.chmod(0o600)
    monkeypatch.setenv("EMS_SEAL_KEY", str(key))
    assert read_cluster(tier(tmp_path / "m.json"), {}, tier_known=False).seals


def test_a_key_of_another_user_is_looked_at_and_one_that_may_not_be_read_is_not_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "m.json").write_text(json.dumps(FILE))
    key = tmp_path / "key"
    key.write_text("the secret of both")
    key.chmod(0o600)
    monkeypatch.setattr("os.geteuid", lambda: 12345)
    assert read_cluster(tier(tmp_path / "m.json", key), {}).seals

    monkeypatch.setattr("ems.pool.tiers.pack_seal._secret", refused)
    cluster = read_cluster(tier(tmp_path / "m.json", key), {})
    assert (cluster.seals, cluster.seal_problem) == (None, "")
    assert "Permission denied" in cluster.seal_unseen

    folder = tmp_path / "tenants"
    folder.mkdir()
    monkeypatch.setattr(Path, "iterdir", refused)
    assert "Permission denied" in read_cluster(tier(tmp_path / "m.json", folder), {}).seal_unseen


def refused(*_: object, **__: object) -> None:
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def test_a_file_for_mooncake_that_is_missing_is_said(tmp_path: Path) -> None:
    assert "cannot be read" in read_cluster(tier(tmp_path / "m.json"), os.environ).problem
