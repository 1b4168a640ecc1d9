from __future__ import annotations

import base64
from functools import partial
from typing import Any

import msgspec
import pytest
from joserfc import jws, jwt
from joserfc.jwk import ECKey, KeySet, OctKey

from ems.errors import ConfigError
from ems.http.bearer import Issuer, KeyUnknown, TokenRefused, Tokens, read_key_set
from ems.router.admission.keys import Principal, bearer_of

KEY = ECKey.generate_key("P-256", {"kid": "k1", "use": "sig", "alg": "ES256"}, private=True)
OTHER = ECKey.generate_key("P-256", {"kid": "k2", "use": "sig", "alg": "ES256"}, private=True)
FORGED = ECKey.generate_key("P-256", {"kid": "k1", "use": "sig", "alg": "ES256"}, private=True)
CLAIMS = {"iss": "https://issuer", "sub": "alice", "aud": ["router"], "exp": 1000}


def key_set(*keys: ECKey) -> KeySet:
    return read_key_set(msgspec.json.encode({"keys": [key.as_dict(private=False) for key in keys]}))


def signed(key: Any = KEY, alg: str = "ES256", **claims: Any) -> bytes:
    merged = {name: value for name, value in {**CLAIMS, **claims}.items() if value is not None}
    return jwt.encode({"alg": alg, "kid": key.kid}, merged, key, algorithms=[alg]).encode()


def checker(models_claim: str | None = None) -> Tokens[Principal]:
    issuer = Issuer(issuer="https://issuer", audiences=("router",), key_set="https://issuer/jwks")
    tokens = Tokens(issuer, partial(bearer_of, models_claim=models_claim))
    tokens.use(key_set(KEY))
    return tokens


def test_recognises_a_bearer_until_the_token_ends() -> None:
    tokens, token = checker(), signed()

    assert tokens.recognise(token, 0.0) == Principal("alice", scope="user/alice")
    assert tokens.recognise(token, 999.0).user == "alice"
    for _ in range(2):
        with pytest.raises(TokenRefused):
            tokens.recognise(token, 1000.0)


@pytest.mark.parametrize(
    "claims",
    [
        {"iss": "https://other"},
        {"iss": None},
        {"aud": "else"},
        {"aud": None},
        {"sub": None},
        {"exp": None},
        {"exp": "soon"},
        {"nbf": 100},
        {"iat": 100},
        {"sub": 5},
    ],
)
def test_refuses_claims_that_do_not_fit(claims: dict[str, Any]) -> None:
    with pytest.raises(TokenRefused):
        checker().recognise(signed(**claims), 0.0)


def test_an_issuers_clock_may_be_a_minute_ahead() -> None:
    assert checker().recognise(signed(nbf=50, iat=50), 0.0).user == "alice"


def test_refuses_who_signed_it_wrongly() -> None:
    secret = OctKey.import_key("a secret that is shared by both sides", {"kid": "k1"})
    unsigned = signed().rpartition(b".")[0] + b"."
    for token in (signed(FORGED), signed(secret, "HS256"), unsigned, b"a.b.c", b"..", b"\xff.\xff.\xff", b"x" * 20000):
        with pytest.raises(TokenRefused) as refused:
            checker().recognise(token, 0.0)
        assert not isinstance(refused.value, KeyUnknown)


def test_a_new_key_is_asked_for_and_an_old_one_forgotten() -> None:
    tokens = checker()
    with pytest.raises(KeyUnknown):
        tokens.recognise(signed(OTHER), 0.0)
    old = signed()
    tokens.recognise(old, 0.0)
    tokens.use(key_set(OTHER))

    assert tokens.recognise(signed(OTHER), 0.0).user == "alice"
    with pytest.raises(TokenRefused):
        tokens.recognise(old, 0.0)


@pytest.mark.parametrize(
    ("claim", "models"), [("a b", ("a", "b")), (["a"], ("a",)), (None, ()), (7, ()), ({"a": 1}, ())]
)
def test_models_come_from_a_claim(claim: Any, models: tuple[str, ...]) -> None:
    assert checker("models").recognise(signed(models=claim), 0.0).models == models


@pytest.mark.parametrize("text", [b"", b"[]", b'{"keys": 1}', b'{"keys": [{"kty": "none"}]}', b"null", b"[" * 10000])
def test_refuses_what_is_no_key_set(text: bytes) -> None:
    with pytest.raises(ConfigError):
        read_key_set(text)


@pytest.mark.parametrize(
    "token",
    [
        b'{"alg": "\\ud800"}',
        jws.serialize_compact({"alg": "ES256", "kid": "k1"}, b"[" * 9000, KEY, algorithms=["ES256"]).encode(),
        signed(exp=10**400),
    ],
    ids=["half a character", "deep", "for ever"],
)
def test_what_is_wrong_with_a_token_is_said_in_ascii(token: bytes) -> None:
    if b"." not in token:
        token = base64.urlsafe_b64encode(token).rstrip(b"=") + b".e30.e30"
    with pytest.raises(TokenRefused) as refused:
        checker().recognise(token, 0.0)

    assert str(refused.value).isascii()


def test_a_name_can_be_written_into_logs() -> None:
    claims = b'{"iss": "https://issuer", "sub": "a\\ud800", "aud": "router", "exp": 1000}'
    token = jws.serialize_compact({"alg": "ES256", "kid": "k1"}, claims, KEY, algorithms=["ES256"])

    assert checker().recognise(token.encode(), 0.0).user == "a?"
