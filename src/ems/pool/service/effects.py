"""What is to be done outside of the brain, as values; a brain yields them, and the node's applier does each in turn.

Work is a generator of effects.  What an effect says that it answers is what its ``yield`` returns.
"""

from __future__ import annotations

from collections.abc import Collection, Generator
from typing import Any, TypeVar

import msgspec

from ems.pool.core.writing import Committed
from ems.pool.layout import PageFlag, PageRef
from ems.pool.pages import Assigned, Page


class Effect(msgspec.Struct, frozen=True):
    """Base of all effects."""


class Pause(Effect, frozen=True):
    """Let others have their turn."""


class ClearHeaders(Effect, frozen=True):
    """The headers of these slots (segment, number) vouch for nothing any more."""

    slots: Collection[tuple[int, int]]


class ReplaceMemory(Effect, frozen=True):
    """Put fresh memory in place of a segment's, before somebody else's pages come into it."""

    segment: int


class NoteTenant(Effect, frozen=True):
    """Write down whose pages ``segment`` is about to hold; answers whether that could be done."""

    segment: int
    namespace: str


class DescribeSegment(Effect, frozen=True):
    """Write the description of a segment that was carved, unless it has no memory."""

    assigned: Assigned


class MarkWriting(Effect, frozen=True):
    """Say in the headers of ``pages`` that they are being written; before their writer learns of them."""

    pages: list[Page]
    page_size: int
    client_id: int


class Publish(Effect, frozen=True):
    """Say in the headers of committed pages that they are whole, and keep the tokens of those that are not full."""

    done: Committed
    checksums: list[int] | None
    flags: PageFlag


class VerifyPage(Effect, frozen=True):
    """Look at the bytes of a page; answers whether they are right.  Others may have their turns meanwhile."""

    ref: PageRef
    key: bytes
    length: int


class QuarantineHeader(Effect, frozen=True):
    """Say in the header of a page with wrong bytes that its slot is not used again."""

    ref: PageRef
    key: bytes


PAUSE = Pause()

_Result = TypeVar("_Result")
Work = Generator[Effect, Any, _Result]
"""What has to be done for a result of that type."""
