"""Whoever makes the folder of a node first is not taken for it: nothing is sent to him or mapped from him."""

from __future__ import annotations

import asyncio
import codecs
import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from ems.config import NodeConfig
from ems.errors import ConfigError, PoolUnavailable, Unauthorised
from ems.pool.client.pool_client import PoolClient
from ems.pool.node.launcher import ensure_node
from ems.pool.node.listener import Listener
from ems.pool.node.pool_node import Node
from ems.pool.tenants.scram import Credentials
from tests.pool.client.scripted import WELCOME
from tests.pool.strangers import SERVICE, STRANGER, as_user, folder_of, listening, needs_root, place_for_all
from tests.pool.tenants.people import ANN, registry_of, save

pytestmark = needs_root


@pytest.fixture
def place() -> Iterator[Path]:
    """Where everybody may make a folder."""
    with place_for_all() as path:
        yield path


def refusal(path: Path, *, credentials: Credentials | None = None, administers: bool = False) -> str:
    with closing(PoolClient(path, credentials=credentials, administers=administers)) as client:
        with pytest.raises(Unauthorised) as refused:
            client.connect()
        assert not client.epoch
    return str(refused.value)


@pytest.mark.parametrize("administers", [False, True], ids=["engine", "administrator"])
def test_nothing_is_sent_to_who_made_the_folder_first(place: Path, administers: bool) -> None:
    path = folder_of(STRANGER, place / "ems-0") / "node.sock"
    with listening(path, WELCOME) as stranger:
        assert f"belongs to user {STRANGER}" in refusal(path, administers=administers)
    assert not stranger.heard


def test_nothing_is_sent_to_who_listens_in_a_folder_of_all(place: Path) -> None:
    with listening(place / "node.sock", WELCOME) as stranger:
        assert f"belongs to user {STRANGER}" in refusal(place / "node.sock")
    assert not stranger.heard


def test_a_socket_of_this_user_behind_which_a_stranger_listens(place: Path) -> None:
    """The file's owner can be another one than who listens: what counts is who gets the bytes."""
    with listening(place / "node.sock", WELCOME) as stranger:
        os.chown(place / "node.sock", 0, 0)
        assert f"belongs to user {STRANGER}" in refusal(place / "node.sock")
    assert not stranger.heard


@pytest.mark.parametrize("link", ["socket", "folder"])
def test_a_strangers_link_does_not_lead_anywhere(place: Path, link: str) -> None:
    (place / "own").mkdir()
    path = place / "link" / "node.sock"
    if link == "socket":
        folder_of(STRANGER, place / "link")
        path.symlink_to(place / "own" / "service.sock")
        os.chown(path, STRANGER, STRANGER, follow_symlinks=False)
    else:
        path.parent.symlink_to(place / "own")
        os.chown(path.parent, STRANGER, STRANGER, follow_symlinks=False)
    name = "service.sock" if link == "socket" else "node.sock"
    with listening(place / "own" / name, WELCOME, user=0) as service:
        assert f"belongs to user {STRANGER}" in refusal(path)
    assert not service.heard


def test_a_key_is_proven_to_nobody_who_proves_nothing(place: Path) -> None:
    path = folder_of(STRANGER, place / "ems-0") / "node.sock"
    with listening(path, WELCOME):
        assert f"belongs to user {STRANGER}" in refusal(path, credentials=ANN)


def test_who_is_another_user_trusts_root_and_nobody_else(place: Path) -> None:
    for user in (0, SERVICE, STRANGER):
        path = folder_of(user, place / f"of-{user}") / "node.sock"
        with listening(path, WELCOME, user=user), as_user(SERVICE):
            if user == STRANGER:
                assert f"belongs to user {STRANGER}" in refusal(path)
            else:
                with closing(PoolClient(path)) as client:
                    client.connect()


@pytest.fixture
def service(place: Path) -> Iterator[Path]:
    """The socket of a node with tenants that runs as a service account."""
    home = folder_of(SERVICE, place / "service")
    home.chmod(0o755)
    disk = tempfile.TemporaryDirectory(prefix="ems-test-")
    os.chown(disk.name, SERVICE, SERVICE)
    tenants = Path(disk.name) / "tenants.json"
    ended = threading.Event()
    listens = threading.Event()

    codecs.lookup("ascii")  # that user may not be able to read the interpreter's library

    async def serve() -> None:
        with as_user(SERVICE):
            save(tenants, registry_of(ANN))
            node = Node(
                NodeConfig(
                    directory=home / "pool", socket=home / "node.sock", socket_mode=0o666, size=1 << 20, tenants=tenants
                )
            )
            node.start()
        listens.set()
        await asyncio.to_thread(ended.wait)
        node.close()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    assert listens.wait(20)
    yield home / "node.sock"
    ended.set()
    thread.join()
    disk.cleanup()


def test_a_node_of_a_service_account_is_good_for_its_tenants(service: Path) -> None:
    with closing(PoolClient(service, credentials=ANN)) as client:
        client.connect()
        assert client.stats()["tenant"] == "ann"
    assert f"belongs to user {SERVICE}" in refusal(service)
    assert not ensure_node(NodeConfig(directory=service.parent, socket=service, http_port=None))


def test_a_stranger_cannot_pass_on_the_proof_of_the_node(place: Path, service: Path) -> None:
    """He stands between, and would hand out memory of his own once both sides have proven themselves."""
    path = folder_of(STRANGER, place / "ems-0") / "node.sock"
    with listening(path, passes_on_to=service) as stranger:
        assert f"runs as user {SERVICE}: it may be an impostor" in refusal(path, credentials=ANN)
    assert len(stranger.heard) == 1, "he was given the proof, and is let in with it"


def test_a_stranger_cannot_put_himself_into_the_question_of_the_node(place: Path, service: Path) -> None:
    path = folder_of(STRANGER, place / "ems-0") / "node.sock"
    user = {msgspec.msgpack.encode(SERVICE): msgspec.msgpack.encode(STRANGER)}
    with listening(path, passes_on_to=service, instead=user) as stranger:
        assert "does not accept these credentials" in refusal(path, credentials=ANN)
    assert len(stranger.heard) == 2


def test_no_node_is_started_into_a_strangers_folder(place: Path) -> None:
    theirs = folder_of(STRANGER, place / "ems-0")
    with pytest.raises(ConfigError, match=f"belongs to user {STRANGER}"):
        ensure_node(NodeConfig(directory=theirs, socket=place / "own.sock", http_port=None))
    with pytest.raises(Unauthorised, match=f"belongs to user {STRANGER}"):
        ensure_node(NodeConfig(directory=place / "own", socket=theirs / "node.sock", http_port=None))
    with pytest.raises(ConfigError, match=f"belongs to user {STRANGER}"):
        Listener(theirs / "node.sock")
    assert list(theirs.iterdir()) == []
    assert not (place / "own").exists()


def test_where_nobody_is_there_is_no_stranger(place: Path) -> None:
    with closing(PoolClient(place / "nowhere" / "node.sock")) as client, pytest.raises(PoolUnavailable):
        client.connect()
