"""The epoch of one engine's keys: what its weights are called, so that engines share pages of equal weights only.

An engine starts in the epoch of its weight files, or of the weights version that it was configured with.  A reset
says that the weights may be others from now on, but not which: until it is told it draws an epoch that nobody else
has.  What always holds: an engine enters the epoch of a version only when it holds no KV that was computed before the
version was declared.
"""

from __future__ import annotations

from collections.abc import Callable


class KeyEpoch:
    """The epoch of one engine, whose model and tenant ``identity`` names.  ``draw`` makes a name nobody else has."""

    def __init__(self, identity: str, version: str, draw: Callable[[], str]) -> None:
        self._identity = identity
        self._draw = draw
        self.version = version
        """What the user calls the weights; empty for those of the files, and for unnamed ones after a reset."""
        self.empty = True
        """Whether the engine holds no KV: its own cache is empty and nothing was computed or loaded since."""
        self.chain_name = self._named(version) if version else identity
        """Where chains of keys begin."""

    def _named(self, version: str) -> str:
        return f"{self._identity}/weights/{version}"

    def reset(self) -> None:
        self.version = ""
        self.chain_name = f"{self._identity}/private/{self._draw()}"

    def declare(self, version: str) -> bool:
        """The user calls the weights ``version``.  False if the engine still holds KV of other weights."""
        if version == self.version:
            return True
        self.reset()
        if self.empty:
            self.version = version
            self.chain_name = self._named(version)
        return self.empty
