"""Which instance of a role takes a request: the one from which its first token is expected first.

The common currency is tokens of prefill.  A prefill instance costs what it still has to compute for others and, several
times, what of this prompt it has not computed before.  A decode instance that computes prompts itself costs the same,
and besides a share of the KV tokens that it holds, which slow each of its steps.  One that gets its KV from a prefill
costs what it holds, and a share of what has to be moved to it.  So a prefix draws requests to the instance that has it,
until waiting there costs more than computing it elsewhere.

Prefixes are known from what was sent where, and from KV events.  Events tell of tokens, so they count for prompts whose
token ids are known.  What a pool has need not be computed either, but it has to be loaded.

A session stays where it was, unless that costs :data:`STICKY_TOKENS` more than the best.

What always holds: an instance that is doubted is chosen only when all others are; among equals the one that has waited
longest is taken, so that serial traffic goes round; what was sent somewhere is known at once, not when it ends.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from math import lcm
from typing import Final, NamedTuple

from ems.router.choosing.kthena import Profile, choose
from ems.router.choosing.prefix_index import PIECE_BYTES, PIECE_TOKENS, Place, PrefixIndex
from ems.router.choosing.prompt import Prompt
from ems.router.choosing.sessions import Sessions
from ems.router.fleet import Instance, Role

HELD_WEIGHT: Final = 0.1
"""Tokens of prefill that one KV token counts that an instance holds while it computes prompts."""

MOVE_WEIGHT: Final = 0.1
"""Tokens of prefill that it counts to move a token's KV to an instance."""

WORK_WEIGHT: Final = 4.0
"""How much a token counts that has to be computed for the request itself: it keeps those waiting that come after it."""

LOAD_WEIGHT: Final = 0.5
"""Tokens of prefill that it counts to load a token's KV from the pool of the host, or of the cluster."""

MOST_PIECE_TOKENS: Final = 1024
"""Pieces of prompts of token ids are no larger."""

STICKY_TOKENS: Final = 8192
"""How much more than the best a session's own instance may cost."""


class Score(NamedTuple):
    """Why an instance was taken, or not."""

    instance: Instance
    uncached: int
    """Tokens of the prompt that it has not computed before, as far as is known."""
    cost: float
    """Expected work before the first token, in tokens of prefill."""
    sticky: bool
    told: int = 0
    """Tokens of the prompt that an instance with events has; 0 where it publishes none."""


