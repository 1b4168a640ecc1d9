"""Memory that passes between tenants, or fails to: nodes in this process, without clients, in virtual time."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn
from unittest.mock import Mock

import pytest

from ems.config import NodeConfig
from ems.pool.administration.figures import judge
from ems.pool.core.shares import Bounds, Quota
from ems.pool.layout import HEADER_BYTES, header_offset, pack_header, unpack_header
from ems.pool.names import qualified
from ems.pool.node.pool_node import Node
from ems.pool.pages import Outcome
from ems.pool.protocol.acts import Resize
from ems.pool.segments.recovery import MOST
from ems.pool.tenants.gate import Peer, Principal
from tests.pool.brain import PAGE, chain, key, outcomes, segment_for
from tests.pool.tenants.people import ANN, BOB, registry_of, save
from tests.pool.wrong_core import wrong_core

SEGMENT = segment_for(2)


@pytest.fixture
def home() -> Iterator[Path]:
    with TemporaryDirectory(dir="/dev/shm", prefix="ems-test-") as folder:
        yield Path(folder)


@pytest.fixture
def tenants(tmp_path: Path) -> Path:
    save(tmp_path / "tenants.json", registry_of(ANN, BOB))
    return tmp_path / "tenants.json"


def start(home: Path, tenants: Path | None, segments: int = 2, segment: int = SEGMENT, **more: object) -> Node:
    """A node whose memory was touched; its verbs are called as a connection would."""
    values: dict[str, Any] = {"size": segment * segments, "segment_size": segment, "high_watermark": 1.0, **more}

    async def make() -> Node:
        return Node(NodeConfig(directory=home / "pool", socket=home / "s", tenants=tenants, **values))

    node = asyncio.run(make())
    for one in node.core.slots.segments:
        if one.size:
            touch(node, one.number)
    node.core.slots.touching_ended()
    node.memory.stop()  # no thread tells of progress: the tests say what was touched
    return node


def touch(node: Node, number: int) -> None:
    size = node.arena.sizes[number]
    os.posix_fallocate(node.arena._files[number].descriptor, 0, size)
    node.arena.touched[number] = size
    node.core.slots.touch(number, size)


def reserve(node: Node, name: str, keys: list[bytes]) -> list[Outcome]:
    number = node.core.open_namespace(name, PAGE)
    reserved = node.promise(1, number, bytes(16), keys)
    if reserved.granted:
        node.storing.commit(1, reserved.reservation)
    return outcomes(reserved)


def test_memory_that_clients_of_an_open_node_may_map_is_replaced_before_a_tenant_has_it(
    home: Path, tenants: Path
) -> None:
    node = start(home, None)
    assert reserve(node, "open", [key("x")]) == [Outcome.GRANTED]
    inodes = {os.fstat(node.arena._files[number].descriptor).st_ino for number in range(2)}
    node.close()
    node = start(home, tenants)
    try:
        for block in chain("y", 4):
            reserve(node, qualified("ann", "m"), [block])
            for number in range(2):
                touch(node, number)
        owned = [number for number in range(2) if node.core.segment_tenant(number) == "ann"]
        assert owned
        assert not inodes & {os.fstat(node.arena._files[number].descriptor).st_ino for number in owned}
    finally:
        node.close()


def resize(node: Node, size: int) -> None:
    """Have the pool made ``size`` bytes, round by round of a loop of its own."""
    later: list[Callable[[], None]] = []
    loop = Mock()
    loop.call_later.side_effect = lambda _, call, *arguments: later.append(partial(call, *arguments))
    node.loop = loop
    node.admin.do(Peer(1, os.geteuid()), Resize(size), dry_run=False)
    while later:
        later.pop(0)()


def test_memory_that_was_given_up_is_replaced_before_another_tenant_has_it_after_a_restart(
    home: Path, tenants: Path
) -> None:
    node = start(home, tenants, 3)
    assert reserve(node, qualified("ann", "m"), [key("a")]) == [Outcome.GRANTED]
    assert reserve(node, qualified("bob", "m"), list(chain("b", 2))) == [Outcome.GRANTED] * 2
    (anns,) = [number for number in range(3) if node.core.segment_tenant(number) == "ann"]
    inode = os.fstat(node.arena._files[anns].descriptor).st_ino
    resize(node, SEGMENT)
    assert anns in node.arena.given_up
    node.close()
    node = start(home, tenants, 1)
    try:
        resize(node, 3 * SEGMENT)
        touched(node)
        for block in chain("c", 5):
            reserve(node, qualified("bob", "m"), [block])
            touched(node)
        assert node.core.segment_tenant(anns) == "bob"
        assert os.fstat(node.arena._files[anns].descriptor).st_ino != inode
    finally:
        node.close()


@pytest.mark.parametrize("more", [{"fresh": True}, {"segment": segment_for(3)}], ids=["fresh", "another segment size"])
def test_pages_of_a_tenant_stay_after_its_earlier_ones_were_dropped(
    home: Path, tenants: Path, more: dict[str, Any]
) -> None:
    node = start(home, tenants)
    assert reserve(node, qualified("ann", "m"), [key("a")]) == [Outcome.GRANTED]
    node.close()
    node = start(home, tenants, **more)
    for block in chain("x", 2):
        assert reserve(node, qualified("ann", "m"), [block]) == [Outcome.GRANTED]
    node.close()
    assert (home / "pool" / "marks").exists(), "the next start knows how far numbers came"
    node = start(home, tenants, **{**more, "fresh": False})
    try:
        assert node.core.pages() == 2
    finally:
        node.close()


def test_a_stamp_of_a_tenants_own_making_costs_nobody_else_a_page_where_no_marks_are_known(
    home: Path, tenants: Path
) -> None:
    node = start(home, tenants, 3)
    assert reserve(node, qualified("ann", "m"), [key("a")]) == [Outcome.GRANTED]
    (anns,) = [number for number in range(3) if node.core.segment_tenant(number) == "ann"]
    descriptor = node.arena._files[anns].descriptor
    for slot in range(2):
        at = header_offset(slot)
        header = unpack_header(os.pread(descriptor, HEADER_BYTES, at), 0)
        os.pwrite(descriptor, pack_header(header._replace(stamp=MOST - 1)), at)
    node.close()
    (home / "pool" / "marks").write_bytes(b"EMSMARK1 and no more")
    node = start(home, tenants, 3)
    reserve(node, qualified("bob", "m"), list(chain("b", 2)))
    touched(node)
    assert reserve(node, qualified("bob", "m"), list(chain("b", 2))) == [Outcome.GRANTED] * 2
    node.close()
    node = start(home, tenants, 3)
    try:
        bob = node.core.namespaces[node.core.find_namespace(qualified("bob", "m"))]
        assert len(bob.index) == 2
    finally:
        node.close()


# Another process


# Quotas that do not fit


def ill(node: Node) -> dict[str, str]:
    """What `ems health` says is not well, by name."""
    return {check.name: check.seen for check in judge(node.figures()) if not check.well}


def test_a_key_is_revoked_though_the_quotas_in_the_file_do_not_fit(home: Path, tenants: Path) -> None:
    node = start(home, tenants)
    try:
        principal = Principal("ann", registry_of(ANN).tenants["ann"].keys[0].id)
        assert node.tenancy.gate.admits(principal, 0.0)
        before = node.core.shares.bounds("bob")
        node._obey(registry_of(BOB, bob=Quota(minimum="1GB")))
        assert not node.tenancy.gate.admits(principal, 0.0)
        assert node.core.shares.bounds("bob") == before
        assert "lower a minimum with 'ems tenant set'" in ill(node)["quotas"]
        node._obey(registry_of(BOB))
        assert ill(node) == {}
    finally:
        node.close()


def test_a_node_starts_without_minima_where_they_do_not_fit(home: Path, tenants: Path) -> None:
    save(tenants, registry_of(ANN, BOB, bob=Quota(minimum="1GB", cap="50%")))
    node = start(home, tenants)
    try:
        assert node.core.shares.bounds("bob") == Bounds(0, node.arena.sizes[0])
        assert node.core.shares.bounds("nobody") == Bounds(0, 0)
        assert "guaranteed minima come to" in ill(node)["quotas"]
    finally:
        node.close()


# Memory that cannot be had


def full(*_: object) -> NoReturn:
    raise OSError(errno.ENOSPC, "No space left on device")


def touched(node: Node) -> None:
    """All memory that is there is touched, as the threads of a node that runs do."""
    node.memory._touching = 0
    for one in node.core.slots.segments:
        touch(node, one.number)
    node.core.slots.touching_ended()


def test_a_segment_that_cannot_be_replaced_costs_no_more_than_itself_and_comes_back(
    home: Path, tenants: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = start(home, tenants, 3)
    try:
        for block in chain("x", 6):
            reserve(node, qualified("ann", "m"), [block])
        with monkeypatch.context() as patch:
            patch.setattr(node.arena, "renew", full)
            assert reserve(node, qualified("bob", "m"), [key("y")]) != [Outcome.GRANTED]
            touched(node)
            (lost,) = node.memory.lost
            assert node.tenancy.segment_tenants[lost] == "ann", "its memory is still the other's"
            for block in chain("z", 8):
                assert reserve(node, qualified("ann", "m"), [block]) == [Outcome.GRANTED]
            assert reserve(node, qualified("bob", "m"), [key("y")]) == [Outcome.NO_SPACE]
            node.memory.renew_lost()
            assert node.memory.lost == {lost}
            assert wrong_core(node.core) == []
        node.memory.renew_lost()
        touched(node)
        assert reserve(node, qualified("bob", "m"), [key("y")]) == [Outcome.GRANTED]
        assert (node.memory.lost, node.tenancy.segment_tenants[lost]) == (set(), "bob")
        assert wrong_core(node.core) == []
    finally:
        node.close()


def test_nothing_is_granted_in_a_segment_of_which_nobody_would_know_whose_it_is(
    home: Path, tenants: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = start(home, tenants)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", full)
            patch.setattr(Path, "replace", full)
            assert reserve(node, qualified("ann", "m"), [key("x")]) == [Outcome.NO_SPACE]
            assert node.tenancy.segment_tenants == {}
            assert wrong_core(node.core) == []
        assert reserve(node, qualified("ann", "m"), [key("x")]) == [Outcome.GRANTED]
        assert set(node.tenancy.segment_tenants.values()) == {"ann"}
        assert wrong_core(node.core) == []
    finally:
        node.close()


def test_segments_that_cannot_be_made_are_as_if_nobody_had_asked_for_them(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = start(home, None)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(node.arena, "_append", full)
            node.admin.do(Peer(1, os.geteuid()), Resize(5 * node.arena.sizes[0]), dry_run=False)
        touched(node)
        assert len(node.core.slots.segments) == len(node.arena.sizes) == 2
        for block in chain("x", 5):
            assert reserve(node, "open", [block]) == [Outcome.GRANTED], "it evicts"
        assert wrong_core(node.core) == []
    finally:
        node.close()
