"""What holds for all of a history, and what belongs to whom in it: namespaces, tenants, the bytes of pages."""

from __future__ import annotations

import functools
import hashlib

import msgspec

from ems.config import PolicyName
from ems.pool.names import own_name, qualified
from ems.pool.segments.reader import Verify

SMALL, LARGE = 512, 2048
NAMESPACES = {"small": SMALL, "other": SMALL, "large": LARGE}
"""Namespaces, as their clients call them, and their pages' sizes."""
TENANTS = ("red", "blue", "green")
SEGMENT = 12 << 10
SEGMENTS = 4
SEATS = 3

Known = tuple[str, bytes]
"""Namespace, as the node calls it, and key of a page."""
Slot = tuple[int, int]
SlotLocation = tuple[int, int, int]
"""Segment, slot and generation."""


class Violation(AssertionError):
    """Something happened that must never happen."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the node and its surroundings."""

    verify: Verify = Verify.ALWAYS
    policy: PolicyName = "lru"
    watermark: float = 1.0
    checksums_optional: bool = False
    """Whether there are writers of an earlier release, which give no checksum."""
    tiers: int = 0
    """How many tiers there are below memory."""
    prompt: bool = False
    """Whether threads of tiers do what there is to be done after each step, and not only when a step says so."""
    tenants: bool = False
    """Whether the node serves tenants, who do not trust each other."""


def block_key(path: str) -> bytes:
    """The key of a block; namespaces have the same keys and other bytes."""
    return hashlib.sha256(path.encode()).digest()[:16]


def called(tenant: str, name: str) -> str:
    """What the node calls the namespace that ``tenant`` (empty: an open node's client) calls ``name``."""
    return qualified(tenant, name) if tenant else name


def size_of(name: str) -> int:
    """Bytes of a page of the namespace that the node calls ``name``."""
    return NAMESPACES[own_name(name)]


@functools.lru_cache(8192)
def content(name: str, key: bytes) -> bytes:
    """The bytes of a page of the namespace that the node calls ``name``."""
    return hashlib.sha256(name.encode() + key).digest() * (size_of(name) // 32)
