"""Settings of the pool: frozen, validated, each with one place where its default lives.

Sizes are written the way people write them already (``1GB``, ``512MiB``, ``1073741824``) and are
always powers of 1024.  A setting that makes no sense is refused here with a sentence, never later.
"""

from __future__ import annotations

import os
import re
from fractions import Fraction
from pathlib import Path
from typing import Literal, get_args

import msgspec

from ems.errors import ConfigError

GIB = 1 << 30
MIB = 1 << 20
DEFAULT_HTTP_PORT = 9410

PolicyName = Literal["forecast", "lru", "s3fifo", "arc"]
"""Eviction policies by the names that users write."""
POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)
DEFAULT_POLICY: PolicyName = "forecast"

_UNITS = {"": 1, "k": 1 << 10, "m": MIB, "g": GIB, "t": 1 << 40}
_SIZE = re.compile(r"\s*(-?[0-9]{1,24}(?:\.[0-9]{1,24})?)\s*(?:([kmgt])i?)?b?\s*", re.IGNORECASE)

_MOST = 1 << 60
_LEAST_WITHOUT_UNIT = 4096
"""A smaller number without a unit is one whose unit was forgotten."""

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_DURATION = re.compile(r"\s*([0-9]{1,12}(?:\.[0-9]{1,12})?)\s*([smhdw])?\s*", re.IGNORECASE)


def parse_size(text: str | int, *, name: str = "size") -> int:
    """Bytes meant by ``text``: a plain number, or a number with a unit of base 1024 (``1GB`` = 2**30)."""
    expected = f"{name} is {text!r}, expected a number above 0 with a unit such as 1GB, 512MB or 64KB"
    if isinstance(text, int) and not isinstance(text, bool):
        value = text
    else:
        match = _SIZE.fullmatch(str(text))
        if match is None:
            raise ConfigError(expected)
        value = int(Fraction(match[1]) * _UNITS[(match[2] or "").lower()])
        if 0 < value < _LEAST_WITHOUT_UNIT and str(text).strip().isdigit():
            raise ConfigError(f"{name} is {text!r}, which means bytes, expected a unit such as {text}GB or {text}MB")
    if value <= 0:
        raise ConfigError(expected)
    if value > _MOST:
        raise ConfigError(f"{name} is {text!r}, expected what a machine can have, at most {format_size(_MOST)}")
    return value


def format_size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def default_directory() -> Path:
    """The folder of this user's node: ``EMS_DIR``, else ``/dev/shm/ems`` (root) or ``/dev/shm/ems-<uid>``."""
    if given := os.environ.get("EMS_DIR"):
        return Path(given)
    uid = os.getuid()
    return Path("/dev/shm/ems" if uid == 0 else f"/dev/shm/ems-{uid}")  # noqa: S108 - the pool lives in shared memory


def switched_on(variable: str, *, default: bool) -> bool:
    """What a variable of the environment says that is true or false; one that is set to nothing is not set."""
    text = os.environ.get(variable, "").strip().lower()
    if text not in ("", "1", "true", "yes", "on", "0", "false", "no", "off"):
        raise ConfigError(f"{variable} is {text!r}, expected 1 or 0")
    return text in ("1", "true", "yes", "on") if text else default


def allows_disk() -> bool:
    """What ``EMS_ALLOW_DISK`` says: whether the node's folder may be on a disk."""
    return switched_on("EMS_ALLOW_DISK", default=False)


def default_socket() -> Path:
    """The control socket of this user's node: ``EMS_SOCKET``, else ``node.sock`` in the node's folder."""
    if given := os.environ.get("EMS_SOCKET"):
        return Path(given)
    return default_directory() / "node.sock"


def default_tenants() -> Path:
    """The file of tenants that the ``ems tenant`` and ``ems key`` verbs change: ``EMS_TENANTS``, else this user's."""
    if given := os.environ.get("EMS_TENANTS"):
        return Path(given)
    if os.geteuid() == 0:
        return Path("/etc/ems/tenants.json")
    home = os.environ.get("XDG_CONFIG_HOME")
    return (Path(home) if home else Path.home() / ".config") / "ems" / "tenants.json"


def parse_duration(text: str, *, name: str = "duration") -> float:
    """Seconds meant by ``text``: a number with a unit (``90s``, ``15m``, ``12h``, ``7d``), or plain seconds."""
    match = _DURATION.fullmatch(text)
    if match is None:
        raise ConfigError(f"{name} is {text!r}, expected seconds or a number with a unit such as 15m, 12h or 7d")
    return float(match[1]) * _SECONDS[(match[2] or "s").lower()]


class NodeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a pool node needs to know to start."""

    directory: Path = msgspec.field(default_factory=default_directory)
    """Folder of the segments, in memory and the node's alone; made with mode 0700 if it is not there."""
    allow_disk: bool = msgspec.field(default_factory=allows_disk)
    """Whether it may be in a file system that does not live in memory; ``EMS_ALLOW_DISK``."""
    socket: Path = msgspec.field(default_factory=default_socket)
    """Unix socket that engines connect to."""
    socket_mode: int = 0o600
    """Who may connect to it, as the mode of a file; on a node without tenants its user only."""
    tenants: Path | None = None
    """File of tenants and their keys; None for an open node, which anybody who reaches its socket may use."""
    size: int = 0
    """Bytes of shared memory for segments; 0 keeps what an earlier node left, else picks :func:`default_pool_size`."""
    segment_size: int = 0
    """Bytes of one segment; 0 picks a sixteenth of the pool between 64 MiB and 1 GiB.  A page must fit in one."""
    high_watermark: float = 0.95
    """Share of the pool in use at which eviction starts."""
    eviction_ratio: float = 0.05
    """Share of the pool that one eviction frees."""
    policy: PolicyName = DEFAULT_POLICY
    """Which page leaves first when room is needed."""
    http_host: str = "127.0.0.1"
    """Address of ``/health``, ``/readyz`` and ``/metrics``."""
    http_port: int | None = DEFAULT_HTTP_PORT
    """Port of the same; 0 picks a free one, ``None`` serves no HTTP."""
    verify: str = "sampled"
    """Which loaded pages engines check against their checksums: ``always`` all, ``sampled`` some, ``never`` only those
    from before a restart or from a slower tier, which the others check as well."""
    fresh: bool = False
    """Whether to drop the pages that an earlier node left in the folder."""
    http_token_file: Path | None = None
    """File with the token that lets a person see the figures of a node with tenants; None lets nobody."""
    prefault: bool = True
    """Touch the segments in the background, so that no saver pays for the first touch."""
    tiers: tuple[str, ...] = ()
    """Where pages live below memory, the fastest first, as :func:`ems.pool.tiers.settings.parse_tier` reads them."""
    autostarted: bool = False
    """Whether an engine started this node by itself; told to clients and shown by ``ems status``."""

    def __post_init__(self) -> None:
        if not 0 < self.high_watermark <= 1:
            raise ConfigError(f"high watermark is {self.high_watermark}, expected a share above 0 and at most 1")
        if not 0 < self.eviction_ratio <= 1:
            raise ConfigError(f"eviction ratio is {self.eviction_ratio}, expected a share above 0 and at most 1")
        if self.policy not in POLICIES:
            raise ConfigError(f"eviction policy is {self.policy!r}, expected one of {', '.join(POLICIES)}")
        if self.size < 0 or self.segment_size < 0:
            raise ConfigError("pool and segment sizes cannot be negative, give bytes or a size such as 4GB")
        if self.size and self.segment_size > self.size:
            raise ConfigError(
                f"segment size {format_size(self.segment_size)} is larger than the pool of {format_size(self.size)}, "
                "give a smaller --segment-size or a larger --size"
            )
        if self.verify not in ("always", "sampled", "never"):
            raise ConfigError(f"verify is {self.verify!r}, expected always, sampled or never")
        self._check_socket_mode()
        if self.http_port is not None and not 0 <= self.http_port < 65536:
            raise ConfigError(f"HTTP port is {self.http_port}, expected 0 to 65535")
        if len(os.fsencode(self.socket)) > 107:
            raise ConfigError(f"socket path {self.socket} is longer than the 107 bytes that Unix sockets allow")

    def _check_socket_mode(self) -> None:
        if not 0 <= self.socket_mode <= 0o777:
            raise ConfigError(f"socket mode is {self.socket_mode:o}, expected an octal mode such as 600 or 666")
        if self.tenants is None and self.socket_mode & 0o077:
            raise ConfigError(
                f"socket mode {self.socket_mode:o} opens the node to other users, but it knows no tenants, so they "
                "could read and change each other's pages; give --tenants too, or leave --socket-mode out"
            )


def pick_segment_size(pool: int, page: int = 4096) -> int:
    """About a sixteenth of ``pool``, from 64 MiB to 1 GiB, in whole memory pages; next to nothing is left over."""
    wanted = min(max(pool // 16, 64 * MIB), GIB, pool)
    return pool // max(pool // max(wanted, 1), 1) // page * page


def default_pool_size(free_shared_memory: int, total_memory: int) -> int:
    """4 GiB, or less where that is over half the free shared memory or a quarter of the machine's memory."""
    return max(min(4 * GIB, free_shared_memory // 2, total_memory // 4), 1 * MIB)
