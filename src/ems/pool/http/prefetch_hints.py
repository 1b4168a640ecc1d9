"""Prefetch hints: which nodes get one, and when a node is left alone.

A brain; times are seconds on one monotonic clock.  What always holds: at most :data:`MOST_UNDER_WAY` hints to one node
are under way, the others are dropped and counted; a node that fails is given one hint after 1, 2, 4, ... 60 seconds
until it takes one, and is complained of once.
"""

from __future__ import annotations

import re
from collections import Counter
from enum import StrEnum
from typing import Annotated, Final, NamedTuple, Self

import msgspec

from ems.errors import ConfigError
from ems.http.address import Address
from ems.pool.names import is_tenant

MOST_PROMPT_TOKENS: Final = 1 << 17
"""Tokens of a prompt that a node is told of; what comes behind them the engine asks for."""
LEAST_TOKENS: Final = 256
"""Of a prompt of which nodes are told: what engines store as one chunk, unless they are set otherwise."""
MOST_UNDER_WAY: Final = 8
LONGEST_PAUSE: Final = 60.0

MOST_BYTES: Final = 2 << 20
"""Of a hint, which has room for the longest prompt whatever its ids are."""

_NODE = re.compile(r"http://(?:([^@/]*)@)?([^@/]+:\d+)/?", re.ASCII)


class Prompt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Token ids from a prompt's beginning on, and for which model, as its requests call it."""

    tokens: Annotated[list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]], msgspec.Meta(max_length=MOST_PROMPT_TOKENS)]
    model: Annotated[str, msgspec.Meta(max_length=256)] = ""


class PoolNode(NamedTuple):
    """A node's HTTP server, and the tenant that talks to it; none where the node is open."""

    address: Address
    tenant: str = ""

    @classmethod
    def parse(cls, text: str) -> tuple[Address, Self]:
        """Read ``HOST:PORT=http://HOST:PORT``: an engine's address, and its node's, with ``TENANT@`` before the host.

        :raises ConfigError: anything else.
        """
        engine, _, url = text.partition("=")
        found = _NODE.fullmatch(url.strip())
        if found is None or (found[1] is not None and not is_tenant(found[1])):
            raise ConfigError(
                f"{text!r} is no pool node: expected HOST:PORT=http://HOST:PORT, or http://TENANT@HOST:PORT"
            )
        return Address.parse(engine), cls(Address.parse(found[2]), found[1] or "")


class HintOutcome(StrEnum):
    """What became of a hint."""

    TAKEN = "taken"
    DROPPED = "dropped"
    """Too many were under way, the node is left alone, or it has too much to do."""
    REFUSED = "refused"
    """The node does not want it: it has no tier, or does not know the key."""
    FAILED = "failed"
    """The node does not answer."""


class _State(msgspec.Struct):
    under_way: int = 0
    failures: int = 0
    """In a row."""
    again_at: float = 0.0


class PrefetchHints:
    """All hints of one sender."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._nodes: dict[PoolNode, _State] = {}

    def begin(self, node: PoolNode, now: float) -> bool:
        """Whether ``node`` gets one more hint now; :meth:`ended` follows then."""
        state = self._nodes.setdefault(node, _State())
        if state.under_way >= (1 if state.failures else MOST_UNDER_WAY) or now < state.again_at:
            self.counts[HintOutcome.DROPPED] += 1
            return False
        state.under_way += 1
        return True

    def ended(self, node: PoolNode, outcome: HintOutcome, now: float) -> bool:
        """Note what became of a tell; whether that is to be complained of."""
        state = self._nodes[node]
        state.under_way -= 1
        self.counts[outcome] += 1
        if outcome in (HintOutcome.TAKEN, HintOutcome.DROPPED):
            state.failures, state.again_at = 0, 0.0
            return False
        if now < state.again_at:
            return False  # it began before the node was left alone
        state.failures += 1
        state.again_at = now + min(2.0 ** (state.failures - 1), LONGEST_PAUSE)
        return state.failures == 1
