from __future__ import annotations

import msgspec
import pytest

from ems.errors import ConfigError
from ems.router.admission.keys import ApiKey, KeyFile, Keys, Principal
from tests.router.admission.api_keys import digest_of, new_key


def test_recognises_a_key_by_its_hash() -> None:
    key, other = new_key(), new_key()
    keys = Keys(KeyFile(keys=(ApiKey(id="a", sha256=digest_of(key), user="alice", models=("m",), priority=2),)))

    assert keys.recognise(key.encode(), 0.0) == Principal("alice", ("m",), 2, scope="key/a")
    assert keys.recognise(other.encode(), 0.0) is None
    assert keys.recognise(b"", 0.0) is None


def test_a_key_ends() -> None:
    key = new_key()
    keys = Keys(KeyFile(keys=(ApiKey(id="a", sha256=digest_of(key), expires=100.0),)))

    assert keys.recognise(key.encode(), 99.0) is not None
    assert keys.recognise(key.encode(), 100.0) is None


@pytest.mark.parametrize(
    ("models", "model", "allowed"),
    [
        (("*",), "x", True),
        (("x",), "x", True),
        (("x",), "xy", False),
        (("x*",), "xy", True),
        ((), "x", False),
        (("a", "b*"), "b", True),
    ],
)
def test_models_of_a_key(models: tuple[str, ...], model: str, allowed: bool) -> None:
    assert Principal("u", models).may_use(model) is allowed


@pytest.mark.parametrize(
    "keys", [[("a", "1"), ("a", "2")], [("a", "1"), ("b", "1")], [("", "1")], [("a b", "1")], [("x" * 65, "1")]]
)
def test_refuses_keys_that_are_not_one_each(keys: list[tuple[str, str]]) -> None:
    with pytest.raises(ConfigError):
        KeyFile(keys=tuple(ApiKey(id=name, sha256=digest_of(key)) for name, key in keys))


def test_a_hash_with_what_sha256sum_prints_behind_it_is_explained() -> None:
    with pytest.raises(
        ConfigError, match="sha256 is no hash: expected the 64 digits that sha256sum prints, and nothing"
    ):
        ApiKey(id="a", sha256=digest_of("key") + "  -")


@pytest.mark.parametrize("text", [b'{"format": 2}', b'{"keys": [{"id": "a", "sha256": "x"}]}', b'{"users": []}'])
def test_refuses_what_is_no_file_of_keys(text: bytes) -> None:
    with pytest.raises((ConfigError, msgspec.ValidationError)):
        msgspec.json.decode(text, type=KeyFile)
