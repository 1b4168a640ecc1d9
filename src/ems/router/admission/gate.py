"""What a request passes before it is sent anywhere: who sends it, may they, are tokens left, is a place free.

What always holds: a request that was let in has a :class:`Ticket` and nothing else to give back; one that was refused,
or whose client left while it waited, has given back all; nobody waits past their deadline.  A request that finds a free
place passes without waiting for the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import NamedTuple

from ems.http import headers
from ems.http.bearer import KeyUnknown, TokenRefused, Tokens
from ems.http.message import Refusal
from ems.router.admission.keys import ANYBODY, Keys, Principal
from ems.router.admission.limits import Exceeded, Kind, Limited, Limits, Taken
from ems.router.admission.queue import Place, Queue, State
from ems.router.admission.settings import AdmissionConfig
from ems.router.admission.shared_limits import RedisLimits

OUTPUT_WEIGHT = 2
"""What a token of an answer counts for in the queue, beside 1 for one of a prompt: Kthena's weights."""

CREDENTIALS = (b"authorization", b"x-api-key", b"api-key")


class Asked(NamedTuple):
    """What a request asks for."""

    model: str = ""
    input_tokens: int = 0
    output_tokens: int = 0
    """Expected ones."""
    priority: int = 0
    session: str = ""
    limited: tuple[Limited, ...] = ()
    """Limits of its route."""


@dataclass(slots=True, eq=False)
class Ticket:
    """A request that was let in; exactly one of :meth:`done` and :meth:`failed` counts, the first one."""

    _gate: Gate | None
    _place: Place | None
    _taken: Taken | None
    input_tokens: int
    queued: float = 0.0
    """Seconds in the queue."""

    def done(self, output_tokens: int) -> None:
        """The request was answered with so many tokens."""
        self._end(output_tokens)

    def failed(self) -> None:
        """The request was not answered, or its client left before: it costs nothing."""
        self._end(None)

    def _end(self, output_tokens: int | None) -> None:
        gate, self._gate = self._gate, None
        if gate is not None:
            gate.end(self._place, self._taken, self.input_tokens, output_tokens)


