"""What one request does next: a small machine that is told what happened and answers with the next step.

::

    start ─▶ Try prefill ──done─────────────────▶ Try decode ──first byte─▶ (bytes flow) ──▶ end
              │  ▲ │ └─the client's fault─▶ PassOn   │  ▲ │
              └──┘ └─nobody can, or too late──▶──────┘  │ └─nobody can──▶ GiveUp
            elsewhere                                elsewhere

Prefill only accelerates: when it fails, decode goes on without it and computes the prompt itself.  An answer from
prefill that is the client's fault (4xx) ends the request, since decode would say the same.  Two statuses of that range
are about the instance instead, and count like server errors: 408 (it timed out) and 429 (it is overloaded).

Engines that meet by themselves (``together``) are tried in pairs, of one group: either one's failure before the first
byte leads to another pair, and without a prefill nothing is decoded.

What always holds: a request has a hold on at most one instance of each role, and on one alone unless they are tried
together; :meth:`Dispatch.close` releases it whatever happened; there are at most ``1 + max_retries`` attempts in each
role.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from msgspec import Raw

from ems.engines.handoff import names_blocks
from ems.pool.http.prefetch_hints import LEAST_TOKENS
from ems.router.choosing.chooser import Chooser, Score
from ems.router.choosing.kthena import Profile
from ems.router.choosing.prompt import Prompt
from ems.router.fleet import Fleet, Hold, Instance, Role
from ems.router.metrics import Counters, Prefill
from ems.router.request import REQUEST_OVERHEAD, CompletionRequest

DELAY_CAP: Final = 10.0
"""Longest delay before a retry, in seconds."""

_ABOUT_THE_INSTANCE: Final = frozenset((408, 429))
_BUSY: Final = frozenset((429, 502, 503))
"""What an instance, or a proxy before it, answers when it cannot take a request that others may take."""


@dataclass(frozen=True, slots=True)
class Try:
    """Send there after ``delay`` seconds what the instance's role calls for: the prefill request, or the request."""

    instance: Instance
    delay: float
    considered: Sequence[Score] = field(default=(), compare=False)
    """What else might have been chosen; the instance's own score is among them."""
    prefill: Try | None = None
    """The attempt to be made at the same time."""
    ahead: tuple[Instance, ...] = field(default=(), compare=False)
    """Whose hosts' pools should fetch now what they can of the prompt: this instance's, and the next one's."""


