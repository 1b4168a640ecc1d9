"""What a node does to a folder that it is told to use: nothing to what it did not write itself."""

from __future__ import annotations

import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ems.config import NodeConfig
from ems.errors import ConfigError
from ems.pool.node.launcher import ensure_node
from ems.pool.segments.arena import Arena
from ems.pool.segments.folder import Folder, make_folder, refuse_strangers

MIB = 1 << 20
NODE_ID = bytes(range(16))

STRANGERS = {
    "experience-2025.docx": b"PK\3\4 ten years of work",
    "tails": b"fox, horse, cat",
    "marks": b"Anna 1, Ben 2",
    "owners": b"Anna",
    "given-up": b"smoking",
    "experience": b"ten years of work",
    "segment-00007": b"of a pipeline",
    "segment-00000": b"of a pipeline",
    "segment-00003.new": b"of a pipeline",
    "node.log": b"of another program",
    "node.lock": b"of another program",
    "segment-00001": bytes(4096),
    "segment-00002": b"",
    "pins": b"",
    "size": b"large",
    "notes.txt": b"mine",
    ".hidden": b"mine",
}


@pytest.fixture
def home() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="ems-test-", dir="/dev/shm") as path:
        yield Path(path)


def config(home: Path, **settings: object) -> NodeConfig:
    return NodeConfig(
        **{"directory": home / "pool", "socket": home / "s", "size": 2 * MIB, "allow_disk": False, **settings}  # type: ignore[arg-type]
    )


def contents(folder: Path) -> dict[str, bytes]:
    return {entry.name: entry.read_bytes() for entry in folder.iterdir() if entry.is_file()}


@pytest.mark.parametrize("name", STRANGERS)
@pytest.mark.parametrize("fresh", [False, True])
def test_a_folder_with_anything_else_in_it_is_refused(home: Path, name: str, fresh: bool) -> None:
    folder = home / "pool"
    folder.mkdir(mode=0o700)
    (folder / name).write_bytes(STRANGERS[name])
    with pytest.raises(ConfigError, match=rf"holds {name}, which no pool node wrote.* give another --dir"):
        Arena(config(home, fresh=fresh), NODE_ID)
    assert contents(folder) == {name: STRANGERS[name]}


@pytest.mark.parametrize("name", STRANGERS)
def test_an_engine_starts_no_node_in_such_a_folder(home: Path, name: str) -> None:
    folder = home / "pool"
    folder.mkdir(mode=0o700)
    (folder / name).write_bytes(STRANGERS[name])
    with pytest.raises(ConfigError, match=name):
        ensure_node(config(home))
    assert contents(folder) == {name: STRANGERS[name]}


def test_what_else_is_put_into_a_nodes_folder_stays(home: Path) -> None:
    folder = home / "pool"
    Arena(config(home), NODE_ID).close()
    for name in ("experience-2025.docx", "segment-x", "segment-1", "segment-000001.bak", "experience.old"):
        (folder / name).write_bytes(b"mine")
        before = contents(folder)
        with pytest.raises(ConfigError, match=name):
            Arena(config(home, fresh=True), NODE_ID)
        assert contents(folder) == before
        (folder / name).unlink()
    Arena(config(home), NODE_ID).close(keep=False)
    assert not folder.exists()


def test_a_folder_in_place_of_a_file_is_refused(home: Path) -> None:
    (home / "pool" / "segment-00000").mkdir(parents=True, mode=0o700)
    with pytest.raises(ConfigError, match="segment-00000"):
        Arena(config(home), NODE_ID)


def test_a_link_in_place_of_a_file_is_refused(home: Path) -> None:
    (home / "precious").write_bytes(b"EMSMARK1 or so it says")
    (home / "pool").mkdir(mode=0o700)
    (home / "pool" / "marks").symlink_to(home / "precious")
    with pytest.raises(ConfigError, match="marks"):
        Arena(config(home), NODE_ID)
    assert (home / "precious").read_bytes() == b"EMSMARK1 or so it says"


