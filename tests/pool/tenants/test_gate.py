"""Who is let in, in virtual time."""

from __future__ import annotations

import pytest

from ems.errors import ProtocolError, Unauthorised
from ems.pool.protocol import coding, messages
from ems.pool.tenants import registry as tenancy
from ems.pool.tenants import scram
from ems.pool.tenants.gate import FREE_FAILURES, MAX_PEERS, SECONDS_EACH, FailureLimiter, Gate, Peer, Pending, Principal
from ems.pool.tenants.registry import Registry
from ems.pool.tenants.scram import Credentials
from tests.pool.tenants.people import ANN, BOB, registry_of

NODE_USER, OTHER = 1000, 2000
PEER = Peer(pid=7, uid=OTHER)


def gate_of(registry: Registry | None) -> Gate:
    return Gate(registry, NODE_USER, lambda count: b"n" * count)


def hello(who: Credentials, *, administers: bool = False) -> tuple[messages.Hello, bytes]:
    nonce = bytes(16) if who.name else b""
    message = messages.Hello(1, 1, "engine", 1, administers, who.name, nonce)
    return message, coding.body(message)


def enter(gate: Gate, who: Credentials, peer: Peer = PEER, now: float = 0.0, wall: float = 1.0) -> Principal:
    greeting, body = hello(who)
    pending = gate.greet(greeting, body, peer, now)
    assert isinstance(pending, Pending)
    challenge = pending.challenge
    signed = scram.transcript(body, coding.body(challenge))
    made = scram.prove(who.access_key, challenge.salt, challenge.iterations, signed)
    principal, signature = gate.prove(pending, made.proof, peer, now, wall)
    assert signature == made.signature
    return principal


def test_an_open_node_lets_everybody_in() -> None:
    gate = gate_of(None)
    assert gate.greet(*hello(Credentials()), PEER, 0.0) == Principal()
    assert gate.greet(*hello(ANN), Peer(1, NODE_USER), 0.0) == Principal(administers=True)


def test_a_tenant_is_let_in_as_itself() -> None:
    gate = gate_of(registry_of(ANN, BOB))
    assert (enter(gate, ANN).tenant, enter(gate, BOB).tenant) == ("ann", "bob")


def test_whoever_is_not_known_is_told_the_same() -> None:
    gate = gate_of(registry_of(ANN))
    said = set()
    for who in (Credentials("ann", "wrong"), Credentials("nobody", "wrong")):
        with pytest.raises(Unauthorised) as refused:
            enter(gate, who)
        said.add(str(refused.value))
    for who in (Credentials(), Credentials("ann"), Credentials("", "")):
        with pytest.raises(Unauthorised) as refused:
            gate.greet(*hello(who), PEER, 0.0)
        said.add(str(refused.value))
    assert len(said) == 1
    assert gate.refused == 5


def test_a_changed_greeting_spoils_the_proof() -> None:
    gate = gate_of(registry_of(ANN))
    greeting, body = hello(ANN)
    pending = gate.greet(greeting, body.replace(b"engine", b"ENGINE"), PEER, 0.0)
    assert isinstance(pending, Pending)
    signed = scram.transcript(body, coding.body(pending.challenge))
    made = scram.prove(ANN.access_key, pending.challenge.salt, pending.challenge.iterations, signed)
    with pytest.raises(Unauthorised):
        gate.prove(pending, made.proof, PEER, 0.0, 1.0)


@pytest.mark.parametrize("length", [0, 31, 33, 4000])
def test_a_proof_of_another_length_is_none(length: int) -> None:
    with pytest.raises(ProtocolError, match="32"):
        coding.decode_request(coding.body(messages.Prove(bytes(length))))


def test_only_the_nodes_own_user_administers_and_stores_nothing() -> None:
    gate = gate_of(registry_of(ANN))
    asked = hello(Credentials(), administers=True)
    for uid in (NODE_USER, 0):
        assert gate.greet(*asked, Peer(1, uid), 0.0) == Principal(administers=True, stores=False)
    with pytest.raises(Unauthorised):
        gate.greet(*asked, PEER, 0.0)
    with pytest.raises(Unauthorised):
        gate.greet(*hello(Credentials()), Peer(1, NODE_USER), 0.0)


def test_whoever_fails_too_often_is_not_listened_to_for_a_while_and_nobody_else_suffers() -> None:
    gate = gate_of(registry_of(ANN))
    for _ in range(FREE_FAILURES):
        with pytest.raises(Unauthorised):
            enter(gate, Credentials("ann", "wrong"))
    with pytest.raises(Unauthorised):
        gate.greet(*hello(ANN), PEER, SECONDS_EACH - 0.1)
    assert enter(gate, ANN, Peer(8, OTHER)).tenant == "ann"
    assert enter(gate, ANN, now=SECONDS_EACH).tenant == "ann"


def test_the_limiter_remembers_no_more_than_it_may() -> None:
    limiter = FailureLimiter()
    for peer in range(MAX_PEERS * 2):
        limiter.failed(peer, 0.0)
    assert len(limiter._left) == MAX_PEERS


def test_a_revoked_guest_has_to_leave() -> None:
    registry = registry_of(ANN, BOB)
    gate = gate_of(registry)
    ann, bob = enter(gate, ANN), enter(gate, BOB)
    gate.replace(tenancy.revoke_key(registry, "ann", "all"))
    assert not gate.admits(ann, 1.0)
    assert gate.admits(bob, 1.0)
    gate.replace(tenancy.remove_tenant(registry, "bob"))
    assert not gate.admits(bob, 1.0)
