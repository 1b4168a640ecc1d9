"""Proofs: both sides, and the numbers of RFC 7677."""

from __future__ import annotations

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ems.errors import Unauthorised
from ems.pool.tenants import scram
from tests.kit.examples import examples

SALT = b"0123456789abcdef"


def test_the_construction_is_that_of_rfc_7677() -> None:
    salt = base64.b64decode("W22ZaJ0SNY7soEsUEjb6gQ==")
    message = (
        b"n=user,r=rOprNGfwEbeRWgbNEkqO,r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,"
        b"s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096,c=biws,r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0"
    )
    made = scram.prove("pencil", salt, 4096, message)
    assert base64.b64encode(made.proof) == b"dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ="
    assert base64.b64encode(made.signature) == b"6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4="
    known = scram.verifier("pencil", salt, 4096)
    assert scram.proves(known, message, made.proof)
    assert scram.signature(known, message) == made.signature


@examples(20)
@given(st.text(min_size=1), st.text(min_size=1), st.binary(max_size=64), st.integers(0, 255))
def test_a_proof_holds_for_its_key_and_message_only(key: str, other: str, message: bytes, bit: int) -> None:
    known = scram.verifier(key, SALT, 4096)
    proof = scram.prove(key, SALT, 4096, message).proof
    assert scram.proves(known, message, proof)
    assert not scram.proves(known, message + b".", proof)
    assert scram.proves(known, message, scram.prove(other, SALT, 4096, message).proof) == (key == other)
    flipped = bytearray(proof)
    flipped[bit // 8] ^= 1 << bit % 8
    assert not scram.proves(known, message, bytes(flipped))


@pytest.mark.parametrize(("salt", "iterations"), [(SALT, 1), (SALT, 4095), (SALT, 1 << 30), (b"short", 4096)])
def test_a_node_that_asks_for_a_weak_proof_or_endless_work_gets_none(salt: bytes, iterations: int) -> None:
    with pytest.raises(Unauthorised, match="expected 4096 to 1048576 times and at least 16 bytes"):
        scram.prove("key", salt, iterations, b"")


def test_what_is_signed_cannot_be_cut_elsewhere() -> None:
    assert scram.transcript(b"ab", b"c") != scram.transcript(b"a", b"bc")
