"""What the router was told to keep and write of requests."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

import msgspec

from ems.errors import ConfigError

MOST_DECISIONS: Final = 100_000


class Format(StrEnum):
    """How lines are written."""

    TEXT = "text"
    JSON = "json"
    OFF = "off"


class ObserveConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is kept and written of requests."""

    access_log: Format = Format.OFF
    access_log_output: str = "stdout"
    """``stdout`` or a file."""
    decisions: int = 1024
    """Requests that can be asked for at ``/debug/requests/ID``."""
    otlp_traces_endpoint: str | None = None
    """Where spans go, by OTLP over HTTP."""

    def __post_init__(self) -> None:
        if not 0 <= self.decisions <= MOST_DECISIONS:
            raise ConfigError(f"--debug-requests {self.decisions} is out of range: expected 0 to {MOST_DECISIONS}")
        if self.access_log is Format.OFF and self.access_log_output != "stdout":
            raise ConfigError(
                "--access-log-output says where lines go, but none are written: give --access-log text or json"
            )
        endpoint = self.otlp_traces_endpoint
        if endpoint is not None and not endpoint.startswith(("http://", "https://")):
            raise ConfigError(f"--otlp-traces-endpoint {endpoint!r} is no URL: expected http://HOST:4318/v1/traces")
