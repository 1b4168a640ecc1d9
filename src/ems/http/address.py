"""Where a server listens; checked once, so that everything behind may trust it."""

from __future__ import annotations

import ipaddress
import re
from typing import NamedTuple, Self

from ems.errors import ConfigError

_NAME = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*(?<!-)\.?")


class Address(NamedTuple):
    """A host (name, IPv4 or bare IPv6) and a TCP port from 1 to 65535."""

    host: str
    port: int

    @classmethod
    def of(cls, host: str, port: int) -> Self:
        """Check the two parts; an IPv6 host may come in brackets.

        :raises ConfigError: not a host, or not a port.
        """
        bracketed = host.startswith("[") and host.endswith("]")
        bare = host[1:-1] if bracketed else host
        if not _is_host(bare) or (bracketed and ":" not in bare):
            raise ConfigError(f"{host!r} is not a host: expected a name or an IP address, without scheme and path")
        if not 1 <= port <= 65535:
            raise ConfigError(f"Port {port} of {host} is out of range: expected 1 to 65535")
        return cls(bare, port)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read ``host:port`` or ``[v6]:port``.

        :raises ConfigError: anything else.
        """
        host, colon, port = text.strip().rpartition(":")
        if not colon or not (port.isascii() and port.isdigit()) or (":" in host and not host.startswith("[")):
            raise ConfigError(f"{text!r} is not an instance: expected HOST:PORT, or [ADDRESS]:PORT for IPv6")
        return cls.of(host, int(port[:9]))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def _is_host(text: str) -> bool:
    if ":" in text:
        try:
            ipaddress.IPv6Address(text)
        except ValueError:
            return False
        return True
    return len(text) <= 253 and _NAME.fullmatch(text) is not None
