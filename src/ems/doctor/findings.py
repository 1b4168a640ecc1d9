"""What facts about a host mean for a deployment: findings, each with what to do about it.

A brain: facts of this host and of others go in; out comes a finding for each thing that is wrong, and one for each
check that found nothing.  An error keeps node, engine or cluster from working as asked; a warning is what works worse,
or could not be looked at.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from ems.config import format_size
from ems.doctor.facts import Cluster, Facts
from ems.pool.tiers.cluster.mooncake_config import MooncakeConfig

Level = Literal["ok", "warning", "error"]
MOST_CLOCK_SECONDS = 2.0
_SET_ADDRESS = "set it with hccn_tool -i N -ip -s address A netmask M"
_REMEDIES = {
    "host": "check that the host is up, its address, and that no firewall drops the port",
    "master": "start mooncake_master there, or etcd where it knows the master, or correct master_server_address in "
    "mooncake.json",
    "device": "check that the devices are in one network, their gateways, and that their TLS switches are alike",
}
_MADE_FOR = {"vllm_ascend": "vllm", "torch_npu": "torch"}
"""Packages that are made for the release of another one with the same first two numbers."""
_EQUAL = ("mooncake", "ems", "vllm", "torch_npu", "vllm_ascend")
"""Of what hosts compare versions; hosts with other releases of Mooncake refuse each other."""


class Finding(msgspec.Struct, frozen=True):
    """What one check found, and what to do unless all is well."""

    level: Level
    about: str
    what: str
    to_do: str = ""


class Host(msgspec.Struct, frozen=True):
    """Facts of this host, those that other hosts said, and which releases of vLLM this EMS serves."""

    here: Facts
    others: Sequence[Facts] = ()
    served: tuple[str, str] = ("", "")
    """The first release that is served, and the first one that is not any more."""


Wrong = Callable[[Level, str, str], None]
"""Takes something that is wrong: how bad it is, what it is, what to do."""


def judge(host: Host) -> list[Finding]:
    findings: list[Finding] = []
    for about, check in _CHECKS:
        wrong: list[Finding] = []
        well = check(host, lambda level, *texts, about=about, to=wrong: to.append(Finding(level, about, *texts)))
        findings += wrong or ([Finding("ok", about, well)] if well else [])
    return findings


# Each check names what is wrong, and returns what to say when that is nothing; "" where there was nothing to look at.


def _devices(host: Host, wrong: Wrong) -> str:
    if host.here.device_problem:
        wrong("error", host.here.device_problem, "install the driver's tools, or mount them into the container")
    names = Counter(device.name for device in host.here.devices)
    return ", ".join(f"{count} x {name}" for name, count in names.items()) or "no accelerator: engines run on the CPU"


def _links(host: Host, wrong: Wrong) -> str:
    facts = host.here
    for device in facts.devices:
        number = device.number
        if facts.kind == "ascend" and device.link != "UP":
            to_do = f"check cable, optical module and switch port (hccn_tool -i {number} -optical -g, -lldp -g)"
            wrong("error" if device.link else "warning", f"link of device {number}: {device.link or 'unknown'}", to_do)
        if facts.kind == "ascend" and device.health in ("", "Init"):
            to_do = f"have it probe an address: hccn_tool -i {number} -netdetect -s address GATEWAY"
            wrong("warning", f"network of device {number}: {device.health or 'unknown'}, expected Success", to_do)
        elif facts.kind == "ascend" and device.health != "Success":
            to_do = "check gateway, VLAN and switch, and that the address to probe answers"
            wrong("error", f"network of device {number}: {device.health}, expected Success", to_do)
        if device.inactive_nvlinks:
            to_do = "look at nvidia-smi nvlink --status and at the log of the fabric manager"
            wrong("error", f"{device.inactive_nvlinks} NVLinks of GPU {number} are inactive", to_do)
    for port, state in facts.rdma.items():
        if state != "ACTIVE":
            wrong(
                "warning", f"RDMA port {port}: {state}, expected ACTIVE", "check cable and switch, or use another port"
            )
    if facts.cluster and facts.cluster.protocol == "rdma" and "ACTIVE" not in facts.rdma.values():
        to_do = "load the driver and mount /dev/infiniband, or set protocol to tcp in mooncake.json"
        wrong("error", "mooncake.json says rdma, and no RDMA port of this host is active", to_do)
    return "all links are up" if facts.devices or facts.rdma else ""


def _addresses(host: Host, wrong: Wrong) -> str:
    facts, configured = host.here, host.here.hccn
    if facts.kind != "ascend":
        return ""
    if configured is None:
        wrong("error", "/etc/hccn.conf is not there", f"{_SET_ADDRESS}; in a container mount the host's, read only")
    everybody = [(one.host, device.number, device.address) for one in (facts, *host.others) for device in one.devices]
    for device in facts.devices:
        number, address = device.number, device.address
        if configured is not None and (not address or address != configured.get(number)):
            what = (
                f"device {number} has {address or 'none'}, and /etc/hccn.conf says {configured.get(number, 'nothing')}"
            )
            wrong("error", what, _SET_ADDRESS)
        owners = [f"{name}/{which}" for name, which, theirs in everybody if theirs and theirs == address]
        if len(owners) > 1 and owners[0] == f"{facts.host}/{number}":
            wrong("error", f"{address} is the address of {', '.join(owners)}", "give each device its own")
    return "each device has the one that /etc/hccn.conf says"


def _tls(host: Host, wrong: Wrong) -> str:
    switches: dict[bool | None, list[str]] = {}
    for facts in (host.here, *host.others):
        for device in facts.devices if facts.kind == "ascend" else ():
            switches.setdefault(device.tls, []).append(f"{facts.host}/{device.number}")
    if unknown := switches.pop(None, []):
        wrong("warning", f"unknown for {', '.join(unknown)}", "look at hccn_tool -i N -tls -g as root")
    if len(switches) > 1:
        to_do = "set all alike on all hosts: hccn_tool -i N -tls -s enable 0 (or 1)"
        wrong("error", f"on for {', '.join(switches[True])}, off for {', '.join(switches[False])}", to_do)
    return f"{'on' if True in switches else 'off'} for all devices" if switches else ""


def _connections(host: Host, wrong: Wrong) -> str:
    for one in host.here.connections:
        if one.problem:
            wrong("error", f"{one.what} {one.to} is not reached: {one.problem}", _REMEDIES[one.what])
    return ", ".join(f"{one.to} is reached" for one in host.here.connections)


def _folder(host: Host, wrong: Wrong) -> str:
    if host.here.shared.problem:
        wrong("error", host.here.shared.problem, "mend that, or name another folder with --dir")
    return f"{host.here.shared.folder} is in memory and can be used"


def _shared_memory(host: Host, wrong: Wrong) -> str:
    shared, pool = host.here.shared, format_size(host.here.pool)
    room = shared.free + shared.in_use
    if shared.problem:
        return ""
    if host.here.pool > room:
        to_do = (
            "make it larger (mount -o remount,size=... /dev/shm; in a container --shm-size, or the host's /dev/shm/ems "
            "as hostPath), or give a smaller --size"
        )
        wrong("error", f"{shared.folder} has room for {format_size(room)}, and the pool is to have {pool}", to_do)
    return f"room for {format_size(room)}, the pool is to have {pool}"


def _wanted_memory(facts: Facts) -> int:
    return facts.pool + (facts.cluster.memory if facts.cluster else 0)


def _memory(host: Host, wrong: Wrong) -> str:
    facts, huge = host.here, host.here.memory.reserved_huge_pages
    # A node that runs has lent its memory to the cluster already.
    wanted = facts.pool if facts.node_runs else _wanted_memory(facts)
    have = facts.memory.available + facts.shared.in_use
    whom = "the pool" if facts.node_runs else "pool and cluster"
    said = f"{format_size(have)} are free, {format_size(wanted)} are wanted for {whom}"
    if wanted > have:
        to_do = "give smaller sizes or free memory" + (", such as huge pages: sysctl vm.nr_hugepages=0" if huge else "")
        set_aside = f", and {format_size(huge)} are set aside for huge pages, which EMS does not use" if huge else ""
        wrong("error", said + set_aside, to_do)
    return said


def _locked_memory(host: Host, wrong: Wrong) -> str:
    facts, lockable = host.here, host.here.memory.lockable
    if lockable is None:
        return "no limit"
    registers = facts.kind == "ascend" or (facts.cluster is not None and facts.cluster.protocol in ("rdma", "ascend"))
    if registers and lockable < _wanted_memory(facts):
        what = f"a process may lock {format_size(lockable)}, and {format_size(_wanted_memory(facts))} are registered"
        to_do = "raise it: ulimit -l unlimited, LimitMEMLOCK=infinity (systemd), --ulimit memlock=-1 (docker)"
        wrong("error", what, to_do)
    return f"at most {format_size(lockable)}, which is enough"


def _ports(host: Host, wrong: Wrong) -> str:
    for port, problem in host.here.ports.items():
        if problem:
            to_do = f"see who has it (ss -ltnp 'sport = :{port}'), or choose another one"
            wrong("error", f"nobody can listen on port {port}: {problem}", to_do)
    return f"free: {', '.join(map(str, host.here.ports))}" if host.here.ports else ""


def _model(host: Host, wrong: Wrong) -> str:
    model = host.here.model
    for problem in model.problems if model else ():
        wrong("error", f"{model.folder if model else ''}: {problem}", "download the model again, or mount its folder")
    return f"{model.folder} is complete" if model else ""


def _versions(host: Host, wrong: Wrong) -> str:
    have, (first, end) = host.here.versions, host.served
    if "vllm" in have and first and not _numbers(first) <= _numbers(have["vllm"]) < _numbers(end):
        what = f"vllm is {have['vllm']}, and this EMS serves {first} and later, before {end}"
        wrong("error", what, "install one of these, or the release of EMS that serves yours")
    for one, base in _MADE_FOR.items():
        if one in have and base in have and _numbers(have[one]) != _numbers(have[base]):
            wrong("error", f"{one} {have[one]} is not made for {base} {have[base]}", f"install the {one} made for it")
    if host.here.kind == "ascend" and "vllm" in have and not _MADE_FOR.keys() <= have.keys():
        wrong("error", "vllm is here without vllm_ascend and torch_npu", "install both, or use an image of vllm-ascend")
    if host.here.cluster and "mooncake" not in have:
        wrong("error", "there is a mooncake.json and no Mooncake", "pip install 'ems-kv[cluster]'")
    for other in host.others:
        for name in _EQUAL:
            mine, theirs = have.get(name), other.versions.get(name)
            if mine and theirs and mine != theirs:
                what = f"{name} is {mine} here and {theirs} on {other.host}"
                wrong("error" if name == "mooncake" else "warning", what, "install the same release on all hosts")
    return ", ".join(f"{name} {version}" for name, version in have.items())


def _clock(host: Host, wrong: Wrong) -> str:
    for one in host.here.connections:
        if abs(one.clock_ahead or 0) > MOST_CLOCK_SECONDS:
            what = f"the clock of {one.to} differs by {one.clock_ahead:+.0f} s"
            wrong("error", what, "let both follow the same time server (chrony, systemd-timesyncd)")
    if not host.here.clock_synchronised:
        to_do = "start chrony or systemd-timesyncd: the ages of pages in tiers are told by the clock"
        wrong("warning", "the kernel does not know of a time server that corrects it", to_do)
    return "it follows a time server"


def _cluster(host: Host, wrong: Wrong) -> str:
    cluster = host.here.cluster
    for other in host.others:
        if (cluster is None) != (other.cluster is None):
            name = "this host" if cluster is None else other.host
            to_do = "run it there with the settings that the node has: --config, or --tier"
            wrong("warning", f"the report of {name} says nothing of a cluster, so none was compared", to_do)
    if cluster is None:
        return ""
    if cluster.problem:
        wrong("error", cluster.problem, "" if "; " in cluster.problem else f"correct {cluster.file}")
        return ""
    _mistyped(cluster, wrong)
    if cluster.protocol == "ascend" and host.here.kind != "ascend":
        wrong("error", "the protocol is ascend, and this host has no NPU", f"say tcp or rdma in {cluster.file}")
    for other in host.others:
        same = (
            other.cluster is None
            or other.cluster.problem
            or (cluster.masters, cluster.protocol) == (other.cluster.masters, other.cluster.protocol)
        )
        if not same:
            what = f"{other.host} has another master or protocol, so the hosts do not share a cluster"
            wrong("error", what, "give all hosts the same master_server_address and protocol")
        elif other.cluster is not None and not other.cluster.problem:
            _seals(cluster, other.cluster, other.host, wrong)
    _seal(host.here, cluster, wrong)
    seal = f", seal {cluster.seals['']}" if cluster.seals and "" in cluster.seals else ""
    return f"protocol {cluster.protocol}, {format_size(cluster.memory)} for the cluster{seal}"


def _mistyped(cluster: Cluster, wrong: Wrong) -> None:
    for name in cluster.unused:
        if near := difflib.get_close_matches(name, MooncakeConfig.__struct_fields__, 1):
            wrong("warning", f"{cluster.file} says {name}, which means nothing", f"did you mean {near[0]}?")


def _seal(here: Facts, cluster: Cluster, wrong: Wrong) -> None:
    if cluster.seal_problem:
        wrong("error", f"its seal cannot be used: {cluster.seal_problem}", "correct seal_key= or EMS_SEAL_KEY")
    elif cluster.seal_unseen:
        to_do = "run this as the user that the node runs as, with --tier and the environment that the node has"
        wrong("warning", f"its seal is not known: {cluster.seal_unseen}", to_do)
    elif cluster.seals == {}:
        to_do = (
            "make one secret for all hosts (openssl rand -base64 32) and name its file with seal_key= or EMS_SEAL_KEY"
        )
        what = "pages have no seal, so what anybody put into the cluster is believed"
        if here.tenants:
            wrong("error", f"{what}, and a node with tenants does not start so", to_do)
        else:
            wrong("warning", what, to_do)


def _seals(mine: Cluster, theirs: Cluster, name: str, wrong: Wrong) -> None:
    """Hosts share pages of a tenant for which both have the same secret; one for all stands in for each."""
    if mine.seals is None:
        return
    if theirs.seals is None:
        wrong(
            "warning",
            f"the seal of {name} was not seen there, so it was not compared",
            f"run this release on {name}, as the user of its node",
        )
        return
    to_do = "copy the same secrets to all hosts"
    if bool(mine.seals) != bool(theirs.seals):
        sealed, other = ("this host", name) if mine.seals else (name, "this host")
        what = f"{sealed} has a seal and {other} has none, so the hosts find nothing of each other"
        wrong("error", what, to_do)
    for tenant in sorted(mine.seals.keys() | theirs.seals.keys()):
        here, there = (seals.get(tenant, seals.get("")) for seals in (mine.seals, theirs.seals))
        if here and there and here != there:
            whose = f"for {tenant} " if tenant else ""
            what = f"the seal {whose}is {here} here and {there} on {name}, so the hosts find nothing of each other"
            wrong("error", what, to_do)


def _numbers(version: str) -> tuple[int, ...]:
    """The first two numbers of a version, by which releases are told apart."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


_CHECKS: tuple[tuple[str, Callable[[Host, Wrong], str]], ...] = (
    ("devices", _devices),
    ("links", _links),
    ("addresses", _addresses),
    ("TLS switches", _tls),
    ("connections", _connections),
    ("folder", _folder),
    ("shared memory", _shared_memory),
    ("memory", _memory),
    ("locked memory", _locked_memory),
    ("ports", _ports),
    ("model", _model),
    ("versions", _versions),
    ("clock", _clock),
    ("mooncake.json", _cluster),
)
