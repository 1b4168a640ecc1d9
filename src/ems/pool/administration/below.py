"""What an administrator's work needs of the tiers below memory, which have numbers.

The tiers' carrier does all of it; brains do not know that one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from ems.pool.pages import Page
from ems.pool.tiers.answers import ForgetRequest, ForgetResult, Holding, KeyRun


class Errand(Protocol):
    """Something that a tier was asked to do: its outcome, why there is none, or None while it is under way."""

    def outcome(self) -> ForgetResult | str | None: ...


class Tiers(Protocol):
    """The tiers of one node."""

    def holdings(self) -> list[tuple[str, dict[str, Holding]]]: ...

    def holders(self, name: str, key: bytes) -> list[str]: ...

    def page_size(self, name: str) -> int: ...

    def prefetch(self, namespace: int, keys: list[bytes]) -> int: ...

    # To clear what they have

    def left_alone(self, tier: int) -> set[str]: ...

    def hold_back(self, matches: Callable[[str], bool]) -> Callable[[], None]: ...

    def take_back(self, namespace: int, wanted: Callable[[Page], bool]) -> None: ...

    def offer(self, namespace: int, pages: list[Page]) -> None: ...

    def look(self, tier: int) -> Errand: ...

    def forget(self, tier: int, matches: ForgetRequest, *, dry_run: bool) -> Errand: ...

    def settle(self, tier: int) -> None: ...

    # To bring up what they have

    def recent(self, tier: int, name: str) -> Iterator[KeyRun]: ...

    def bring(self, tier: int, namespace: int, run: KeyRun) -> bool: ...

    def comes(self, namespace: int, keys: Sequence[bytes]) -> bool: ...

    def why_not_read(self, tier: int) -> str: ...
