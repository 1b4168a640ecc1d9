"""What a node needs of a tier, whatever keeps its pages: packs in one place, or the memory of other hosts.

A tier that :attr:`~Tier.asks` knows only what it was told: who looks has it asked for what is not known, and what may
turn out to be there counts as coming meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from ems.pool.keys import Tail
from ems.pool.movement.hot_list import HotRun
from ems.pool.segments.segment_file import FileRange
from ems.pool.tiers.answers import ForgetRequest, ForgetResult, Holding, KeyRun, Outcome, StoredTail, Unknown
from ems.pool.tiers.pass_through import Leaving


class KnownPages(Protocol):
    """What is known without waiting."""

    def holds(self, namespace: str, keys: Sequence[bytes]) -> int:
        """How many leading ``keys`` it has, as far as it knows at this moment."""
        ...

    def lacks(self, namespace: str, keys: Sequence[bytes]) -> list[bytes]:
        """Which ``keys`` are worth writing to it."""
        ...

    def tails(self, namespace: str, keys: Sequence[bytes]) -> list[Tail | None]: ...

    def find_tail(self, namespace: str, tail: Tail) -> StoredTail | None: ...

    def namespaces(self) -> dict[str, Holding]: ...

    def left_alone(self) -> set[str]: ...

    def recent(self, namespace: str) -> Iterator[KeyRun]: ...

    def figures(self) -> dict[str, Any]: ...


class Tier(KnownPages, Protocol):
    """A tier.  What it does here may block, and raises :class:`~ems.errors.TierFailed` when it does not work."""

    asks: bool
    """Whether it is an :class:`AskedTier`."""

    @property
    def scanned(self) -> bool: ...

    def write(self, namespace: str, pages: Sequence[Leaving]) -> list[Outcome]: ...

    def read(self, namespace: str, wanted: Sequence[tuple[bytes, FileRange]]) -> tuple[list[Outcome], list[int]]:
        """Fetch pages: outcomes, and the checksums that readers of memory hold the pages against."""
        ...

    def maintain(self) -> None: ...

    def probe(self) -> None: ...

    def forget(self, request: ForgetRequest, *, dry_run: bool = False) -> ForgetResult: ...

    def close(self) -> None: ...


class AskedTier(Tier, Protocol):
    """A tier that does not know by itself what it has, and that hosts lend memory.

    :meth:`ask`, :meth:`ask_tails` and :meth:`share_hot` block; so does :meth:`maintain`, which sees to what is wished
    here.
    """

    lends: int
    """Bytes that this host lends when it takes part."""
    losses: int
    """How often what it lent was lost, with all that others had put there."""
    leaving: bool
    """What the node wishes: it lends nothing any more, so that what it stores goes to other hosts."""

    @property
    def gives(self) -> bool:
        """Whether it lends memory at this moment."""
        ...

    def unknown(self, namespace: str, keys: Sequence[bytes], directories: Sequence[bytes] = ()) -> Unknown:
        """What of ``keys`` is to be asked for now.

        ``directories`` are those of their chunks, and last the one behind all; zeros name none.
        """
        ...

    def unknown_tail(self, namespace: str, tail: Tail) -> tuple[bool, bool]:
        """Whether a tail beside ``tail`` may turn out to be there, and whether it is to be asked for now."""
        ...

    def ask(self, namespace: str, keys: Sequence[bytes], directories: Sequence[bytes] = ()) -> None:
        """Learn which ``keys`` are there, and in which ``directories`` there are no tails."""
        ...

    def ask_tails(self, namespace: str, directory: bytes) -> None: ...

    def share_hot(self, told: Mapping[str, Sequence[HotRun]]) -> dict[str, list[HotRun]]:
        """The lists of hot pages by namespace, after what is ``told`` was put onto them."""
        ...

    def know_tail(self, namespace: str, tail: Tail) -> None:
        """The page of ``tail`` is found by it, too, once it is fetched."""
        ...
