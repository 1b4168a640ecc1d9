"""Requests over HTTP that a tenant signs."""

from __future__ import annotations

import pytest

from ems.errors import Unauthorised
from ems.pool.tenants import scram
from ems.pool.tenants.gate import FREE_FAILURES, SECONDS_EACH, Gate
from ems.pool.tenants.scram import Credentials
from ems.pool.tenants.signed_requests import SCHEME, Challenge, Signed, sign
from tests.pool.tenants.people import ANN, BOB, registry_of

NONCE = b"n" * 16


def signed(gate: Gate, who: Credentials, body: bytes = b"{}", nonce: bytes = NONCE) -> Signed:
    return sign(who.access_id, scram.salted(who.access_key, *gate.hashing(who.access_id)), nonce, body)


def let_in(gate: Gate, one: Signed, peer: str = "10.0.0.1", now: float = 0.0) -> str:
    return gate.recognise(one.access_id, one.message, one.proof, peer, now, 1.0).tenant


def gate_of(*who: Credentials) -> Gate:
    return Gate(registry_of(*who), 1000, lambda count: b"n" * count)


def test_who_signs_is_known() -> None:
    gate = gate_of(ANN, BOB)
    assert let_in(gate, signed(gate, ANN)) == "ann"
    assert let_in(gate, signed(gate, BOB)) == "bob"


def test_nobody_else_is() -> None:
    gate = gate_of(ANN, BOB)
    good = signed(gate, ANN)
    for one in (
        good._replace(access_id="bob"),
        good._replace(digest=bytes(32)),
        good._replace(nonce=b"m" * 16),
        good._replace(proof=bytes(32)),
        signed(gate, Credentials("ann", "wrong")),
        signed(gate, Credentials("nobody", "wrong")),
    ):
        with pytest.raises(Unauthorised, match="does not accept"):
            let_in(gate, one, peer=str(one))


def test_who_fails_too_often_waits_and_keeps_nobody_else_out() -> None:
    gate = gate_of(ANN)
    good, bad = signed(gate, ANN), signed(gate, Credentials("ann", "wrong"))
    for _ in range(FREE_FAILURES):
        with pytest.raises(Unauthorised):
            let_in(gate, bad)
    with pytest.raises(Unauthorised):
        let_in(gate, good)
    assert let_in(gate, good, peer="10.0.0.2") == "ann"
    assert let_in(gate, good, now=2 * SECONDS_EACH) == "ann"


def test_on_an_open_node_nobody_is_a_tenant() -> None:
    gate = Gate(None, 1000, lambda count: b"n" * count)
    assert gate.hashing("ann") == (b"", 0)
    with pytest.raises(Unauthorised):
        let_in(gate, Signed("ann", NONCE, bytes(32), bytes(32)))


def test_headers_are_read_as_they_are_written() -> None:
    challenge = Challenge(b"s" * 16, 4096, NONCE)
    assert Challenge.parse(str(challenge)) == challenge
    one = Signed("a.b@c_d+e-f", NONCE, b"d" * 32, b"p" * 32)
    assert Signed.parse(str(one)) == one
    assert Signed.parse(str(Signed("ann"))) == Signed("ann")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Bearer x",
        SCHEME,
        f"{SCHEME} id=",
        f"{SCHEME} id=a,b",
        f"{SCHEME} id={'a' * 129}",
        f"{SCHEME} id=ann, nonce=0, digest={'0' * 64}, proof={'0' * 64}",
        f"{SCHEME} id=ann, nonce=00, digest={'0' * 62}, proof={'0' * 64}",
        f"{SCHEME} id=ann, nonce=00, digest={'0' * 64}, proof={'0' * 66}",
        f"{SCHEME} salt=0, iterations=1, nonce=00",
        f"{SCHEME} salt=00, iterations=x, nonce=00",
    ],
)
def test_other_headers_are_none(text: str) -> None:
    assert Signed.parse(text) is None
    assert Challenge.parse(text) is None


def test_a_proof_is_none_for_a_greeting() -> None:
    one = Signed("ann", NONCE, b"d" * 32)
    assert one.message != scram.transcript(b"ann", NONCE + b"d" * 32)
