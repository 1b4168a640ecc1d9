"""``ems fsck`` on real folders: says what is wrong, mends it, keeps what is good, and changes nothing on a dry run."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from ems.cli import run
from ems.pool.tiers.answers import Outcome
from ems.pool.tiers.directory import FolderBlobs
from ems.pool.tiers.packs import PackTier
from tests.kit.tiers import KEYS, NAMESPACE, PAGE, chain, fetch


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tier with three packs."""
    tier = PackTier("dir", FolderBlobs(tmp_path), KEYS)
    for name in "abc":
        tier.store(NAMESPACE, chain(name, 3))
    return tmp_path


def packs(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*.pack"))


def damage(pack: Path, place: int = -500) -> None:
    raw = bytearray(pack.read_bytes())
    raw[place] ^= 1
    pack.write_bytes(raw)


def good(folder: Path) -> int:
    tier = PackTier("dir", FolderBlobs(folder), KEYS)
    tier.maintain()
    keys = [page.key for name in "abc" for page in chain(name, 3)]
    return sum(outcome is Outcome.DONE for outcome, _ in fetch(tier, keys))


def test_a_good_tier_is_well(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["fsck", f"dir:{folder}"]) == 0
    out = capsys.readouterr().out
    assert "3 packs, 9 good pages" in out
    assert "all is well" in out


def test_a_dry_run_says_what_is_wrong_and_changes_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage(packs(folder)[0])
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert run(["fsck", f"dir:{folder}", "--dry-run", "-o", "json"]) == 1
    report = json.loads(capsys.readouterr().out)
    (finding,) = report["findings"]
    assert finding["bad_pages"] == 1
    assert finding["kind"] == "damaged"
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_what_is_bad_goes_and_what_is_good_stays(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage(packs(folder)[0])
    damage(packs(folder)[1], 3)
    (folder / "mine.txt").write_text("not of EMS")
    assert run(["fsck", f"dir:{folder}"]) == 0
    out = capsys.readouterr().out
    assert out.count(", mended") == 2
    assert "mine.txt" in out
    assert good(folder) == 8
    assert (folder / "mine.txt").exists()
    assert run(["fsck", f"dir:{folder}"]) == 0
    assert "mended" not in capsys.readouterr().out


def test_links_and_pipes_are_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pack = packs(folder)[0]
    (folder / "link").symlink_to(pack)
    os.mkfifo(folder / "pipe")
    (folder / "folder-of-links").symlink_to(pack.parent)
    (pack.parent / "deeper").mkdir()
    assert run(["fsck", f"dir:{folder}"]) == 0
    out = capsys.readouterr().out
    assert "4 other files not of EMS, left alone: " in out
    assert all(name in out for name in ("link", "pipe", "folder-of-links", f"{pack.parent.name}/deeper"))
    assert good(folder) == 9


def test_a_pipe_or_link_in_the_place_of_a_pack_is_wrong(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pack, other, _ = packs(folder)
    pack.unlink()
    os.mkfifo(pack)
    other.rename(folder / "elsewhere")
    other.symlink_to(folder / "elsewhere")
    assert run(["fsck", f"dir:{folder}", "-o", "json"]) == 1
    found = {one["blob"]: one["kind"] for one in json.loads(capsys.readouterr().out)["findings"]}
    assert found == {str(one.relative_to(folder)): "not_believed" for one in (pack, other)}


def test_of_a_large_file_that_is_no_pack_the_ends_are_read(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pack = packs(folder)[0]
    pack.unlink()
    with pack.open("wb") as large:
        large.truncate(1 << 34)
    asked: list[int] = []
    read = FolderBlobs.read

    def counted(blobs: FolderBlobs, name: str, offset: int, into: Sequence[memoryview]) -> int:
        asked.extend(map(len, into if folder / name == pack else ()))
        return read(blobs, name, offset, into)

    monkeypatch.setattr(FolderBlobs, "read", counted)
    assert run(["fsck", f"dir:{folder}"]) == 1
    assert "it does not begin like a pack, left as it is" in capsys.readouterr().out
    assert 0 < sum(asked) <= 1 << 20


def test_encrypted_packs_are_checked_without_their_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from ems.pool.tiers.pack_seal import read_keys

    secret = tmp_path / "secret"
    secret.write_bytes(b"s" * 32)
    secret.chmod(0o600)
    folder = tmp_path / "tier"
    tier = PackTier("dir", FolderBlobs(folder), read_keys(secret, encrypts=True))
    pages = chain("a", 3)
    tier.store(NAMESPACE, pages)
    damage(packs(folder)[0])
    assert run(["fsck", f"dir:{folder}"]) == 1
    assert "1 bad page, not mended, 2 good pages" in capsys.readouterr().out
    assert run(["fsck", f"dir:{folder}?key={secret}"]) == 0
    assert "1 bad page, mended, 2 pages kept" in capsys.readouterr().out
    assert run(["fsck", f"dir:{folder}"]) == 0
    assert "the checksums of 1 pack are right" in capsys.readouterr().out
    again = PackTier("dir", FolderBlobs(folder), read_keys(secret, encrypts=True))
    again.maintain()
    found = fetch(again, [page.key for page in pages])
    assert [outcome for outcome, _ in found] == [Outcome.DONE, Outcome.DONE, Outcome.MISSING]
    assert found[0][1] == bytes(pages[0].payload)
    assert PAGE


@pytest.mark.parametrize("tier", ["dir:/nonexistent/tier", "nonsense", "dir:/tmp?nope=1"])
def test_a_mistake_is_one_line_and_status_2(tier: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["fsck", tier]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert len(told.err.strip().splitlines()) == 1


def test_a_folder_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    assert run(["fsck", f"dir:{tmp_path}/none"]) == 2
    assert not (tmp_path / "none").exists()


def test_a_pack_of_another_format_version_is_named_and_left_alone(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pack = packs(folder)[0]
    raw = pack.read_bytes()
    pack.write_bytes(raw.replace(raw[:12], raw[:8] + b"\x09\0\0\0"))
    before = pack.read_bytes()
    assert run(["fsck", f"dir:{folder}"]) == 1
    out = capsys.readouterr().out
    assert "format version 9" in out
    assert "all is well" not in out
    assert pack.read_bytes() == before


def test_a_damaged_magic_costs_no_page(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage(packs(folder)[0], 3)
    assert run(["fsck", f"dir:{folder}"]) == 0
    assert "all is well" not in capsys.readouterr().out
    assert good(folder) == 9
