"""What ``mooncake.json`` and Mooncake's environment variables say, as they stand.

A brain.  Keys that mean nothing here are accepted, because these files come from elsewhere, and named once; a value
that makes no sense is refused with one sentence.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from ems.config import GIB, parse_size
from ems.errors import ConfigError

PEER_TO_PEER = "P2PHANDSHAKE"
"""The metadata server of clusters that have none."""
HARDWARE = {"rdma": "/sys/class/infiniband/*", "ascend": "/dev/davinci[0-9]*"}
"""What a host has, as a pattern of paths, that can speak a protocol which needs more than a network."""
PROTOCOLS = ("tcp", *HARDWARE)
_VARIABLES = {
    "local_hostname": "MOONCAKE_LOCAL_HOSTNAME",
    "metadata_server": "MOONCAKE_TE_META_DATA_SERVER",
    "master_server_address": "MOONCAKE_MASTER",
    "protocol": "MOONCAKE_PROTOCOL",
    "device_name": "MOONCAKE_DEVICE",
    "global_segment_size": "MOONCAKE_GLOBAL_SEGMENT_SIZE",
    "local_buffer_size": "MOONCAKE_LOCAL_BUFFER_SIZE",
    "tenant_id": "MOONCAKE_TENANT_ID",
}
_SIZES = ("global_segment_size", "local_buffer_size")
LEAST_LENT = 16 << 20
"""Mooncake's client does not start with less to lend."""
_PORT = "([1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])"
_WITH_PORT = re.compile(r"([^:]+|\[[^]]+\]):[0-9]{1,5}")
_FORMS = {
    "metadata_server": (
        rf"{PEER_TO_PEER}|\S+://\S+|\S+:{_PORT}",
        f"{PEER_TO_PEER} or an address such as http://host:8080",
    ),
    "master_server_address": (
        rf"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):{_PORT}|(etcd|redis)://\S+:{_PORT}(/[0-9]*)?",
        "host:port or etcd://host:port",
    ),
}
"""What texts look like, and how that is said."""


class MooncakeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How this host takes part in a Mooncake cluster."""

    master_server_address: str
    """``host:port``, or ``etcd://host:port`` where a standby takes over from a master that is lost."""
    local_hostname: str = ""
    """Address by which other hosts reach this one, without a port; empty: the one that reaches the master."""
    metadata_server: str = PEER_TO_PEER
    global_segment_size: int = 3355443200
    """Bytes of memory that this host gives to the cluster, beside the node's pool; 0: none."""
    local_buffer_size: int = GIB
    protocol: str = "tcp"
    device_name: str = ""
    """Names of RDMA devices, empty for all."""
    tenant_id: str = "default"
    """Mooncake's own tenant, under which all of EMS is one."""


def parse_mooncake(text: str | None, variables: Mapping[str, str], origin: str) -> tuple[MooncakeConfig, list[str]]:
    """What ``text``, the file called ``origin``, says, or what ``variables`` say where there is none; and keys unused.

    Raises ConfigError: it makes no sense, with the reason.
    """
    given: dict[str, Any] = {name: variables[one] for name, one in _VARIABLES.items() if variables.get(one)}
    known, unused = (given, list[str]()) if text is None else _from_file(text, origin)
    if not known.get("master_server_address"):
        near = "".join(f" (but {one})" for one in difflib.get_close_matches("master_server_address", unused, 1))
        where = "MOONCAKE_MASTER or a file that MOONCAKE_CONFIG_PATH names" if text is None else "master_server_address"
        raise ConfigError(f"{origin} names no master{near}, expected an address such as 10.0.0.1:50088 in {where}")
    of = {name: f"{origin} ({_VARIABLES[name]})" if text is None else origin for name in known}
    fields: dict[str, Any] = {name: _value(name, value, of[name]) for name, value in known.items()}
    return MooncakeConfig(**fields), unused


def _from_file(text: str, origin: str) -> tuple[dict[str, Any], list[str]]:
    try:
        said = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{origin} is no JSON: {error}; write one object with Mooncake's settings") from error
    if not isinstance(said, dict):
        raise ConfigError(f"{origin} is no JSON object, expected one with Mooncake's settings")
    known = {name: said[name] for name in _VARIABLES if said.get(name) is not None}
    return known, sorted(set(said) - set(_VARIABLES))


def _size(name: str, value: Any, origin: str) -> int:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ConfigError(f"{name} in {origin} is {value!r}, expected bytes or a size such as 1GB or 1048576KB")
    # A host that gives no memory to the cluster still uses it.
    none = re.fullmatch(r"0+\s*([KMGT]i?)?B?", str(value).strip(), re.IGNORECASE)
    size = 0 if none else parse_size(value, name=f"{name} in {origin}")
    if name == "global_segment_size" and 0 < size < LEAST_LENT:
        raise ConfigError(f"{name} in {origin} is {value!r}, expected 16MB or more, or 0 to lend nothing")
    return size


def _value(name: str, value: Any, origin: str) -> object:
    if name in _SIZES:
        return _size(name, value, origin)
    if not isinstance(value, str):
        raise ConfigError(f"{name} in {origin} is {value!r}, expected a text")
    value = value.strip()
    if name == "protocol":
        value = value.lower()
        if value not in PROTOCOLS:
            raise ConfigError(f"protocol in {origin} is {value!r}, expected one of {', '.join(PROTOCOLS)}")
    if name in _FORMS and not re.fullmatch(_FORMS[name][0], value):
        raise ConfigError(f"{name} in {origin} is {value!r}, expected {_FORMS[name][1]}")
    if name == "local_hostname" and (found := _WITH_PORT.fullmatch(value)):
        return found[1]  # a host has several clients of Mooncake, each with a port of its own
    return value
