"""Facts about one host and what is asked of it, as plain data: what one host says in JSON another host can read.

A fact is what was seen, never a judgement.  What could not be seen is None or empty, and is never guessed.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Kind = Literal["cpu", "cuda", "ascend"]


class Device(msgspec.Struct, frozen=True):
    """One accelerator; what its kind does not have is empty."""

    number: int
    name: str
    link: str = ""
    """``UP`` or ``DOWN``: the network port of an NPU."""
    health: str = ""
    """What the driver says of an NPU's network: ``Success``, ``Init``, ``Fault``, ``Receive timeout``."""
    address: str = ""
    """Of the NPU itself in the network of NPUs."""
    tls: bool | None = None
    inactive_nvlinks: int = 0


class Shared(msgspec.Struct, frozen=True):
    """The folder of the pool and the memory behind it, in bytes."""

    folder: str
    problem: str = ""
    """Why a node could not use the folder or its socket."""
    total: int = 0
    free: int = 0
    """In the file system of the folder."""
    in_use: int = 0
    """By what an earlier node left in the folder, which the next one goes on with."""


class Memory(msgspec.Struct, frozen=True):
    """Memory of the host, or of the control group that has less, in bytes."""

    total: int
    available: int
    reserved_huge_pages: int
    """Bytes that are set aside for huge pages, free or not."""
    lockable: int | None
    """Bytes that a process may lock in memory; None: as many as it likes."""


class Model(msgspec.Struct, frozen=True):
    """The folder of a model, and what is missing or cut in it."""

    folder: str
    problems: tuple[str, ...] = ()


class Cluster(msgspec.Struct, frozen=True):
    """What a file for Mooncake says."""

    file: str
    problem: str = ""
    protocol: str = ""
    memory: int = 0
    """Bytes that the host gives to the cluster."""
    masters: tuple[str, ...] = ()
    """``HOST:PORT`` of the master, or of each server of etcd that knows it."""
    seals: dict[str, str] | None = None
    """Fingerprints of the secrets that seal pages, by tenant, or of the only one under an empty name; None: unseen."""
    seal_problem: str = ""
    """Why no node can use them."""
    seal_unseen: str = ""
    """Why they could not be looked at."""
    unused: tuple[str, ...] = ()
    """Settings in the file that mean nothing to EMS."""


class Connection(msgspec.Struct, frozen=True):
    """An attempt to reach somebody."""

    to: str
    what: Literal["host", "master", "device"]
    problem: str = ""
    clock_ahead: float | None = None
    """Seconds that the other clock is ahead of this one, where it was told."""


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """All that was seen."""

    host: str
    kind: Kind
    devices: tuple[Device, ...] = ()
    device_problem: str = ""
    """Why nothing is known of accelerators that are there."""
    hccn: dict[int, str] | None = None
    """Addresses of NPUs in ``/etc/hccn.conf``; None: there is no such file."""
    rdma: dict[str, str] = {}
    """State of each RDMA port."""
    pool: int
    """Bytes that the pool is to have."""
    shared: Shared
    memory: Memory
    node_runs: bool = False
    tenants: bool = False
    """Whether the node serves tenants."""
    ports: dict[int, str] = {}
    """Why each port cannot be listened on; empty for one that can."""
    model: Model | None = None
    versions: dict[str, str] = {}
    """Of what is installed here; what is not installed is not in it."""
    clock_synchronised: bool | None = None
    cluster: Cluster | None = None
    connections: tuple[Connection, ...] = ()
