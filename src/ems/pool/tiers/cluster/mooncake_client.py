"""Starts Mooncake's client in an agent.

What always holds: what this host lacks, and an address at which others do not reach it, is said before Mooncake, which
would end the process or be silent, is asked for anything.
"""

from __future__ import annotations

import ipaddress
import socket
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

from ems.errors import ConfigError, EmsError
from ems.pool.tiers.cluster.direct_reads import make_engine
from ems.pool.tiers.cluster.mooncake_config import HARDWARE, PEER_TO_PEER, PROTOCOLS, MooncakeConfig

REACH_SECONDS = 2.0
"""How long a metadata server may take to take a connection."""
_PORTS = {"http": 80, "https": 443, "redis": 6379}
LOCAL_BUFFER = 16 << 20
"""What Mooncake stages lists in that are not read directly; pages go straight."""


def own_address(master: str) -> str:
    """The address of this host that reaches ``master``."""
    host, _, port = master.rpartition("://")[2].split(",")[0].split(";")[0].rpartition(":")
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.connect((host, int(port.partition("/")[0])))
        return str(sock.getsockname()[0])


def check_address(named: str, own: str) -> None:
    """Raises ConfigError: other hosts do not reach this one, whose address is ``own``, at the address ``named``."""
    try:
        address = ipaddress.ip_address("127.0.0.1" if named == "localhost" else named.strip("[]"))
    except ValueError:
        _check_name(named)
        return
    # A master that is reached within this host has no other hosts.
    here = {one.address.partition("%")[0] for of_one in psutil.net_if_addrs().values() for one in of_one}
    if not (ipaddress.ip_address(own).is_loopback if address.is_loopback else str(address).partition("%")[0] in here):
        raise ConfigError(
            f"local_hostname is {named!r}, where other hosts do not reach this one; leave it out, or write this host's "
            "own address"
        )


def check_hardware(config: MooncakeConfig) -> None:
    """Raises ConfigError: this host has not what the protocol needs."""
    fit = [one for one in PROTOCOLS if one not in HARDWARE or any(Path("/").glob(HARDWARE[one].lstrip("/")))]
    if config.protocol not in fit:
        raise ConfigError(
            f"protocol is {config.protocol!r}, and this host has no device for it ({HARDWARE[config.protocol]}); load "
            f"its driver, or write one of {', '.join(fit)} on all hosts of the cluster"
        )


def _check_name(named: str) -> None:
    """Raises ConfigError: this host does not know the name, by which it reaches what it lends itself."""
    try:
        socket.getaddrinfo(named, None)
    except OSError:
        raise ConfigError(
            f"local_hostname is {named!r}, which this host does not know; leave it out, or write its own address"
        ) from None


def check_names(config: MooncakeConfig) -> None:
    """Raises ConfigError: a name means nothing, or nobody answers at the metadata server; Mooncake tells a number."""
    if config.local_hostname:
        _check_name(config.local_hostname.strip("[]"))
    server, parts = config.metadata_server, urlsplit(config.metadata_server)
    try:
        if parts.scheme in _PORTS and parts.hostname:
            socket.create_connection((parts.hostname, parts.port or _PORTS[parts.scheme]), REACH_SECONDS).close()
    except OSError:
        raise ConfigError(
            f"nobody answers at the metadata_server {server}; start it, or write {PEER_TO_PEER}, which needs none"
        ) from None


def start(config: MooncakeConfig, lends: int) -> tuple[Any, Any, str]:
    """Mooncake's client, which ``lends`` bytes or moves pages; its engine if we made it; how the cluster calls it.

    Raises EmsError: why not.
    """
    from mooncake.store import MooncakeDistributedStore

    check_hardware(config)
    check_names(config)
    try:
        hostname = own_address(config.master_server_address)
        if config.local_hostname:
            check_address(config.local_hostname, hostname)
            hostname = config.local_hostname
    except OSError as error:
        raise EmsError(
            f"no way leads to the master {config.master_server_address}: {error.strerror or error}"
        ) from error
    store = MooncakeDistributedStore()
    engine = None if lends else make_engine(config, hostname)
    code = store.setup(
        hostname,
        config.metadata_server,
        lends,
        LOCAL_BUFFER,
        config.protocol,
        config.device_name,
        config.master_server_address,
        engine=engine and engine.get_engine(),
        tenant_id=config.tenant_id,
    )
    if code:
        raise EmsError(f"Mooncake's client does not start ({code})")
    return store, engine, store.get_hostname()
