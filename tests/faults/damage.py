"""Bits that flip: in pages, in headers, in descriptions, in the file of tokens."""

from __future__ import annotations

from ems.pool.layout import HEADER_BYTES, HEADERS_OFFSET, SlotState, header_offset, unpack_header
from tests.faults.world import World
from tests.pool.segment_memory import map_segment

FIELDS = (24, 40, 48, 52, 56)
"""Where in a header the key of the block before, the stamp, the length, the checksum and the flags begin."""


def slots(world: World, wanted: SlotState | None = None) -> list[tuple[int, int]]:
    """Slots that have been carved, those in a state if one is wanted."""
    found = []
    for segment in world.node.core.slots.segments:
        if segment.geometry is not None:
            mapped = map_segment(world.node.arena, segment.number)
            states = [unpack_header(mapped, header_offset(slot)).state for slot in range(segment.geometry.slot_count)]
            found += [(segment.number, slot) for slot, state in enumerate(states) if wanted in (None, state)]
    return found


def flip(world: World, segment: int, offset: int, bit: int) -> None:
    """Flip one bit as bad memory does: nobody's write."""
    mapped = map_segment(world.node.arena, segment)
    mapped[offset] ^= 1 << bit % 8
    mapped.release()


def flip_payload(world: World, a: int, b: int, c: int) -> None:
    """A bit of a slot's bytes is wrong."""
    found = slots(world, SlotState.PRESENT if a % 4 else None)
    if found:
        number, slot = found[a // 4 % len(found)]
        segment = world.node.core.slots.segments[number]
        assert segment.geometry is not None
        world.hurt[number, slot, segment.generations[slot]] = world.life
        flip(world, number, segment.geometry.slot_offset(slot) + b % segment.geometry.page_size, c)


def flip_header(world: World, a: int, b: int, c: int) -> None:
    """A bit of a slot's header is wrong."""
    found = slots(world, SlotState.PRESENT if a % 2 else None)
    if found:
        number, slot = found[a // 2 % len(found)]
        world.hurt_headers.add((number, slot))
        world.loosen((number, slot))
        flip(world, number, header_offset(slot) + b % HEADER_BYTES, c)


def flip_both(world: World, a: int, b: int, c: int) -> None:
    """Bits of a page's bytes and of what its header says about them are wrong."""
    found = slots(world, SlotState.PRESENT)
    if found:
        number, slot = found[a % len(found)]
        segment = world.node.core.slots.segments[number]
        assert segment.geometry is not None
        world.hurt[number, slot, segment.generations[slot]] = world.life
        world.hurt_headers.add((number, slot))
        flip(world, number, segment.geometry.slot_offset(slot) + b % segment.geometry.page_size, c)
        flip(world, number, header_offset(slot) + FIELDS[b % len(FIELDS)], c % 3)


def flip_description(world: World, a: int, b: int, c: int) -> None:
    """A bit of a segment's description is wrong."""
    number = a % len(world.node.arena.sizes)
    if world.node.core.slots.segments[number].namespace is not None:
        world.hurt_segments.add(number)
        flip(world, number, b % (128 if b % 2 else HEADERS_OFFSET), c)


def flip_tails(world: World, _a: int, b: int, c: int) -> None:
    """A bit of the file of tokens is wrong."""
    path = world.home / "pool" / "tails"
    if path.is_file() and path.stat().st_size:
        raw = bytearray(path.read_bytes())
        raw[b % len(raw)] ^= 1 << c % 8
        with path.open("r+b") as file:
            file.write(raw)
        world.tails_hurt = True