class Gate:
    """One gate for a router."""

    def __init__(
        self,
        config: AdmissionConfig,
        *,
        keys: Keys | None = None,
        tokens: Tokens[Principal] | None = None,
        renew_keys: Callable[[], Awaitable[bool]] | None = None,
        shared: RedisLimits | None = None,
    ) -> None:
        self.config = config
        self.keys = keys
        self.tokens = tokens
        self.limits = Limits()
        self.queue = Queue(
            capacity=config.max_running,
            size=config.queue_size,
            half_life=config.fair_half_life,
            boost_seconds=config.session_boost,
        )
        self._renew_keys = renew_keys
        """Asks the issuer for its keys again; how long that takes and how often it is done is bounded."""
        self._shared = shared
        self._waiting: dict[Place, asyncio.Future[None]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._always: tuple[Limited, ...] = () if config.limit is None else (("router", config.limit),)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def refuse_early(self, fields: headers.RawHeaders) -> None:
        """Refuse, before its body is there, a request without a credential that could open anything.

        :raises Refusal: 401.
        """
        if self.keys is not None or self.tokens is not None:
            self._key_or_token(fields)

    async def identify(self, fields: headers.RawHeaders) -> Principal:
        """Who sends a request.

        :raises Refusal: 401.
        """
        if self.keys is None and self.tokens is None:
            return ANYBODY
        found = self._key_or_token(fields)
        if isinstance(found, Principal):
            return found
        assert self.tokens is not None
        try:
            try:
                return self.tokens.recognise(found, time.time())
            except KeyUnknown:
                if self._renew_keys is None or not await self._renew_keys():
                    raise
                return self.tokens.recognise(found, time.time())
        except TokenRefused as error:
            raise _unauthorised(f"The token opens nothing here: {error}", "invalid_token") from None

    def _key_or_token(self, fields: headers.RawHeaders) -> Principal | bytes:
        """Who has the API key of a request, or else what may be a token.

        :raises Refusal: 401.
        """
        credential = _credential(fields)
        if credential is None:
            raise _unauthorised("Send an API key or a token as 'Authorization: Bearer ...'", "missing_credentials")
        principal = None if self.keys is None else self.keys.recognise(credential, time.time())
        if principal is None and (self.tokens is None or credential.count(b".") != 2):
            raise _unauthorised("The API key is not known, or has expired", "invalid_api_key")
        return principal or credential

    async def administrator(self, fields: headers.RawHeaders, peer: str) -> None:
        """Let pass who may change and explain the router: by an administering key, or, without keys, from this host.

        :raises Refusal: 401, 403.
        """
        principal = await self.identify(fields)
        if self.keys is not None or self.tokens is not None:
            if not principal.administers:
                raise Refusal(403, "This takes a key with 'administers': true", code="not_an_administrator")
        elif not is_loopback(peer):
            message = "This page is for this host only: set API keys to open it for others"
            raise Refusal(403, message, code="not_an_administrator")

    async def enter(self, principal: Principal, asked: Asked) -> Ticket:
        """Let a request in, after a while if need be.

        :raises Refusal: 403, 429, 503.
        """
        if not principal.may_use(asked.model):
            message = f"The model {asked.model[:200]!r} is not for this key"
            raise Refusal(403, message, code="model_not_allowed", param="model")
        limited = self._always + asked.limited
        if principal.limit is not None:
            limited += ((principal.scope, principal.limit),)
        if not limited and not self.queue.capacity:
            return Ticket(self, None, None, asked.input_tokens)
        now, taken = asyncio.get_running_loop().time(), None
        if limited and self._shared is not None:
            taken = _let_through(await self._shared.take(limited, asked.input_tokens), asked.input_tokens)
            now = asyncio.get_running_loop().time()
        elif limited:
            taken = _let_through(self.limits.take(limited, asked.input_tokens, now), asked.input_tokens)
        if not self.queue.capacity:
            return Ticket(self, None, taken, asked.input_tokens)
        place = Place(
            user=principal.user,
            tokens=asked.input_tokens + OUTPUT_WEIGHT * asked.output_tokens,
            deadline=now + self.config.queue_timeout,
            priority=max(principal.priority, asked.priority),
            session=asked.session,
        )
        try:
            for victim in self.queue.offer(place, now):
                self._turn_away(victim, _crowded(victim, self.queue))
            ticket = Ticket(self, place, taken, asked.input_tokens)
            if place.state is not State.RUNNING:
                await self._wait(place)
                ticket.queued = asyncio.get_running_loop().time() - now
        except BaseException:
            self.end(place, taken)
            raise
        return ticket

    def end(
        self, place: Place | None, taken: Taken | None, input_tokens: int = 0, output_tokens: int | None = None
    ) -> None:
        """Give back what a request had; it costs nothing without ``output_tokens``, those of an answer."""
        if taken is None and place is None:
            return
        now = asyncio.get_running_loop().time()
        if taken is not None:
            if output_tokens is None:
                taken.give_back(now)
            else:
                taken.settle(output_tokens, now)
        if place is not None:
            used = None if output_tokens is None else input_tokens + OUTPUT_WEIGHT * output_tokens
            self._let_run(self.queue.leave(place, now, used))

    async def _wait(self, place: Place) -> None:
        if place.state is State.GONE:
            raise _crowded(place, self.queue)
        future = asyncio.get_running_loop().create_future()
        self._waiting[place] = future
        self._set_timer()
        try:
            await future
        finally:
            del self._waiting[place]

    def _let_run(self, granted: list[Place]) -> None:
        for place in granted:
            future = self._waiting[place]
            if not future.done():  # else its client is leaving, which gives the place back
                future.set_result(None)

    def _turn_away(self, place: Place, refusal: Refusal) -> None:
        future = self._waiting[place]
        if not future.done():
            future.set_exception(refusal)

    def _set_timer(self) -> None:
        if self._timer is None and (deadline := self.queue.next_deadline()) is not None:
            self._timer = asyncio.get_running_loop().call_at(deadline, self._expire)

    def _expire(self) -> None:
        self._timer = None
        for place in self.queue.expire(asyncio.get_running_loop().time()):
            self._turn_away(place, _overloaded("The request waited for its turn for too long; try again later"))
        self._set_timer()


def _credential(fields: headers.RawHeaders) -> bytes | None:
    found = None
    for name, value in fields:
        if name in CREDENTIALS:
            if name == b"authorization":
                scheme, _, rest = value.partition(b" ")
                if scheme.lower() == b"bearer":
                    return rest.strip()
            else:
                found = value
    return found


def _let_through(taken: Taken | Exceeded, input_tokens: int) -> Taken:
    if isinstance(taken, Taken):
        return taken
    which = "input" if taken.kind is Kind.INPUT else "output"
    later, said = {"retry-after": str(taken.retry_after)}, f"{which} token rate limit exceeded"
    if taken.retry_after is None:
        later = {"x-should-retry": "false"}  # as OpenAI's client libraries understand it
        said += f": about {input_tokens} tokens never fit into the limit of {taken.most}; send a shorter prompt"
    raise Refusal(429, said, code="rate_limit_exceeded", headers=later, kind=f"{which}_rate_limit")


def is_loopback(peer: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(peer).is_loopback
    return False


def _unauthorised(message: str, code: str) -> Refusal:
    return Refusal(401, message, code=code, headers={"www-authenticate": "Bearer"})


def _overloaded(message: str) -> Refusal:
    return Refusal(503, message, code="overloaded", headers={"retry-after": "1"})


def _crowded(place: Place, queue: Queue) -> Refusal:
    """429 for a user who waits with more than others, 503 when the router as a whole has too much."""
    if place.user and queue.waiting_of(place.user):
        message = "Too many of your requests wait; try again later"
        return Refusal(429, message, code="too_many_waiting", headers={"retry-after": "1"})
    return _overloaded("Too many requests wait; try again later")
