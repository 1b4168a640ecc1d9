"""What a node says of a cluster that it cannot use, before it starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from ems.errors import ConfigError
from ems.pool.tiers.cluster.tier import open_cluster
from ems.pool.tiers.opening import open_tier
from ems.pool.tiers.settings import parse_tier
from tests.pool.tiers.cluster.hosts import write_settings


def test_a_node_that_serves_tenants_wants_a_seal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EMS_SEAL_KEY")
    address = f"mooncake:{write_settings(tmp_path, '127.0.0.1:9')}"
    with pytest.raises(ConfigError, match="has no seal"):
        open_tier(parse_tier(address), for_tenants=True)
    assert open_tier(parse_tier(address)).asks
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef")
    secret.chmod(0o600)
    assert open_tier(parse_tier(f"{address}?seal_key={secret}"), for_tenants=True).asks


def test_the_environment_names_the_seal_where_the_settings_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    address = f"mooncake:{write_settings(tmp_path, '127.0.0.1:9')}"
    assert open_tier(parse_tier(address), for_tenants=True).asks
    assert "believed whoever stored them" not in capsys.readouterr().out
    monkeypatch.setenv("EMS_SEAL_KEY", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"cannot read the key .*none: No such file"):
        open_tier(parse_tier(address))
    monkeypatch.delenv("EMS_SEAL_KEY")
    open_tier(parse_tier(address))
    assert "believed whoever stored them" in capsys.readouterr().out


def test_two_hosts_are_told_apart_by_their_seals_and_no_secret_is_shown(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.mkdir()
    for file, secret in (
        ("mine", "0123456789abcdef"),
        ("theirs", "fedcba9876543210"),
        ("keys/a.key", "fedcba9876543210"),
    ):
        (tmp_path / file).write_text(secret)
        (tmp_path / file).chmod(0o600)
    address = f"mooncake:{write_settings(tmp_path, '127.0.0.1:9')}?seal_key={tmp_path}"
    mine, theirs, tenants = (
        open_tier(parse_tier(f"{address}/{name}")).figures()["seals"] for name in ("mine", "theirs", "keys")
    )
    assert mine != theirs
    assert tenants == {"a": theirs[""]}
    assert "9876" not in str(theirs)


def test_a_file_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*none\.json: No such file or directory; name a file"):
        open_tier(parse_tier(f"mooncake:{tmp_path}/none.json"))


@pytest.mark.parametrize("setting", ["size=1GB", "ttl=1h", "compress=zstd", "key=/x", "sync=true", "region=x"])
def test_settings_of_other_tiers_are_refused(setting: str) -> None:
    with pytest.raises(ConfigError, match="only, leave it out"):
        parse_tier(f"mooncake:/etc/mooncake.json?{setting}")


@pytest.mark.parametrize("setting", ["replicas=2", "placement=any", "local_only=true"])
def test_settings_of_a_cluster_are_refused_for_other_tiers(setting: str) -> None:
    assert parse_tier(f"mooncake:/etc/mooncake.json?{setting}").kind == "mooncake"
    with pytest.raises(ConfigError, match="for tiers of the kind mooncake only"):
        parse_tier(f"dir:/x?{setting}")


def test_a_host_does_not_lend_more_memory_than_it_has(tmp_path: Path) -> None:
    file = tmp_path / "mooncake.json"
    file.write_text('{"master_server_address": "10.0.0.1:50088", "global_segment_size": "900TB"}')
    with pytest.raises(ConfigError, match=r"global_segment_size of mooncake:.* is 900.0 TiB, and this host has .*; "):
        open_cluster(parse_tier(f"mooncake:{file}"), None)
