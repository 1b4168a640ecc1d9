"""An access id and key, as an engine carries them around: never shown, never logged."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

ACCESS_ID = "ACCELERATE_ID"
ACCESS_KEY = "ACCELERATE_KEY"
MOST = 128
"""Characters of an access id that are sent; none of a tenant has more."""
DEFAULT_ID = "default"
"""Who a client is that names a key but no id."""


class Credentials(msgspec.Struct, frozen=True):
    """Who a client is, and what proves it; without a key it can only use an open node."""

    access_id: str = ""
    access_key: str = ""

    def __repr__(self) -> str:
        return f"Credentials(access_id={self.access_id!r}, access_key={'***' if self.access_key else ''!r})"

    @property
    def name(self) -> str:
        """The access id to be sent; empty when there is nothing to prove it with."""
        return (self.access_id or DEFAULT_ID)[:MOST] if self.access_key else ""


def from_environment(environment: Mapping[str, str]) -> Credentials:
    return Credentials(environment.get(ACCESS_ID, ""), environment.get(ACCESS_KEY, ""))
