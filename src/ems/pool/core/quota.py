"""Quotas as people write them, and what they come to in a pool of some size."""

from __future__ import annotations

from fractions import Fraction

import msgspec

from ems.config import parse_size
from ems.errors import ConfigError


class Quota(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bounds of one tenant, as people write them: bytes (``8GB``), a share of the pool (``25%``), or ``0``."""

    minimum: str = "0"
    cap: str = "100%"

    def __post_init__(self) -> None:
        for name, text in (("minimum", self.minimum), ("cap", self.cap)):
            parse_amount(text, 1 << 40, name)

    def within(self, total: int) -> Bounds:
        return Bounds(parse_amount(self.minimum, total, "minimum"), parse_amount(self.cap, total, "cap"))


class Bounds(msgspec.Struct, frozen=True):
    """Guaranteed and largest number of bytes of one tenant."""

    minimum: int
    cap: int


def parse_amount(text: str, total: int, name: str) -> int:
    """Bytes meant by ``text`` in a pool of ``total`` bytes.

    Raises:
        ConfigError: it is neither a size nor a share.
    """
    if text.strip() == "0":
        return 0
    if not text.endswith("%"):
        return parse_size(text, name=name)
    try:
        share = Fraction(text[:-1].strip()) if len(text) <= 16 else Fraction(-1)
    except (ValueError, ZeroDivisionError):
        share = Fraction(-1)
    if not 0 <= share <= 100:
        raise ConfigError(f"{name} is {text!r}, expected a size such as 8GB or a share of the pool from 0% to 100%")
    return int(share * total / 100)
