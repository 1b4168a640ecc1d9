"""Who is let in, and as whom: decides every greeting of a node.

What always holds on a node with tenants: nobody is let in but who proves a tenant's key, and who runs as the node's own
user and asks to administer; an unknown access id, a wrong key, a key that is over and no key at all get the same answer
after the same work.  On an open node everybody who can reach the socket is let in.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from typing import NamedTuple

import msgspec

from ems.errors import Unauthorised
from ems.pool.core.shares import Quota
from ems.pool.protocol import coding, limits, messages
from ems.pool.tenants import scram
from ems.pool.tenants.registry import Registry

ROOT = 0
FREE_FAILURES = 5
"""Failures in a row that cost nothing."""
SECONDS_EACH = 10.0
"""After these, one attempt in so many seconds."""
MAX_PEERS = 1024
"""Peers that are remembered, those that failed last."""


class Peer(NamedTuple):
    """Who is at the other end of a socket, as the kernel says."""

    pid: int
    uid: int


class Principal(msgspec.Struct, frozen=True):
    """Whom a connection belongs to.

    ``tenant`` is empty on an open node and for administrators; ``key`` names the key that was proven.  ``administers``
    says whether what concerns the whole node may be asked, ``stores`` whether pages may be.
    """

    tenant: str = ""
    key: str = ""
    administers: bool = False
    stores: bool = True


class Pending(msgspec.Struct, frozen=True):
    """A greeting that waits for its proof: the question, and what is to be signed."""

    access_id: str
    challenge: messages.Challenge
    transcript: bytes


class FailureLimiter:
    """Failed attempts of each peer, as an allowance that grows back with time.

    Keys cannot be guessed, so this is about work and log lines.  Memory is bounded; who failed too often is refused
    without a look at its proof, and may try again after a while.
    """

    def __init__(self) -> None:
        self._left: OrderedDict[Hashable, tuple[float, float]] = OrderedDict()

    def allows(self, peer: Hashable, now: float) -> bool:
        return self._allowance(peer, now) >= 1

    def failed(self, peer: Hashable, now: float) -> None:
        self._left[peer] = (max(self._allowance(peer, now) - 1, 0.0), now)
        self._left.move_to_end(peer)
        if len(self._left) > MAX_PEERS:
            self._left.popitem(last=False)

    def _allowance(self, peer: Hashable, now: float) -> float:
        left, at = self._left.get(peer, (float(FREE_FAILURES), now))
        return min(left + (now - at) / SECONDS_EACH, float(FREE_FAILURES))


class Gate:
    """The gate of one node, run by user ``uid``.  ``random(n)`` gives ``n`` bytes that nobody can foresee."""

    def __init__(self, registry: Registry | None, uid: int, random: Callable[[int], bytes]) -> None:
        self._registry = registry
        self._uid = uid
        self._random = random
        self._limiter = FailureLimiter()
        self.refused = 0
        """Greetings without a good proof."""

    @property
    def open(self) -> bool:
        return self._registry is None

    @property
    def revision(self) -> int:
        return -1 if self._registry is None else self._registry.revision

    def quotas(self) -> Mapping[str, Quota]:
        return {} if self._registry is None else self._registry.quotas()

    def replace(self, registry: Registry) -> None:
        """Obey ``registry`` from now on; ask :meth:`admits` about who is in already."""
        self._registry = registry

    def greet(self, hello: messages.Hello, body: bytes, peer: Peer, now: float) -> Principal | Pending:
        """What becomes of a greeting that came as ``body``: let in, or asked for a proof.

        Raises Unauthorised: neither.
        """
        own = peer.uid in (self._uid, ROOT)
        registry = self._registry
        if registry is None:
            return Principal(administers=own)
        if own and hello.administers:
            return Principal(administers=True, stores=False)
        if not hello.access_id or len(hello.nonce) != limits.NONCE_BYTES or not self._limiter.allows(peer, now):
            raise self._refusal()
        challenge = messages.Challenge(
            self._random(limits.NONCE_BYTES), registry.salt_for(hello.access_id), registry.iterations, self._uid
        )
        return Pending(hello.access_id, challenge, scram.transcript(body, coding.body(challenge)))

    def prove(self, pending: Pending, proof: bytes, peer: Peer, now: float, wall: float) -> tuple[Principal, bytes]:
        """Who answered a challenge with ``proof``, and the node's own proof.

        Raises Unauthorised: it is not a good one.
        """
        return self._prove(pending.access_id, pending.transcript, proof, peer, now, wall)

    def hashing(self, access_id: str) -> tuple[bytes, int]:
        """The salt and how often the key of ``access_id`` is hashed, whether there is such a tenant or not."""
        registry = self._registry
        return (b"", 0) if registry is None else (registry.salt_for(access_id), registry.iterations)

    def recognise(
        self, access_id: str, message: bytes, proof: bytes, peer: Hashable, now: float, wall: float
    ) -> Principal:
        """Who signed a ``message`` that came without a greeting, from ``peer``.

        Raises Unauthorised: nobody who is known.
        """
        if not self._limiter.allows(peer, now):
            raise self._refusal()
        return self._prove(access_id, message, proof, peer, now, wall)[0]

    def _prove(
        self, access_id: str, message: bytes, proof: bytes, peer: Hashable, now: float, wall: float
    ) -> tuple[Principal, bytes]:
        registry = self._registry
        found = None if registry is None else registry.recognise(access_id, message, proof, wall)
        if found is None:
            self._limiter.failed(peer, now)
            raise self._refusal()
        key, signature = found
        return Principal(access_id, key), signature

    def admits(self, principal: Principal, wall: float) -> bool:
        if self._registry is None or not principal.stores:
            return True
        return self._registry.admits(principal.tenant, principal.key, wall)

    def _refusal(self) -> Unauthorised:
        self.refused += 1
        return refusal()


def refusal() -> Unauthorised:
    """What everybody is told who is not let in, whatever the reason."""
    return Unauthorised(
        "this node serves tenants and does not accept these credentials, give an access id and key that it knows "
        "(access_id and access_key, or ACCELERATE_ID and ACCELERATE_KEY)"
    )
