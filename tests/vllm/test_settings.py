"""What people write in kv_connector_extra_config, right and wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ems.errors import ConfigError
from ems.vllm.settings import read_settings


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("EMS_DIR", "EMS_SOCKET", "EMS_POOL_SIZE", "EMS_AUTOSTART", "EMS_CALL_TIMEOUT_MS"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(("role", "saves"), [("kv_producer", True), ("kv_both", True), ("kv_consumer", False)])
def test_the_role_says_who_stores(role: str, saves: bool) -> None:
    settings, warnings = read_settings(role, {})

    assert settings.saves is saves
    assert warnings == []


def test_numbers_and_booleans_may_come_as_strings() -> None:
    settings, _ = read_settings(
        "kv_both", {"pool_size": "1GB", "autostart": "False", "lookup_timeout_ms": "250", "handoff_timeout_ms": 1500}
    )

    assert settings.pool_size == 1 << 30
    assert settings.autostart is False
    assert settings.lookup_timeout == 0.25
    assert settings.handoff_timeout == 1.5


def test_the_environment_is_used_where_the_file_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMS_SOCKET", "/run/pool.sock")
    monkeypatch.setenv("EMS_POOL_SIZE", "2GB")
    monkeypatch.setenv("EMS_AUTOSTART", "0")

    settings, _ = read_settings("kv_both", {})
    assert settings.socket == Path("/run/pool.sock")
    assert settings.pool_size == 2 << 30
    assert settings.autostart is False

    settings, _ = read_settings("kv_both", {"socket": "/run/other.sock", "pool_size": 4096, "autostart": True})
    assert settings.socket == Path("/run/other.sock")
    assert settings.pool_size == 4096
    assert settings.autostart is True


def test_a_folder_without_a_socket_has_the_socket_inside() -> None:
    settings, _ = read_settings("kv_both", {"directory": "/dev/shm/mine"})

    assert settings.socket == Path("/dev/shm/mine/node.sock")
    assert settings.node_config().directory == Path("/dev/shm/mine")


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"pool_size": "many"}, "pool_size is 'many'"),
        ({"pool_size": "-1GB"}, "pool_size is '-1GB'"),
        ({"autostart": "perhaps"}, "autostart is 'perhaps'"),
        ({"lookup_timeout_ms": "soon"}, "lookup_timeout_ms is 'soon'"),
        ({"handoff_timeout_ms": 0}, "handoff_timeout_ms is 0"),
        ({"call_timeout_ms": 1e9}, "call_timeout_ms is 1000000000.0"),
        ({"lookup_timeout_ms": "nan"}, "lookup_timeout_ms is 'nan'"),
    ],
)
def test_a_wrong_value_is_refused_by_name(extra: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=r"expected") as error:
        read_settings("kv_both", extra)

    assert named in str(error.value)


def test_an_unknown_key_is_named_with_the_nearest_known_one() -> None:
    _, warnings = read_settings("kv_both", {"pool_sise": "1GB", "zzz": 1})

    assert warnings == [
        "key 'pool_sise' in kv_connector_extra_config means nothing to this connector, did you mean 'pool_size'",
        "key 'zzz' in kv_connector_extra_config means nothing to this connector",
    ]