class Chooser:
    """Knows what was sent where; times are seconds on one monotonic clock."""

    def __init__(
        self, *, session_lifetime: float = 600.0, index: PrefixIndex | None = None, draw: random.Random | None = None
    ) -> None:
        self._index = index or PrefixIndex()
        self._sessions = {role: Sessions(session_lifetime) for role in Role}
        self._bits: dict[Instance, int] = {}
        self._draw = draw or random.Random()
        self.considered: list[Score] = []
        """What was looked at for the last choice."""
        self._pools: dict[str, int] = {}
        """The bit of each host's pool, by host."""
        self._cluster = 0
        """The bit of the cluster's memory."""
        self._telling: set[Instance] = set()
        """Instances whose events have told of blocks."""
        self.block_tokens = 0
        """Tokens of which pieces of a prompt of token ids have to be; 0 while no event told of blocks."""
        self.adapters: set[str] = set()
        """LoRA adapters that events named."""

    def forget(self, instance: Instance) -> None:
        """An instance is gone, or has lost what it had."""
        self._index.forget(self._bits.pop(instance, 0))
        self._telling.discard(instance)
        host = instance.address.host
        if host in self._pools and all(one.address.host != host for one in self._telling):
            self._index.forget(self._pools.pop(host))

    def take_event(
        self, instances: Sequence[Instance], block_tokens: int, place: Place, hashes: Collection[int], *, stored: bool
    ) -> bool:
        """Take in that instances of one engine have blocks in a place, or have no more.

        Return False when no piece of a prompt ends with these blocks and with those of other engines, so that nothing
        was taken in.
        """
        both = lcm(self.block_tokens or PIECE_TOKENS, block_tokens)
        if both > MOST_PIECE_TOKENS:
            return False
        self.block_tokens = both
        for instance in instances:
            self._telling.add(instance)
            bit = self._bit(instance, place)
            if stored:
                self._index.learn(hashes, bit)
            else:
                self._index.unlearn(hashes, bit)
        return True

    def _bit(self, instance: Instance, place: Place) -> int:
        if place is Place.CLUSTER:
            self._cluster = self._cluster or self._index.add()
            return self._cluster
        if place is Place.HOST:
            bit = self._pools.get(instance.address.host)
            if bit is None:
                bit = self._pools[instance.address.host] = self._index.add()
            return bit
        bit = self._bits.get(instance)
        if bit is None:
            bit = self._bits[instance] = self._index.add()
        return bit

    def would_match(self, usable: Sequence[Instance], tokens: int) -> bool:
        """Whether events may tell apart who has a prompt of so many tokens, once its token ids are known."""
        told = len(usable) > 1 and not self._telling.isdisjoint(usable)
        return told and tokens >= self.block_tokens

    def scores(
        self, role: Role, usable: Sequence[Instance], prompt: Prompt, now: float, *, prefilled: bool = False
    ) -> list[Score]:
        """Return a score of each instance; ``prefilled``: another one computes the prompt."""
        found = self._index.matched(prompt.hashes)
        sticky = self._sessions[role].find(prompt.session, now) if prompt.session else 0
        per_piece = prompt.block_tokens or prompt.tokens * PIECE_BYTES / max(prompt.text_bytes, 1)
        scores = []
        for instance in usable:
            bit = self._bits.get(instance, 0)
            own = int(_count(found, bit) * per_piece)
            near, told = own, 0
            if instance in self._telling:
                told = own
                pools = self._pools.get(instance.address.host, 0) | self._cluster
                near = max(own, int(_count(found, pools) * per_piece))
            uncached = max(prompt.tokens - near, 0)
            loading = LOAD_WEIGHT * (near - own)
            if role is Role.PREFILL:
                cost = instance.queued + WORK_WEIGHT * uncached + loading
            elif prefilled:
                cost = instance.load + MOVE_WEIGHT * uncached
            else:
                cost = instance.queued + WORK_WEIGHT * uncached + loading + HELD_WEIGHT * instance.load
            scores.append(Score(instance, uncached, cost, bool(sticky & bit), told))
        return scores

    def choose(
        self, role: Role, usable: Sequence[Instance], prompt: Prompt, now: float, *, prefilled: bool = False
    ) -> Score | None:
        """Return the instance for a request."""
        scores = self.considered = self.scores(role, usable, prompt, now, prefilled=prefilled)
        best = min(scores, key=_rank, default=None)
        if best is not None:
            for one in scores:
                if one.sticky and not one.instance.breaker.doubted and one.cost <= best.cost + STICKY_TOKENS:
                    return one
        return best

    def choose_by(
        self, profile: Profile, model: str, role: Role, usable: Sequence[Instance], prompt: Prompt, now: float
    ) -> Score | None:
        """Return the instance that Kthena's plugins take, of those that are not doubted if there are any."""
        trusted = [one for one in usable if not one.breaker.doubted]
        scores = self.considered = self.scores(role, trusted or usable, prompt, now)
        measured = [
            one.instance.figures.measured(one.instance.running, 1 - one.uncached / max(prompt.tokens, 1), now)
            for one in scores
        ]
        asked = profile.asked._replace(model=model)
        place = choose(measured, asked, profile.filters, profile.weights, self._draw)
        return None if place is None else scores[place]

    def sent(self, instance: Instance, prompt: Prompt, now: float) -> None:
        """A request goes to an instance, which will have its prefix."""
        bit = self._bit(instance, Place.ENGINE)
        self._index.learn(prompt.hashes, bit)
        if prompt.text_hashes:
            self._index.learn(prompt.text_hashes, bit)
        if prompt.session:
            self._sessions[instance.role].keep(prompt.session, bit, now)


def _count(found: Sequence[tuple[int, int]], bits: int) -> int:
    """How many pieces from the beginning on any of ``bits`` has, at most."""
    return next((count for count, mask in reversed(found) if mask & bits), 0)


def _rank(score: Score) -> tuple[bool, float, int]:
    return score.instance.breaker.doubted, score.cost, score.instance.turn