@pytest.mark.parametrize(
    "name", ["segment-00099", "segment-000001", "segment-09000", "pins", "tails", "node.lock", "owners"]
)
def test_a_file_with_a_name_of_the_nodes_that_is_none_stays(home: Path, name: str) -> None:
    folder = home / "pool"
    Arena(config(home), NODE_ID).close()
    (folder / name).write_bytes(b"of a pipeline")
    before = contents(folder)
    with pytest.raises(ConfigError, match=name):
        Arena(config(home, fresh=True), NODE_ID)
    assert contents(folder) == before


@pytest.mark.parametrize("name", ["node.lock", "node.log"])
def test_a_file_of_another_program_that_only_looks_like_the_nodes_stays(home: Path, name: str) -> None:
    folder = home / "pool"
    folder.mkdir(mode=0o700)
    (folder / name).write_bytes(b"4711\n")
    with pytest.raises(ConfigError, match=name):
        Arena(config(home), NODE_ID)
    assert contents(folder) == {name: b"4711\n"}


def test_what_a_node_left_that_was_killed_while_it_began_is_its_own(home: Path) -> None:
    folder = home / "pool"
    folder.mkdir(mode=0o700)
    for name in ("node.lock", "marks"):  # made, and not written yet
        (folder / name).touch(mode=0o600)
        Arena(config(home), NODE_ID).close(keep=False)
        folder.mkdir(mode=0o700)
    Arena(config(home), NODE_ID).close()
    for name in ("tails", "pins.new"):
        (folder / name).touch(mode=0o600)
    (folder / "marks").write_bytes((folder / "marks").read_bytes()[:12])
    Arena(config(home), NODE_ID).close(keep=False)
    assert not folder.exists()


def test_a_node_that_begins_at_the_same_time_is_no_stranger(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_folder(home / "pool")
    iterdir, begun = Path.iterdir, list[Arena | None]()

    def beginning(path: Path) -> Iterator[Path]:
        if not begun:
            begun.append(None)
            begun.append(Arena(config(home), NODE_ID))
        return iterdir(path)

    monkeypatch.setattr(Path, "iterdir", beginning)
    refuse_strangers(home / "pool")
    assert begun[1] is not None
    begun[1].close(keep=False)


def test_a_client_that_spoils_its_segments_keeps_no_node_from_starting(home: Path) -> None:
    """Tenants can write into their segments, of which the description is the beginning."""
    Arena(config(home), NODE_ID).close()
    with (home / "pool" / "segment-00000").open("r+b") as segment:
        segment.write(b"no description at all")
    Arena(config(home), NODE_ID).close()


@pytest.mark.parametrize("name", ["tails", "owners", "pins", "size", "given-up"])
def test_a_damaged_file_of_its_own_keeps_no_node_from_starting(home: Path, name: str) -> None:
    Arena(config(home), NODE_ID).close()
    (home / "pool" / name).touch(mode=0o600)
    (home / "pool" / name).write_bytes(b"emstail2 and what comes behind it")
    Arena(config(home), NODE_ID).close()


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777, 0o722])
def test_a_folder_that_others_may_write_to_is_refused_and_stays_as_it_is(home: Path, mode: int) -> None:
    home.chmod(mode)
    with pytest.raises(ConfigError, match=rf"mode {mode:o}.* 'chmod 700"):
        make_folder(home)
    assert stat.S_IMODE(home.stat().st_mode) == mode


def test_a_folder_on_a_disk_is_refused_unless_it_is_asked_for(home: Path, tmp_path: Path) -> None:
    disk = tmp_path / "a" / "b"
    if tmp_path.stat().st_dev == home.stat().st_dev:
        pytest.skip("temporary files are in memory here")
    with pytest.raises(ConfigError, match=r"not in memory.*--allow-disk"):
        Arena(config(home, directory=disk), NODE_ID)
    assert not disk.parent.exists()
    Arena(config(home, directory=disk, allow_disk=True), NODE_ID).close(keep=False)


def test_holding_a_folder_takes_no_more_than_its_own_files(home: Path) -> None:
    (home / "pool").mkdir(mode=0o700)
    (home / "pool" / "letter.txt").touch()
    with pytest.raises(ConfigError, match=r"letter\.txt"):
        Folder(home / "pool")
    assert [entry.name for entry in (home / "pool").iterdir()] == ["letter.txt"]
