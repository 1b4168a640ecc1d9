"""A folder as a tier: the conformance suite, and what is a folder's own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ems.errors import ConfigError, TierFailed
from ems.pool.names import qualified
from ems.pool.tiers.answers import Outcome
from ems.pool.tiers.blobs import Blobs
from ems.pool.tiers.codec import Compressor
from ems.pool.tiers.directory import FolderBlobs
from ems.pool.tiers.pack_seal import read_keys
from ems.pool.tiers.packs import PackTier
from tests.kit.tiers import KEYS, NAMESPACE, PAGE, chain, fetch, key
from tests.pool.mounts import tmpfs
from tests.pool.tiers.pack_damage import PackConformance


class TestFolder(PackConformance):
    @pytest.fixture(autouse=True)
    def _place(self, tmp_path: Path) -> None:
        self.folder = tmp_path / "tier"

    def blobs(self) -> Blobs:
        return FolderBlobs(self.folder)

    def open(self, blobs: Blobs) -> PackTier:
        return PackTier("dir", blobs, KEYS)


class TestSyncedFolder(TestFolder):
    def blobs(self) -> Blobs:
        return FolderBlobs(self.folder, sync=True)


class TestEncryptedAndCompressedFolder(TestFolder):
    @pytest.fixture(autouse=True)
    def _secret(self, tmp_path: Path) -> None:
        self.secret = tmp_path / "secret"
        self.secret.write_bytes(b"a secret of thirty-two bytes or so")
        self.secret.chmod(0o600)

    def open(self, blobs: Blobs) -> PackTier:
        return PackTier("dir", blobs, read_keys(self.secret, encrypts=True), compressor=Compressor(2))


def test_files_and_folders_are_for_the_node_alone(tmp_path: Path) -> None:
    tier = PackTier("dir", FolderBlobs(tmp_path / "tier"), KEYS)
    tier.store(NAMESPACE, chain("a", 2))
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "tier").rglob("*") if path.is_file()}
    assert modes == {0o600}
    assert (tmp_path / "tier").stat().st_mode & 0o777 == 0o700


def test_a_folder_for_everybody_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(ConfigError, match="chmod go-w"):
        FolderBlobs(tmp_path)


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot keep pages"):
        FolderBlobs(tmp_path / "file" / "tier")


def test_what_a_dead_writer_left_is_swept_and_never_seen(tmp_path: Path) -> None:
    blobs = FolderBlobs(tmp_path)
    tier = PackTier("dir", blobs, KEYS)
    tier.store(NAMESPACE, chain("a", 1))
    folder = next(path for path in tmp_path.iterdir() if path.is_dir())
    left = folder / ".new-0123456789abcdef"
    left.write_bytes(b"half a pack")
    fresh = folder / ".new-fedcba9876543210"
    fresh.write_bytes(b"being written now")
    os.utime(left, (1, 1))
    again = PackTier("dir", FolderBlobs(tmp_path), KEYS)
    again.maintain()
    assert not left.exists()
    assert fresh.exists()
    assert again.holds(NAMESPACE, [key("a/0")]) == 1


def test_links_are_not_followed(tmp_path: Path) -> None:
    blobs = FolderBlobs(tmp_path)
    tier = PackTier("dir", blobs, KEYS)
    tier.store(NAMESPACE, chain("a", 1))
    (pack,) = tmp_path.glob("*/*.pack")
    elsewhere = tmp_path / "elsewhere"
    pack.rename(elsewhere)
    pack.symlink_to(elsewhere)
    with pytest.raises(TierFailed, match="cannot open"):
        fetch(tier, [key("a/0")])
    assert all(blob.refused for blob in blobs.blobs() if blob.name.endswith(".pack"))


@pytest.mark.parametrize("name", ["ems-catalogue.bin", "pack"])
def test_a_pipe_keeps_nobody_waiting(tmp_path: Path, name: str) -> None:
    tier = PackTier("dir", FolderBlobs(tmp_path), KEYS)
    tier.store(NAMESPACE, chain("a", 1))
    if name == "pack":
        (path,) = tmp_path.glob("*/*.pack")
        path.unlink()
    else:
        path = tmp_path / name
        path.unlink(missing_ok=True)
    os.mkfifo(path, 0o600)
    fetch(tier, [key("a/0")])
    again = PackTier("dir", FolderBlobs(tmp_path), KEYS)
    again.maintain()
    assert again.holds(NAMESPACE, [key("a/0")]) == (name != "pack")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount; the suite covers a full place with made-up faults")
def test_a_full_disk_makes_room_or_says_so(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "small", "size=256k,mode=700") as folder:
        tier = PackTier("dir", FolderBlobs(folder), KEYS, limit=1 << 30)
        for number in range(12):
            assert tier.store(NAMESPACE, chain(str(number), 8)) == [Outcome.DONE] * 8
        found = [tier.holds(NAMESPACE, [one.key for one in chain(str(number), 8)]) for number in range(12)]
        assert found[-1] == 8
        assert 0 in found
        assert tier.figures()["evicted_packs"] > 0
        with pytest.raises(TierFailed, match="No space left"):
            tier.store(NAMESPACE, chain("too much", 100))
        assert not list(folder.rglob(".new-*"))
        (newest,) = [n for n in range(12) if n == 11]
        assert tier.holds(NAMESPACE, [one.key for one in chain(str(newest), 8)]) in (0, 8)


def test_many_small_pages_take_several_calls(tmp_path: Path) -> None:
    tier = PackTier("dir", FolderBlobs(tmp_path), KEYS)
    pages = chain("a", 2500, 64)
    assert set(tier.store(NAMESPACE, pages)) == {Outcome.DONE}
    found = fetch(tier, [one.key for one in pages], size=64)
    assert [raw for _, raw in found] == [bytes(one.payload) for one in pages]
    assert PAGE


@pytest.mark.parametrize("namespace", [qualified("acme", "default/m/0123"), "acme/m/0123"])
def test_a_tenants_secret_is_that_of_its_namespaces(namespace: str, tmp_path: Path) -> None:
    (tmp_path / "acme.key").write_bytes(b"a secret of thirty-two bytes or so")
    (tmp_path / "acme.key").chmod(0o600)
    keys = read_keys(tmp_path, encrypts=True)
    seal = keys.pack(namespace)
    assert seal is not None
    nonce, tag, stored = seal.seal(b"a page", b"its name")
    again = keys.pack(namespace, seal.salt)
    assert again is not None
    assert again.open(stored, nonce, tag, b"its name") == b"a page"
    assert again.open(stored, nonce, tag, b"another name") is None
    assert keys.pack(qualified("other", "default/m/0123")) is None
    assert keys.pack(qualified("other", "acme/m/0123")) is None
