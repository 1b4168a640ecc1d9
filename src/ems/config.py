"""Settings of the pool: frozen, validated, each with one place where its default lives.

Sizes are written the way people write them already (``1GB``, ``512MiB``, ``1073741824``) and are
always powers of 1024.  A setting that makes no sense is refused here with a sentence, never later.
"""

from __future__ import annotations

import os
import re
from fractions import Fraction
from pathlib import Path

import msgspec

from ems.errors import ConfigError

GIB = 1 << 30
MIB = 1 << 20
DEFAULT_HTTP_PORT = 9410

_UNITS = {"": 1, "k": 1 << 10, "m": MIB, "g": GIB, "t": 1 << 40}
_SIZE = re.compile(r"\s*([0-9]{1,24}(?:\.[0-9]{1,24})?)\s*(?:([kmgt])i?)?b?\s*", re.IGNORECASE)


def parse_size(text: str | int, *, name: str = "size") -> int:
    """Bytes meant by ``text``: a plain number, or a number with a unit of base 1024 (``1GB`` = 2**30).

    Raises:
        ConfigError: ``text`` is not a size, or is not positive.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        value = text
    else:
        match = _SIZE.fullmatch(str(text))
        if match is None:
            raise ConfigError(f"{name} is {text!r}, expected bytes or a number with a unit such as 1GB, 512MB or 64KB")
        value = int(Fraction(match[1]) * _UNITS[(match[2] or "").lower()])
    if value <= 0:
        raise ConfigError(f"{name} is {text!r}, expected a positive number of bytes")
    return value


def format_size(count: float) -> str:
    """``count`` bytes for a person, with one decimal and a binary unit."""
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


def default_socket() -> Path:
    """The control socket of this user's node: ``EMS_SOCKET``, else ``node.sock`` in the node's folder."""
    if given := os.environ.get("EMS_SOCKET"):
        return Path(given)
    return default_directory() / "node.sock"


class NodeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a pool node needs to know to start."""

    directory: Path = msgspec.field(default_factory=default_directory)
    """tmpfs folder of the segments; made with mode 0700."""

    socket: Path = msgspec.field(default_factory=default_socket)
    """Unix socket that engines connect to; mode 0600."""

    size: int = 0
    """Bytes of shared memory for segments; 0 picks :func:`default_pool_size`."""

    segment_size: int = 0
    """Bytes of one segment; 0 picks a sixteenth of the pool between 64 MiB and 1 GiB.  A page must fit in one."""

    high_watermark: float = 0.95
    """Share of the pool in use at which eviction starts."""

    eviction_ratio: float = 0.05
    """Share of the pool that one eviction frees."""

    http_host: str = "127.0.0.1"
    """Address of ``/health``, ``/readyz`` and ``/metrics``."""

    http_port: int | None = DEFAULT_HTTP_PORT
    """Port of the same; 0 picks a free one, ``None`` serves no HTTP."""

    prefault: bool = True
    """Touch the segments in the background, so that no saver pays for the first touch."""

    autostarted: bool = False
    """Whether an engine started this node by itself; told to clients and shown by ``ems status``."""

    def __post_init__(self) -> None:
        if not 0 < self.high_watermark <= 1:
            raise ConfigError(f"high watermark is {self.high_watermark}, expected a share above 0 and at most 1")
        if not 0 < self.eviction_ratio <= 1:
            raise ConfigError(f"eviction ratio is {self.eviction_ratio}, expected a share above 0 and at most 1")
        if self.size < 0 or self.segment_size < 0:
            raise ConfigError("pool and segment sizes cannot be negative, give bytes or a size such as 4GB")
        if self.size and self.segment_size > self.size:
            raise ConfigError(
                f"segment size {format_size(self.segment_size)} is larger than the pool of {format_size(self.size)}, "
                "give a smaller --segment-size or a larger --size"
            )
        if self.http_port is not None and not 0 <= self.http_port < 65536:
            raise ConfigError(f"HTTP port is {self.http_port}, expected 0 to 65535")
        if len(os.fsencode(self.socket)) > 107:
            raise ConfigError(f"socket path {self.socket} is longer than the 107 bytes that Unix sockets allow")


def pick_segment_size(pool: int, page: int = 4096) -> int:
    """About a sixteenth of ``pool``, from 64 MiB to 1 GiB, in whole memory pages; next to nothing is left over."""
    wanted = min(max(pool // 16, 64 * MIB), GIB, pool)
    return pool // max(pool // max(wanted, 1), 1) // page * page


def default_pool_size(free_shared_memory: int, total_memory: int) -> int:
    """4 GiB, or less where that is over half the free shared memory or a quarter of the machine's memory."""
    return max(min(4 * GIB, free_shared_memory // 2, total_memory // 4), 1 * MIB)
