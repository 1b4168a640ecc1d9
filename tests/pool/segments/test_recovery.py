"""Nodes that end at any moment and begin again on what is left: all that was committed is back, and nothing else."""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ems.config import NodeConfig
from ems.pool.core.deferred_frees import REPLACE_SECONDS
from ems.pool.core.pool_core import PoolCore
from ems.pool.keys import NO_PARENT, Tail
from ems.pool.layout import (
    HEADER_BYTES,
    HEADERS_OFFSET,
    REF_BYTES,
    Description,
    Header,
    PageRef,
    SlotState,
    carve,
    crc32c,
    header_offset,
    pack_description,
    unpack_header,
    unpack_refs,
)
from ems.pool.node.pool_node import Node
from ems.pool.protocol import messages
from ems.pool.segments.reader import PageReader, Trust, Verify
from ems.pool.segments.recovery import MOST, Recovered, SegmentImage, recover
from tests.kit.examples import examples
from tests.kit.headers import write_header
from tests.pool.brain import chain, key, segment_for, tails_of
from tests.pool.segment_memory import map_segment, page_memory
from tests.pool.wrong_core import wrong_core

SMALL, LARGE = 4096, 16384
SEGMENT = max(segment_for(5, SMALL), segment_for(2, LARGE)) + 4096 & ~4095
SEGMENTS = 3
PATHS = ["a", "ab", "abc", "abcd", "abx", "abxy", "k", "kl", "klm"]
NAMES = {"small": SMALL, "large": LARGE}
NAMED, PATHED = st.sampled_from(sorted(NAMES)), st.sampled_from(PATHS)


def start(home: Path, now: list[float], **changes: object) -> Node:
    """A node in ``home`` that nobody can connect to; its verbs are called as a connection would."""
    values: dict[str, object] = {
        "directory": home / "pool",
        "socket": home / "s",
        "size": SEGMENT * SEGMENTS,
        "segment_size": SEGMENT,
        "high_watermark": 1.0,
        **changes,
    }

    async def make() -> Node:
        return Node(NodeConfig(**values), clock=lambda: now[0])  # type: ignore[arg-type]

    node = asyncio.run(make())
    for number, size in enumerate(node.arena.sizes):
        os.posix_fallocate(node.arena._files[number].descriptor, 0, size)
        node.arena.touched[number] = size
        node.core.slots.touch(number, size)
    node.core.slots.touching_ended()
    return node


