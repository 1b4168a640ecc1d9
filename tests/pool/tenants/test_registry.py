"""Tenants and keys: every change, and who is recognised."""

from __future__ import annotations

import msgspec
import pytest

from ems.errors import ConfigError
from ems.pool.core.shares import Quota
from ems.pool.names import own_name, qualified, tenant_of
from ems.pool.tenants import registry as tenancy
from ems.pool.tenants import scram
from ems.pool.tenants.registry import MAX_KEYS, Registry
from ems.pool.tenants.scram import Credentials
from tests.pool.tenants.people import ANN, BOB, SALT, registry_of

MESSAGE = b"what was said"


def proof(registry: Registry, who: Credentials) -> bytes:
    question = registry.salt_for(who.access_id)
    return scram.prove(who.access_key, question, registry.iterations, MESSAGE).proof


def known(registry: Registry, who: Credentials, wall: float = 1.0) -> bool:
    return registry.recognise(who.access_id, MESSAGE, proof(registry, who), wall) is not None


def test_a_tenant_is_recognised_by_its_key_and_by_no_other() -> None:
    registry = registry_of(ANN, BOB)
    assert known(registry, ANN)
    assert known(registry, BOB)
    assert not known(registry, Credentials("ann", BOB.access_key))
    assert not known(registry, Credentials("nobody", ANN.access_key))


def test_the_node_proves_that_it_knows_the_key_too() -> None:
    registry = registry_of(ANN)
    made = scram.prove(ANN.access_key, registry.salt_for("ann"), registry.iterations, MESSAGE)
    found = registry.recognise("ann", MESSAGE, made.proof, 1.0)
    assert found is not None
    assert found[1] == made.signature


def test_no_key_is_in_what_is_stored() -> None:
    stored = msgspec.json.encode(registry_of(ANN))
    assert ANN.access_key.encode() not in stored
    assert msgspec.json.decode(stored, type=Registry) == registry_of(ANN)


def test_an_unknown_access_id_is_asked_the_same_question_each_time() -> None:
    registry = registry_of(ANN)
    first = registry.salt_for("nobody")
    assert first == registry_of(BOB).salt_for("nobody")
    assert len(first) == len(registry.salt_for("ann"))
    assert first != registry.salt_for("somebody")


def test_all_ids_cost_the_same_work(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = registry_of(ANN)
    compared: list[bytes] = []
    proves = scram.proves

    def count(known: scram.Verifier, message: bytes, proof: bytes) -> bool:
        compared.append(known.stored_key)
        return proves(known, message, proof)

    monkeypatch.setattr(scram, "proves", count)
    counts = []
    for who in (ANN, Credentials("ann", "wrong"), Credentials("nobody", "wrong")):
        compared.clear()
        known(registry, who)
        counts.append(len(compared))
    assert counts == [MAX_KEYS] * 3


def test_a_rotated_key_goes_on_until_the_overlap_is_over() -> None:
    registry = tenancy.rotate_key(registry_of(ANN), "ann", "ems_new", 100.0, 50.0)
    new = Credentials("ann", "ems_new")
    assert known(registry, ANN, 149.9)
    assert known(registry, new, 149.9)
    assert not known(registry, ANN, 150.0)
    assert known(registry, new, 150.0)


def test_a_second_rotation_lengthens_no_life() -> None:
    registry = tenancy.rotate_key(registry_of(ANN), "ann", "ems_second", 100.0, 50.0)
    registry = tenancy.rotate_key(registry, "ann", "ems_third", 110.0, 1000.0)
    assert not known(registry, ANN, 150.0)
    assert known(registry, Credentials("ann", "ems_second"), 1109.0)


def test_a_key_that_is_over_makes_room() -> None:
    registry = registry_of(ANN)
    for number in range(MAX_KEYS - 1):
        registry = tenancy.add_key(registry, "ann", f"ems_{number}", 0.0, expires=10.0)
    with pytest.raises(ConfigError, match="has 4 keys, which is the most; revoke one with 'ems key revoke'"):
        tenancy.add_key(registry, "ann", "ems_more", 5.0)
    registry = tenancy.add_key(registry, "ann", "ems_more", 10.0)
    assert len(registry.tenant("ann").keys) == 2


def test_a_revoked_key_opens_nothing_and_admits_nobody() -> None:
    registry = registry_of(ANN)
    (key,) = registry.tenant("ann").keys
    assert registry.admits("ann", key.id, 1.0)
    revoked = tenancy.revoke_key(registry, "ann", key.id)
    assert not known(revoked, ANN)
    assert not revoked.admits("ann", key.id, 1.0)
    assert registry.admits("ann", key.id, 1.0), "the old revision changed"
    assert revoked.revision == registry.revision + 1


def test_a_key_that_is_over_admits_nobody() -> None:
    registry = tenancy.rotate_key(registry_of(ANN), "ann", "ems_new", 0.0, 10.0)
    old = registry.tenant("ann").keys[0]
    assert registry.admits("ann", old.id, 9.9)
    assert not registry.admits("ann", old.id, 10.0)


@pytest.mark.parametrize("name", ["", "a/b", "a b", "-a", "x" * 65, "ä", "a\n", ".."])
def test_an_unfit_name_of_a_tenant_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="a tenant is called"):
        tenancy.add_tenant(registry_of(), name, Quota(), SALT)


def test_names_that_are_deployed_are_fit() -> None:
    registry = tenancy.add_tenant(registry_of(), "cc_kvstore@_@ds_default_ns_001", Quota(), SALT)
    assert list(registry.tenants) == ["cc_kvstore@_@ds_default_ns_001"]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda known: tenancy.add_tenant(known, "ann", Quota(), SALT), "there is a tenant 'ann' already"),
        (lambda known: tenancy.remove_tenant(known, "bob"), "there is no tenant 'bob'"),
        (lambda known: tenancy.set_quota(known, "bob", Quota()), "there is no tenant 'bob'"),
        (lambda known: tenancy.revoke_key(known, "ann", "0123"), "tenant ann has no key '0123'"),
        (lambda known: tenancy.add_key(known, "bob", "k", 0.0), "there is no tenant 'bob'"),
    ],
    ids=["add tenant", "remove tenant", "set quota", "revoke key", "add key"],
)
def test_a_change_that_makes_no_sense_is_refused(call: object, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        call(registry_of(ANN))  # type: ignore[operator]


@pytest.mark.parametrize(
    ("text", "said"), [("", "minimum is ''"), ("x%", "a share of the pool"), ("101%", "0% to 100%"), ("-1", "-1")]
)
def test_a_quota_that_makes_no_sense_is_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Quota(minimum=text)


def test_quotas_are_bytes_or_shares() -> None:
    bounds = Quota("1GB", "37.5%").within(8 << 30)
    assert (bounds.minimum, bounds.cap) == (1 << 30, 3 << 30)
    assert Quota().within(100).minimum == 0


@pytest.mark.parametrize("name", ["a/b/c", "//", "", "x"])
def test_a_name_says_whose_it_is(name: str) -> None:
    inner = qualified("ann", name)
    assert tenant_of(inner) == "ann"
    assert own_name(inner) == name
    assert tenant_of("default/model/f") == ""