@dataclass(frozen=True, slots=True)
class PassOn:
    """Hand the prefill's answer to the client as it is."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """No instance of a role can take the request; one may be back after ``retry_after`` whole seconds."""

    retry_after: int
    role: Role = Role.DECODE


Step = Try | PassOn | GiveUp


class Policy(NamedTuple):
    """What was set for requests of one kind."""

    max_retries: int
    retry_delay: float
    """Seconds before the first retry."""
    prefill_above: int = 0
    """Tokens that must be left to compute for a prefill to be asked."""
    server: str = ""
    """The model server whose instances serve them; empty where there are none."""
    generates: bool = True
    """Whether tokens are generated; what only reads a prompt is done by one instance."""
    profile: Profile | None = None
    """Kthena's plugins that choose; None is the router's own way."""
    together: bool = False
    """Whether prefill and decode have to be asked at once."""
    ahead: bool = False
    """Whether pools are told of prompts that come."""


class Dispatch:
    """The course of one request through the fleet."""

    def __init__(
        self,
        fleet: Fleet,
        chooser: Chooser,
        counters: Counters,
        request: CompletionRequest,
        prompt: Prompt,
        policy: Policy,
    ) -> None:
        self._fleet = fleet
        self._chooser = chooser
        self._counters = counters
        self._request = request
        self._prompt = prompt
        self._policy = policy
        self._group = ""
        """The group of the prefill that was done, whose decodes take its hand-off."""
        self._prefilled = False
        self.params: Raw | None = None
        """What the prefill's answer says of its hand-off."""
        self._holds: dict[Role, Hold] = {}
        self._started = False
        self._tried: dict[Role, list[Instance]] = {Role.PREFILL: [], Role.DECODE: []}
        self._told: frozenset[Instance] = frozenset()
        """Of whose hosts the pools were told of the prompt."""
        self._began = 0.0

    def start(self, now: float) -> Step:
        self._began = now
        if not self._fleet.usable(Role.DECODE, self._policy.server):
            return GiveUp(self._fleet.retry_after(Role.DECODE, now))
        alone = not self._policy.generates or not self._fleet.listed(Role.PREFILL, self._policy.server)
        if alone or self._policy.together:
            return self._decode(now)
        if self._policy.prefill_above:
            best = self._chooser.choose(Role.DECODE, self._usable(Role.DECODE), self._prompt, now)
            if best is not None and best.uncached < self._policy.prefill_above:
                self._counters.prefills[Prefill.SPARED] += 1
                return self._decode(now)
        return self._prefill(now, again=False)

    def recompute(self, request: CompletionRequest, prompt: Prompt, now: float) -> Step:
        """Begin anew for an answer that its decode instance gave up; what was generated is part of the prompt."""
        self.close()
        self._request = request
        self._prompt = prompt
        self._group = ""
        self._prefilled = self._started = False
        self.params = None
        self._tried = {role: [] for role in Role}
        self._told = frozenset()
        return self.start(now)

    def prefill_answered(self, status: int, now: float, params: Raw | None = None) -> Step | None:
        """Return the next step; None while the decode that was asked together with it goes on."""
        instance = self._let_go(Role.PREFILL)
        if 200 <= status < 300:
            self.params = params
            self._fleet.succeeded(instance)
            self._prefilled = True
            self._group = instance.groups.get(self._policy.server, "")
            self._counters.prefills[Prefill.DONE] += 1
            self._counters.prefill_time.observe(now - self._began)
            return None if self._policy.together else self._decode(now)
        if status < 400 or status >= 500 or status in _ABOUT_THE_INSTANCE:
            self._fleet.suspect(instance, now)
            return self._prefill(now, again=False)
        self._fleet.succeeded(instance)
        self._counters.prefills[Prefill.REFUSED] += 1
        return PassOn()

    def prefill_broke(self, now: float) -> Step:
        self._fleet.failed(self._let_go(Role.PREFILL), now)
        return self._prefill(now, again=True)

    def prefill_timed_out(self, now: float) -> Step:
        self._fleet.failed(self._let_go(Role.PREFILL), now)
        self._counters.prefills[Prefill.TIMED_OUT] += 1
        return GiveUp(1, Role.PREFILL) if self._policy.together else self._decode(now)

    def _prefill(self, now: float, *, again: bool) -> Step:
        if self._policy.together:
            return self._decode(now)
        taken = self._take(Role.PREFILL, now, again=again)
        if taken is None:
            self._counters.prefills[Prefill.SKIPPED] += 1
        return taken or self._decode(now)

    def decode_started(self, status: int, now: float) -> None:
        """Note the first byte from the decode instance: from here on there is no other attempt."""
        self._started = True
        hold = self._holds[Role.DECODE]
        instance = hold.instance
        hold.computed()
        self._counters.first_byte.observe(now - self._began)
        if status >= 500:
            self._fleet.suspect(instance, now)
        else:
            self._fleet.succeeded(instance)

    def decode_broke(self, now: float, *, answers: bool = False, worked: bool = False) -> Step:
        """Go on elsewhere; ``answers``: it said that it cannot; ``worked``: it may have begun to compute."""
        instance = self._let_go(Role.DECODE)
        if worked and self.params is not None and names_blocks(self.params):
            self._prefilled = False  # it may have fetched them, and then they are others'
        if answers:
            self._fleet.suspect(instance, now)
        else:
            self._fleet.failed(instance, now)
        return self._decode(now)

    def refuses(self, status: int) -> bool:
        """Whether a decode's answer that begins so is given up, since another instance may do better.

        One that is asked together with a prefill that still runs may have failed by that one.
        """
        tried, policy = self._tried[Role.DECODE], self._policy
        if policy.together:
            return status >= 500 and Role.PREFILL in self._holds
        if status not in _BUSY or len(tried) > policy.max_retries:
            return False
        return any(one not in tried for one in self._fleet.usable(Role.DECODE, policy.server))

    def decode_cut(self, now: float) -> None:
        self._fleet.failed(self._let_go(Role.DECODE), now)

    def _decode(self, now: float) -> Step:
        if self._policy.together:
            return self._pair(now)
        taken = self._take(Role.DECODE, now, again=True)
        return taken or GiveUp(self._fleet.retry_after(Role.DECODE, now))

    def _pair(self, now: float) -> Step:
        self.close()
        prefill = None if self._started else self._take(Role.PREFILL, now, again=True)
        if prefill is None:
            return GiveUp(self._fleet.retry_after(Role.PREFILL, now), Role.PREFILL)
        self._group = prefill.instance.groups.get(self._policy.server, "")
        self._prefilled = True
        decode = self._take(Role.DECODE, now, again=True)
        if decode is None:
            return GiveUp(self._fleet.retry_after(Role.DECODE, now))
        return replace(decode, prefill=prefill)

    @property
    def handoff(self) -> Raw | None:
        """What the decode that was named last needs to take over what a prefill computed, if it can."""
        return self.params if self._prefilled else None

    def close(self) -> None:
        """Release what is still held; harmless at any time, and more than once."""
        for hold in self._holds.values():
            hold.release()
        self._holds.clear()

    def _take(self, role: Role, now: float, *, again: bool) -> Try | None:
        """Hold the instance to be tried next, after a delay; None when there is none, or no attempt left.

        One that was tried before is taken only when ``again`` and nobody else is left.
        """
        assert role not in self._holds
        tried = self._tried[role]
        retries = len(tried)
        if retries > self._policy.max_retries:
            return None
        usable = self._usable(role)
        if tried:
            fresh = [one for one in usable if one not in tried]
            usable = fresh or (usable if again else [])
        score = self._choose(role, usable, now, prefilled=self._prefilled)
        if score is None:
            return None
        instance, considered = score.instance, self._chooser.considered
        ahead = self._ahead(score, now) if self._policy.ahead else ()
        tried.append(instance)
        if role is Role.PREFILL:
            self._holds[role] = self._fleet.hold(instance, score.uncached + REQUEST_OVERHEAD, score.uncached)
        else:
            queued = 0 if self._prefilled else score.uncached
            self._holds[role] = self._fleet.hold(instance, self._request.decode_cost, queued)
        self._chooser.sent(instance, self._prompt, now)
        if not retries:
            return Try(instance, 0.0, considered, ahead=ahead)
        self._counters.retries[role] += 1
        delay = min(self._policy.retry_delay * 2.0 ** (retries - 1), DELAY_CAP)
        return Try(instance, delay, considered, ahead=ahead)

    def _choose(self, role: Role, usable: list[Instance], now: float, *, prefilled: bool) -> Score | None:
        profile = self._policy.profile
        if profile is None:
            return self._chooser.choose(role, usable, self._prompt, now, prefilled=prefilled)
        return self._chooser.choose_by(profile, self._request.model, role, usable, self._prompt, now)

    def _ahead(self, chosen: Score, now: float) -> tuple[Instance, ...]:
        """Say whose pool has something to gain: the chosen instance's, and that of the decode that it would be now."""
        scores = [chosen]
        if chosen.instance.role is Role.PREFILL and not self._policy.together:
            server = self._policy.server
            group = chosen.instance.groups.get(server, "")
            usable = self._fleet.usable(Role.DECODE, server)
            beside = [one for one in usable if not group or one.groups[server] == group]
            decode = self._choose(Role.DECODE, beside, now, prefilled=True)
            scores += [] if decode is None else [decode]
        most = self._prompt.tokens - LEAST_TOKENS
        told = tuple(one.instance for one in scores if one.told <= most and one.instance not in self._told)
        self._told |= {*told}
        return told

    def _usable(self, role: Role) -> list[Instance]:
        """Those of the model server: prefills of groups that can decode, decodes of the group that did the prefill."""
        server = self._policy.server
        usable = self._fleet.usable(role, server)
        if not server:
            return usable
        if role is Role.DECODE:
            beside = [one for one in usable if one.groups[server] == self._group or not self._group]
            self._prefilled = self._prefilled and bool(beside)  # elsewhere the prompt is computed anew
            return beside if beside or self._policy.together else usable
        decoding = {one.groups[server] for one in self._fleet.usable(Role.DECODE, server)}
        return [one for one in usable if one.groups[server] in decoding]

    def _let_go(self, role: Role) -> Instance:
        hold = self._holds.pop(role)
        hold.release()
        return hold.instance