def content(name: str, path: bytes, size: int) -> bytes:
    return hashlib.sha256(name.encode() + path).digest() * (size // 32)


def pages_of(node: Node) -> dict[tuple[str, bytes], bytes]:
    """What a node holds: the bytes of each page by namespace and key."""
    return {
        (namespace.name, page.key): bytes_at(node, page.ref, namespace.page_size)
        for namespace in node.core.namespaces
        for page in namespace.index
        if page.present
    }


def bytes_at(node: Node, packed: bytes, size: int) -> bytes:
    return bytes(page_memory(node.arena, PageRef.unpack(packed), size))


def order_of(node: Node, name: str) -> list[bytes]:
    (index,) = [namespace.index for namespace in node.core.namespaces if namespace.name == name]
    return [page.key for page in index.policy]


def write(node: Node, packed: bytes, data: bytes) -> int:
    """Copy a page to its slot; its checksum."""
    page_memory(node.arena, PageRef.unpack(packed), len(data))[:] = data
    return crc32c(memoryview(data))


def commit(node: Node, reservation: int, positions: list[int], checksums: list[int]) -> None:
    raw = b"".join(checksum.to_bytes(4, "little") for checksum in checksums)
    node.answer(1, messages.Commit(reservation, positions, raw))
    node.answered()


def sound(node: Node, name: str, packed: bytes, one: bytes) -> bool:
    """What a reader that checks says of a page."""

    def segment(number: int) -> memoryview:
        return memoryview(bytes(map_segment(node.arena, number)))

    reader = PageReader(segment, name, NAMES[name], Trust(Verify.ALWAYS))
    pages = reader.look(packed, one)
    return reader.sound(pages, 0, pages.present) == 1


def save(node: Node, name: str, keys: list[bytes], parent: bytes = NO_PARENT, tail: Tail | None = None) -> int:
    """Store pages; how many were granted."""
    size = NAMES[name]
    number = open_namespace(node, name)
    tails = None if tail is None else {len(keys) - 1: tail}
    granted = node.answer(1, messages.Reserve(number, parent, b"".join(keys), tails))
    assert isinstance(granted, messages.Granted)
    wanted = [at for at, outcome in enumerate(granted.outcomes) if outcome == 0]
    refs = unpack_refs(granted.refs)
    sums = [write(node, ref.pack(), content(name, keys[at], size)) for at, ref in zip(wanted, refs, strict=True)]
    if wanted:
        commit(node, granted.reservation, wanted, sums)
    return len(wanted)


def open_namespace(node: Node, name: str) -> int:
    opened = node.answer(1, messages.Open(name, NAMES[name]))
    assert isinstance(opened, messages.Opened)
    return opened.namespace


class Restarts(RuleBasedStateMachine):
    """One client writes and reads; the node ends and begins, sometimes with a header that is damaged in between."""

    def __init__(self) -> None:
        super().__init__()
        self.now = [0.0]
        self.home = Path(tempfile.mkdtemp(prefix="ems-test-", dir="/dev/shm"))

    @initialize()
    def begin(self) -> None:
        self.node = start(self.home, self.now)
        self.held: list[tuple[int, str, dict[int, bytes], bytes]] = []
        self.leases: list[int] = []

    def run_of(self, path: str, length: int) -> tuple[list[bytes], bytes]:
        blocks = [path[: end + 1] for end in range(len(path))]
        first = max(len(blocks) - length, 0)
        return [key(block) for block in blocks[first:]], key(blocks[first - 1]) if first else NO_PARENT

    @rule(name=NAMED, path=PATHED, length=st.integers(1, 4), tail=st.booleans())
    def reserve(self, name: str, path: str, length: int, tail: bool) -> None:
        keys, parent = self.run_of(path, length)
        number = open_namespace(self.node, name)
        listed = Tail(parent, path.encode().ljust(8, b"\0")) if tail else None
        if listed is not None:
            keys[-1] = listed.key
        tails = None if listed is None else {len(keys) - 1: listed}
        granted = self.node.answer(1, messages.Reserve(number, parent, b"".join(keys), tails))
        assert isinstance(granted, messages.Granted)
        wanted = {at: keys[at] for at, outcome in enumerate(granted.outcomes) if outcome == 0}
        if wanted:
            self.held.append((granted.reservation, name, wanted, granted.refs))
        self.node.answered()

    @precondition(lambda self: self.held)
    @rule(data=st.data(), give_up=st.booleans())
    def end_reservation(self, data: st.DataObject, give_up: bool) -> None:
        number, name, keys, refs = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        if give_up:
            self.node.answer(1, messages.Abort(number))
        else:
            sums = [
                write(self.node, ref.pack(), content(name, one, NAMES[name]))
                for one, ref in zip(keys.values(), unpack_refs(refs), strict=True)
            ]
            commit(self.node, number, list(keys), sums)
        self.node.answered()

    @rule(name=NAMED, path=PATHED, length=st.integers(1, 4))
    def save(self, name: str, path: str, length: int) -> None:
        keys, parent = self.run_of(path, length)
        save(self.node, name, keys, parent)

    @rule(name=NAMED, path=PATHED, lease=st.booleans())
    def lookup(self, name: str, path: str, lease: bool) -> None:
        keys, _ = self.run_of(path, len(path))
        hits = self.node.answer(1, messages.Lookup(open_namespace(self.node, name), b"".join(keys), lease))
        assert isinstance(hits, messages.Hits)
        if hits.lease:
            self.leases.append(hits.lease)

    @precondition(lambda self: self.leases)
    @rule()
    def release(self) -> None:
        self.node.answer(1, messages.Release(self.leases.pop()))

    @rule(data=st.data())
    def flip(self, data: st.DataObject) -> None:
        """A bit of a page goes bad behind everybody's back."""
        pages = [(space, page) for space in self.node.core.namespaces for page in space.index if page.present]
        if pages:
            space, page = data.draw(st.sampled_from(pages))
            at = data.draw(st.integers(0, space.page_size - 1))
            memory = page_memory(self.node.arena, PageRef.unpack(page.ref), space.page_size)
            memory[at] ^= 1 << data.draw(st.integers(0, 7))

    @rule()
    def report(self) -> None:
        """A reader looks at everything and reports what is wrong."""
        quarantined = self.node.core.stats()["slots_quarantined"]
        assert isinstance(quarantined, int)
        count = 0
        for space in self.node.core.namespaces:
            present = [page for page in space.index if page.present]
            for page in [page for page in present if not sound(self.node, space.name, page.ref, page.key)]:
                told = self.node.answer(1, messages.Corrupt(space.number, page.key, page.ref))
                assert told == messages.Done(1)
                count += 1
        assert self.node.core.stats()["slots_quarantined"] == quarantined + count

    @rule(seconds=st.sampled_from([1.0, 11.0, REPLACE_SECONDS]))
    def tick(self, seconds: float) -> None:
        self.now[0] += seconds
        self.node.core.tick(self.now[0])
        self.node.arena.headers.forget(self.node.core.slots.freed())

    @rule(more=st.sampled_from([0, 0, 0, 1, -1]))
    def crash(self, more: int) -> None:
        before, listed = pages_of(self.node), tails_of(self.node.core)
        waiting = sum(len(refs) // REF_BYTES for _, _, _, refs in self.held)
        resting = len(self.node.core.deferred.segments()) > 0
        count = max(len(self.node.arena.sizes) + more, 1)
        kept = self.end(range(count))
        self.node = start(self.home, self.now, size=SEGMENT * count)
        found = pages_of(self.node)
        assert found == {one: data for one, data in before.items() if one in kept}
        assert tails_of(self.node.core) == {one for one in listed if one[:2] in found}
        if more == 0:
            assert self.node.core.stats()["slots_resting"] == waiting or resting

    def end(self, segments: Collection[int]) -> set[tuple[str, bytes]]:
        """End the node; the pages that lie in ``segments``."""
        kept = {
            (namespace.name, page.key)
            for namespace in self.node.core.namespaces
            for page in namespace.index
            if page.present and page.segment in segments
        }
        self.node.arena.close()
        self.held.clear()
        self.leases.clear()
        return kept

    @rule(data=st.data(), garbage=st.binary(min_size=1, max_size=HEADER_BYTES))
    def crash_with_a_torn_header(self, data: st.DataObject, garbage: bytes) -> None:
        segment = data.draw(st.integers(0, len(self.node.arena.sizes) - 1))
        geometry = self.node.core.slots.segments[segment].geometry
        slot = data.draw(st.integers(0, geometry.slot_count - 1)) if geometry else 0
        hurt = {
            (namespace.name, page.key)
            for namespace in self.node.core.namespaces
            for page in namespace.index
            if PageRef.unpack(page.ref)[:2] == (segment, slot)
        }
        before = pages_of(self.node)
        at = header_offset(slot) + data.draw(st.integers(0, HEADER_BYTES - len(garbage)))
        if geometry:
            map_segment(self.node.arena, segment)[at : at + len(garbage)] = garbage
        self.end(range(len(self.node.arena.sizes)))
        self.node = start(self.home, self.now, size=0, segment_size=0)
        found = pages_of(self.node)
        assert found.items() <= before.items()
        assert before.keys() - found.keys() <= hurt

    @rule(data=st.data(), at=st.integers(0, HEADERS_OFFSET - 1), bit=st.integers(0, 7))
    def crash_with_a_damaged_description(self, data: st.DataObject, at: int, bit: int) -> None:
        segment = data.draw(st.integers(0, len(self.node.arena.sizes) - 1))
        before = pages_of(self.node)
        map_segment(self.node.arena, segment)[at] ^= 1 << bit
        kept = self.end([number for number in range(len(self.node.arena.sizes)) if number != segment])
        self.node = start(self.home, self.now, size=0, segment_size=0)
        assert pages_of(self.node) == {one: data for one, data in before.items() if one in kept}

    @invariant()
    def the_brain_agrees_with_itself_and_with_the_headers(self) -> None:
        assert wrong_core(self.node.core) == []
        recovered = recover(self.node.arena.images())
        told = {(pages.name, one) for pages in recovered.namespaces for one, _, _ in pages.pages}
        assert told == pages_of(self.node).keys()

    @invariant()
    def no_wrong_byte_passes_and_no_right_one_is_refused(self) -> None:
        for space in self.node.core.namespaces:
            for page in space.index:
                if page.present:
                    wanted = content(space.name, page.key, space.page_size)
                    right = bytes_at(self.node, page.ref, space.page_size) == wanted
                    assert sound(self.node, space.name, page.ref, page.key) == right

    def teardown(self) -> None:
        if hasattr(self, "node"):
            self.node.core.disconnect(1, self.now[0], alive=False)
            for writer in self.node.core.deferred.writers:
                self.node.core.deferred.stopped(writer)
            figures = self.node.core.stats()
            assert (figures["leases"], figures["reservations"], figures["slots_resting"]) == (0, 0, 0)
            assert wrong_core(self.node.core) == []
            self.node.arena.close()
        shutil.rmtree(self.home)


Restarts.TestCase.settings = examples(20, stateful_step_count=20)
TestRestarts = Restarts.TestCase


class FirstDrawn:
    """Stands for what hypothesis draws: the first segment."""

    def draw(self, _strategy: object) -> int:
        return 0


def test_the_machine_knows_of_pages_in_segments_that_came_later() -> None:
    machine = Restarts()
    machine.begin()
    machine.crash(more=1)
    for name, path, length in (("large", "a", 1), ("small", "a", 1), ("large", "abcd", 2), ("large", "abx", 2)):
        machine.save(name, path, length)
    assert any(page.segment == SEGMENTS for space in machine.node.core.namespaces for page in space.index)
    machine.crash_with_a_damaged_description(data=FirstDrawn(), at=0, bit=0)
    machine.teardown()


# The order of use


@pytest.fixture
def home() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="ems-test-", dir="/dev/shm", ignore_cleanup_errors=True) as name:
        yield Path(name)


def test_pages_leave_in_the_order_in_which_they_came(home: Path) -> None:
    node = start(home, [0.0])
    old, new = chain("old", 2), chain("new", 2)
    save(node, "small", old)
    save(node, "small", new)
    save(node, "small", chain("old", 3)[2:], parent=old[1])
    node.arena.close()
    again = start(home, [0.0])
    assert order_of(again, "small") == [new[1], new[0], chain("old", 3)[2], old[1], old[0]]
    again.arena.close(keep=False)


def test_slots_of_writers_that_may_live_rest(home: Path) -> None:
    now = [100.0]
    node = start(home, now)
    number = open_namespace(node, "small")
    granted = node.answer(1, messages.Reserve(number, NO_PARENT, b"".join(chain("x", 3))))
    assert isinstance(granted, messages.Granted)
    node.arena.close()
    again = start(home, now)
    assert again.core.stats()["slots_resting"] == 3
    taken = again.answer(1, messages.Reserve(open_namespace(again, "small"), NO_PARENT, b"".join(chain("y", 50))))
    assert isinstance(taken, messages.Granted)
    slots = {ref[:2] for ref in unpack_refs(taken.refs)}
    assert not slots & {ref[:2] for ref in unpack_refs(granted.refs)}
    for _ in range(2):
        now[0] += REPLACE_SECONDS
        again.core.tick(now[0])
    assert again.core.stats()["slots_resting"] == 3, "time frees nothing"
    (writer,) = again.core.deferred.writers
    again.core.deferred.stopped(writer)
    assert again.core.stats()["slots_resting"] == 0
    again.arena.close(keep=False)


def test_generations_go_on(home: Path) -> None:
    """Who still reads for the old node must not take a new page for the one that it was promised."""
    node = start(home, [0.0])
    save(node, "small", chain("x", 1))
    (namespace,) = node.core.namespaces
    before = PageRef.unpack(next(iter(namespace.index)).ref)
    node.arena.close()
    again = start(home, [0.0])
    found = PageRef.unpack(next(iter(again.core.namespaces[0].index)).ref)
    assert found == before
    again.core.namespaces[0].index.discard(again.core.namespaces[0].index.get(chain("x", 1)[0]))  # type: ignore[arg-type]
    again.core.slots.give_back(found.pack())
    ref = PageRef.unpack(*again.core.slots.take(0, 1))
    assert ref[:2] == before[:2]
    assert ref.generation == before.generation + 1
    again.arena.close(keep=False)


def test_segments_of_another_size_or_version_begin_anew(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    node = start(home, [0.0])
    save(node, "small", chain("x", 1))
    node.arena.close()
    again = start(home, [0.0], segment_size=2 * SEGMENT)
    assert pages_of(again) == {}
    assert "do not fit a pool of segments of" in capsys.readouterr().out
    save(again, "small", chain("x", 1))
    map_segment(again.arena, 0)[8] = 1
    again.arena.close()
    third = start(home, [0.0], size=0, segment_size=0)
    assert pages_of(third) == {}
    assert "it has format 1, this release reads format 2" in capsys.readouterr().out
    third.arena.close(keep=False)


def test_fresh_drops_all(home: Path) -> None:
    node = start(home, [0.0])
    save(node, "small", chain("x", 1))
    node.arena.close()
    again = start(home, [0.0], fresh=True)
    assert pages_of(again) == {}
    assert again.core.stats()["segments_assigned"] == 0
    again.arena.close(keep=False)


def test_a_segment_that_others_could_have_written_to_is_not_read(home: Path) -> None:
    node = start(home, [0.0])
    save(node, "small", chain("x", 1))
    node.arena.close()
    (home / "pool" / "segment-00000").chmod(0o666)
    again = start(home, [0.0])
    assert pages_of(again) == {}
    again.arena.close(keep=False)


@pytest.mark.parametrize("stamp", [(1 << 64) - 1, MOST])
def test_a_node_goes_on_whatever_stamp_a_client_wrote(home: Path, stamp: int) -> None:
    node = start(home, [0.0])
    save(node, "small", chain("x", 2))
    forged = PageRef.unpack(next(iter(node.core.namespaces[0].index)).ref)
    mapped = map_segment(node.arena, forged.segment)
    header = unpack_header(memoryview(mapped), header_offset(forged.slot))
    write_header(mapped, forged.slot, header._replace(stamp=stamp))
    node.arena.close()
    again = start(home, [0.0])
    assert len(pages_of(again)) == 1
    assert again.arena.headers.stamp < 10
    assert save(again, "small", chain("y", 2)) == 2
    assert wrong_core(again.core) == []
    again.arena.close(keep=False)


# The pure function


def image(
    headers: dict[int, Header], page: int = SMALL, slots: int = 8, number: int = 0, name: str = "a"
) -> SegmentImage:
    size = segment_for(slots, page)
    raw = bytearray(size)
    raw[:HEADERS_OFFSET] = pack_description(Description(number, name, bytes(16), carve(size, page), 5, 9))
    for slot, header in headers.items():
        write_header(raw, slot, header)
    return SegmentImage(number, size, size, bytes(raw))


def told(page_size: int = SMALL, carving: int = 5) -> SegmentImage:
    """A segment whose description says so, over pages of :data:`SMALL` bytes."""
    size = segment_for(8, SMALL)
    raw = bytearray(image({0: page("x", 1)}).raw)
    raw[:HEADERS_OFFSET] = pack_description(Description(0, "a", bytes(16), carve(size, page_size), carving, 9))
    return SegmentImage(0, size, size, bytes(raw))


def page(name: str, stamp: int, parent: bytes = NO_PARENT, length: int = SMALL) -> Header:
    return Header(SlotState.PRESENT, 3, key(name), parent, stamp, length)


def keys_in(recovered: Recovered) -> list[bytes]:
    (pages,) = recovered.namespaces
    return [one for one, _, _ in pages.pages]


def test_of_two_pages_of_one_key_the_later_stays() -> None:
    recovered = recover([image({1: page("x", 7), 5: page("x", 9)})])
    (found,) = recovered.namespaces[0].pages
    assert PageRef.unpack(found[1]).slot == 5
    assert recovered.stale == [(0, 1)]
    assert recovered.segments[0].present == [5]
    assert recovered.stamp == 10
    assert recovered.carving == 6


def test_a_ring_of_prefixes_is_cut() -> None:
    ring = {slot: page(str(slot), slot + 1, key(str((slot + 1) % 5))) for slot in range(5)}
    recovered = recover([image({**ring, 6: page("6", 20, key("6"))})])
    pages = {one: before for one, _, before in recovered.namespaces[0].pages}
    assert len(pages) == 6
    for first, before in pages.items():
        seen, above = {first}, before
        while above in pages:
            assert above not in seen
            seen.add(above)
            above = pages[above]


def test_a_page_of_another_length_or_in_memory_that_is_not_there_is_lost() -> None:
    hurt = image({0: page("x", 1, length=5), 1: page("y", 1), 7: page("z", 1)})
    geometry = carve(hurt.size, SMALL)
    cut = SegmentImage(0, hurt.size, geometry.slot_offset(2), hurt.raw)
    recovered = recover([cut])
    assert keys_in(recovered) == [key("y")]
    assert recovered.lost == 2
    assert [PageRef.unpack(ref).slot for ref in recovered.segments[0].resting] == [0]


def test_quarantined_slots_are_used_again() -> None:
    recovered = recover([image({0: Header(SlotState.QUARANTINED, 4, key("x"))})])
    assert recovered.segments[0].resting == []
    assert recovered.segments[0].generations == [4] + [9] * (len(recovered.segments[0].generations) - 1)


def test_one_namespace_has_one_page_size() -> None:
    recovered = recover([image({0: page("x", 1)}), image({0: page("y", 2, length=LARGE)}, LARGE, 2, 1)])
    assert keys_in(recovered) == [key("x")]
    assert [one.segment for one in recovered.unreadable] == [1]


def test_a_stamp_that_no_node_gave_makes_a_header_unsound() -> None:
    recovered = recover([image({0: page("x", MOST - 1), 1: page("y", MOST), 2: page("z", (1 << 64) - 1)})])
    assert keys_in(recovered) == [key("x")]
    assert (recovered.lost, recovered.stamp) == (2, MOST)
    assert [PageRef.unpack(ref).slot for ref in recovered.segments[0].resting] == [1, 2]


def test_a_carving_that_no_node_gave_makes_a_segment_unreadable() -> None:
    recovered = recover([told(carving=MOST)])
    assert [(one.segment, one.reason) for one in recovered.unreadable] == [(0, "its description is damaged")]
    assert recovered.carving == 1
    assert recover([told(carving=MOST - 1)]).carving == MOST


@pytest.mark.parametrize("page_size", [0, 1 << 30, 1 << 32, (1 << 64) - 4096])
def test_pages_that_a_segment_cannot_hold_make_it_unreadable(page_size: int) -> None:
    recovered = recover([told(page_size)])
    assert [one.segment for one in recovered.unreadable] == [0]
    assert recovered.namespaces == []


@given(
    st.integers(0, (1 << 64) - 4096),
    st.integers(0, (1 << 64) - 1),
    st.lists(
        st.builds(
            Header,
            st.integers(0, 5),
            st.integers(0, (1 << 32) - 1),
            st.sampled_from([key("x"), key("y")]),
            st.sampled_from([NO_PARENT, key("x"), key("y")]),
            st.integers(0, (1 << 64) - 1),
            st.sampled_from([0, SMALL, (1 << 32) - 1]),
            st.just(0),
            st.just(0),
        ),
        max_size=8,
    ),
)
def test_no_forged_number_brings_a_node_down(page_size: int, carving: int, headers: list[Header]) -> None:
    """A client can write into its segments, with a right checksum too."""
    for described in (told(page_size, carving), told(SMALL, carving), told()):
        raw = bytearray(described.raw)
        for slot, header in enumerate(headers):
            write_header(raw, slot, header)
        recovered = recover([SegmentImage(0, described.size, described.size, bytes(raw))])
        assert 0 < recovered.stamp <= MOST
        assert 0 < recovered.carving <= MOST
        core = PoolCore([described.size])
        core.slots.touch(0, described.size)
        core.adopt(recovered, {}, 0.0)
        assert wrong_core(core) == []


@given(st.binary(max_size=2 * HEADERS_OFFSET), st.integers(0, 1 << 20))
def test_no_bytes_bring_it_down(raw: bytes, at: int) -> None:
    whole = bytearray(image({0: page("x", 1), 1: page("y", 2)}).raw)
    at %= len(whole)
    whole[at : at + len(raw)] = raw[: len(whole) - at]
    recovered = recover([SegmentImage(0, len(whole), len(whole), bytes(whole))])
    for namespace in recovered.namespaces:
        assert {one for one, _, _ in namespace.pages} <= {key("x"), key("y")}
