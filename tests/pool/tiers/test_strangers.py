"""What is in a tier's place and is not of its nodes: it is never served, and never changed or removed."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ems.errors import ConfigError
from ems.pool.tiers.answers import Outcome
from ems.pool.tiers.packs import PackTier, open_packs
from ems.pool.tiers.settings import parse_tier
from tests.kit.tiers import NAMESPACE, PAGE, chain, fetch, key
from tests.pool.tiers.forging import forged

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files to other users")
OTHER_USER = 12345


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "tier"


@pytest.fixture
def seal_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that keeps the key of this host's nodes."""
    path = tmp_path / "own" / "seal.key"
    monkeypatch.setenv("EMS_SEAL_KEY", str(path))
    return path


def node(folder: Path, settings: str = "") -> PackTier:
    tier = open_packs(parse_tier(f"dir:{folder}?{settings}"))
    tier.maintain()
    return tier


def files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def served(tier: PackTier, name: str, count: int = 3) -> int:
    return sum(one is Outcome.DONE for one, _ in fetch(tier, [page.key for page in chain(name, count)]))


@pytest.mark.usefixtures("seal_key")
def test_a_planted_pack_is_not_served(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node(folder).store(NAMESPACE, chain("own", 3))
    with monkeypatch.context() as attacker:
        attacker.setenv("EMS_SEAL_KEY", str(tmp_path / "attacker.key"))
        node(folder).store(NAMESPACE, chain("planted", 3))
    before = files(folder)
    tier = node(folder)
    assert tier.holds(NAMESPACE, [key("planted/0")]) == 0
    assert served(tier, "planted") == 0
    assert served(tier, "own") == 3
    tier.maintain()
    assert files(folder) == before


@pytest.mark.usefixtures("seal_key")
@pytest.mark.parametrize("mode", [0o770, 0o707, 0o1777])
def test_a_folder_that_others_can_write_is_refused(folder: Path, mode: int) -> None:
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(ConfigError, match="chmod go-w"):
        node(folder)


@pytest.mark.usefixtures("seal_key")
@root_only
def test_a_folder_of_another_user_is_refused(folder: Path) -> None:
    folder.mkdir()
    os.chown(folder, OTHER_USER, OTHER_USER)
    with pytest.raises(ConfigError, match=f"belongs to user {OTHER_USER}"):
        node(folder)


@pytest.mark.usefixtures("seal_key")
@pytest.mark.parametrize("how", ["mode", pytest.param("owner", marks=root_only), "mode of its folder"])
def test_a_file_that_others_may_have_written_is_ignored_and_stays(folder: Path, how: str) -> None:
    node(folder).store(NAMESPACE, chain("own", 3))
    (pack,) = folder.glob("*/*.pack")
    if how == "owner":
        os.chown(pack, OTHER_USER, -1)
    else:
        (pack if how == "mode" else pack.parent).chmod(0o770)
    tier = node(folder)
    assert served(tier, "own") == 0
    assert tier.figures()["not_believed"] == 1
    assert pack.exists()


@pytest.mark.usefixtures("seal_key")
def test_a_file_that_others_get_to_write_while_the_node_runs_is_a_miss(folder: Path) -> None:
    tier = node(folder)
    tier.store(NAMESPACE, chain("own", 3))
    (pack,) = folder.glob("*/*.pack")
    pack.chmod(0o666)
    assert served(tier, "own") == 0
    assert pack.exists()


@pytest.mark.usefixtures("seal_key")
def test_what_strangers_keep_in_the_folder_stays_as_it_is(folder: Path) -> None:
    tier = node(folder)
    tier.store(NAMESPACE, chain("own", 3))
    (namespace,) = (path for path in folder.iterdir() if path.is_dir())
    (folder / "theirs").mkdir()
    strange = [
        folder / "theirs" / ".new-draft",
        folder / "theirs" / ".new-0123456789abcdef",
        folder / ".new-notes",
        folder / "probe-results.csv",
        folder / "catalogue.bin",
        folder / "ems-catalogue.bin",
        namespace / "readme",
        namespace / "018f2c3ab4d1-5be05be05be05be0.pack",
    ]
    for path in strange:
        path.write_bytes(b"theirs, of no format that a node knows" * 9)
        os.utime(path, (1, 1))
    for settings in ("ttl=1s", "size=50000", ""):
        again = node(folder, settings)
        for number in range(6):
            again.store(NAMESPACE, chain(f"{settings}{number}", 3))
        again.maintain()
        again.close()
    assert {path.read_bytes() for path in strange} == {b"theirs, of no format that a node knows" * 9}


@pytest.mark.usefixtures("seal_key")
def test_a_pack_of_a_later_release_stays_as_it_is(folder: Path) -> None:
    node(folder).store(NAMESPACE, chain("own", 3))
    (pack,) = folder.glob("*/*.pack")
    raw = pack.read_bytes()
    pack.write_bytes(raw.replace(raw[:12], raw[:8] + b"\x09\0\0\0"))
    os.utime(pack, (1, 1))
    before = files(folder)
    tier = node(folder, "ttl=1s")
    tier.maintain()
    assert served(tier, "own") == 0
    assert tier.figures()["unreadable"] == 1
    assert before.items() <= files(folder).items()


def forgeries() -> dict[str, dict[str, Any]]:
    def swap(field: str) -> Callable[[Any], None]:
        def change(table: Any) -> None:
            table[field][[0, 1]] = table[field][[1, 0]]

        return change

    def put(field: str, value: Any) -> Callable[[Any], None]:
        def change(table: Any) -> None:
            table[field][0] = value

        return change

    def at(place: int, value: bytes) -> Callable[[bytearray], None]:
        def change(raw: bytearray) -> None:
            raw[place : place + len(value)] = value

        return change

    def field(place: int, value: Any) -> Callable[[list[Any]], None]:
        def change(body: list[Any]) -> None:
            body[place] = value

        return change

    fields = ("key", "parent", "offset", "nonce", "tag")
    return {
        **{f"{field}s swapped": {"records": swap(field)} for field in fields},
        "another page's bytes": {"data": at(PAGE, bytes(PAGE))},
        "a codec": {"records": put("codec", 1)},
        "an unknown codec": {"records": put("codec", 77)},
        "half a page": {"records": put("stored", PAGE // 2)},
        "a page without end": {"records": put("stored", 1 << 62)},
        "a place without end": {"records": put("offset", (1 << 64) - 1)},
        "encrypted": {"preamble": at(12, b"\1")},
        "a body without end": {"preamble": at(16, b"\xff\xff\xff\xff")},
        "another salt": {"preamble": at(20, bytes(32))},
        "other sizes": {"body": field(1, PAGE * 2)},
        "no size": {"body": field(1, -1)},
        "no time at all": {"body": field(2, math.nan)},
        "a far time": {"body": field(2, math.inf)},
        "a name that is no text": {"body": field(0, b"\xff\xfe")},
        "another tenant's name": {"body": field(0, NAMESPACE.upper())},
    }


@pytest.mark.usefixtures("seal_key")
@pytest.mark.parametrize("how", forgeries())
@pytest.mark.parametrize("first", [False, True], ids=["before the start", "while the node runs"])
def test_a_forged_pack_serves_no_wrong_byte_and_hurts_nothing_else(folder: Path, how: str, first: bool) -> None:
    tier = node(folder)
    tier.store(NAMESPACE, chain("own", 3))
    (pack,) = folder.glob("*/*.pack")
    pack.write_bytes(forged(pack.read_bytes(), **forgeries()[how]))
    if not first:
        tier = node(folder)
    tier.store(NAMESPACE, chain("others", 3))
    for _ in range(3):
        for name in ("own", "others"):
            pages = chain(name, 3)
            for page, (outcome, raw) in zip(pages, fetch(tier, [page.key for page in pages]), strict=True):
                assert outcome is not Outcome.DONE or raw == page.payload
        assert served(tier, "others") == 3
        tier.maintain()
    assert served(node(folder), "others") == 3


@pytest.mark.usefixtures("seal_key")
def test_a_pack_under_the_name_of_another_tenant_is_not_served(folder: Path) -> None:
    node(folder).store(NAMESPACE, chain("own", 3))
    node(folder).store("other/model/layout", chain("other", 3))
    one, other = sorted(folder.glob("*/*.pack"))
    raw = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(raw)
    tier = node(folder)
    for namespace in (NAMESPACE, "other/model/layout"):
        for name in ("own", "other"):
            assert {one for one, _ in fetch(tier, [key(f"{name}/0")], namespace)} == {Outcome.MISSING}


@pytest.mark.usefixtures("seal_key")
def test_a_catalogue_of_somebody_else_is_not_believed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    with monkeypatch.context() as attacker:
        attacker.setenv("EMS_SEAL_KEY", str(tmp_path / "attacker.key"))
        planted = node(elsewhere)
        planted.store(NAMESPACE, chain("planted", 3))
        planted.close()
    folder.mkdir(mode=0o700)
    shutil.copytree(elsewhere, folder, dirs_exist_ok=True)
    tier = node(folder)
    assert served(tier, "planted") == 0
    tier.store(NAMESPACE, chain("own", 3))
    tier.close()
    assert served(node(folder), "own") == 3


@pytest.mark.parametrize(
    "written",
    [b"EMSCAT02", b"EMSCAT02\x91\x94\xa1a\xff\xff\xff", b"EMSCAT02\x91\x94\xa1a\x01\xcb\x7f\xf8\0\0\0\0\0\0\xc4\0"],
)
@pytest.mark.usefixtures("seal_key")
def test_a_catalogue_that_makes_no_sense_costs_nothing(folder: Path, written: bytes) -> None:
    node(folder).store(NAMESPACE, chain("own", 3))
    (folder / "ems-catalogue.bin").write_bytes(b"EMSCAT02" + written)
    tier = node(folder)
    assert served(tier, "own") == 3
    tier.store(NAMESPACE, chain("more", 1))
    tier.close()
    assert served(node(folder), "more", 1) == 1


def test_the_key_of_a_host_is_made_once_and_for_its_user_alone(folder: Path, seal_key: Path) -> None:
    node(folder).store(NAMESPACE, chain("own", 3))
    made = seal_key.read_bytes()
    assert len(made.strip()) == 64
    assert seal_key.stat().st_mode & 0o777 == 0o600
    assert seal_key.parent.stat().st_mode & 0o777 == 0o700
    assert [path.name for path in seal_key.parent.iterdir()] == ["seal.key"]
    assert served(node(folder), "own") == 3
    assert seal_key.read_bytes() == made


@pytest.mark.parametrize(
    ("mode", "content", "said"), [(0o644, b"k" * 32, "chmod 600 it"), (0o600, b"short", "has 5 bytes, expected 16")]
)
def test_a_key_that_others_can_read_or_guess_is_refused(
    folder: Path, seal_key: Path, mode: int, content: bytes, said: str
) -> None:
    seal_key.parent.mkdir()
    seal_key.write_bytes(content)
    seal_key.chmod(mode)
    with pytest.raises(ConfigError, match=said):
        node(folder)


@root_only
def test_a_key_of_another_user_is_refused_who_may_change_it(folder: Path, seal_key: Path) -> None:
    seal_key.parent.mkdir()
    seal_key.write_bytes(b"k" * 32)
    seal_key.chmod(0o600)
    os.chown(seal_key, OTHER_USER, -1)
    with pytest.raises(ConfigError, match="belongs to another user, who may change it; chown it"):
        node(folder)


def test_a_bucket_needs_a_key_that_is_given(seal_key: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    address = "s3://bucket/prefix?endpoint=http://127.0.0.1:1"
    with pytest.raises(ConfigError, match="cannot read the key"):
        open_packs(parse_tier(address))
    assert not seal_key.exists()
    monkeypatch.delenv("EMS_SEAL_KEY")
    with pytest.raises(ConfigError, match="seal_key=FILE"):
        open_packs(parse_tier(address))
    seal_key.parent.mkdir()
    seal_key.write_bytes(b"k" * 32)
    seal_key.chmod(0o600)
    assert open_packs(parse_tier(f"{address}&seal_key={seal_key}")).name == "s3://bucket/prefix"
    with pytest.raises(ConfigError, match="give one"):
        parse_tier(f"{address}&seal_key={seal_key}&key={seal_key}")


@pytest.mark.usefixtures("seal_key")
def test_an_encrypted_tier_serves_nothing_that_is_not(folder: Path, tmp_path: Path) -> None:
    node(folder).store(NAMESPACE, chain("plain", 3))
    secret = tmp_path / "secret"
    secret.write_bytes(b"k" * 32)
    secret.chmod(0o600)
    tier = node(folder, f"key={secret}")
    assert served(tier, "plain") == 0
    assert tier.figures()["wrong_key"] == 1
    tier.store(NAMESPACE, chain("own", 3))
    assert served(node(folder, f"key={secret}"), "own") == 3
