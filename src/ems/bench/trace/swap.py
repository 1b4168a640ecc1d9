"""Another process becomes the node in the middle of a trace: what does that cost in hits?

Headers and files are in memory here, and everything else is what runs in a node: the state that a node hands over, and
what recovery makes of the headers of a node that was stopped or killed.
"""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

from ems.pool.core.handover import CoreState
from ems.pool.core.pool_core import PoolCore
from ems.pool.keys import NO_PARENT
from ems.pool.policy.experience import Experience, all_at_once, pack_experience, take_down, unpack_experience
from ems.pool.segments.layout import (
    HEADER_BYTES,
    HEADERS_OFFSET,
    Description,
    Header,
    PageRef,
    SlotState,
    pack_description,
    write_header,
)
from ems.pool.segments.recovery import SegmentImage, recover

Swap = Literal["hand-over", "stop", "kill", "oblivion"]
"""How the node ends: with all it knows, with its file of experience, with one that was written before, with none."""
SWAPS: tuple[Swap, ...] = get_args(Swap)


def written_down(core: PoolCore) -> bytes:
    """What a node that serves has written down of its policies' experience."""
    taking = take_down(core.policies())
    known: list[Experience] = []
    while True:
        try:
            next(taking)
        except StopIteration as end:
            known = end.value
            break
    return b"".join(pack_experience(known))


def swap_into(successor: PoolCore, core: PoolCore, swap: Swap, written: bytes) -> None:
    """Let ``successor``, whose memory was touched like that of ``core``, go on from there; both know one namespace.

    ``written`` is the file that a killed node leaves.
    """
    if swap == "hand-over":
        raw = msgspec.msgpack.encode(core.snapshot())
        successor.resume(msgspec.msgpack.decode(raw, type=CoreState))
        return
    if swap == "stop":
        written = b"".join(pack_experience(all_at_once(core.policies())))
    known = unpack_experience(written) if swap != "oblivion" else {}
    segment = core.space.segments[0]
    successor.adopt(recover([SegmentImage(0, segment.size, segment.touched, _image(core))]), [], 0.0, known)


def _image(core: PoolCore) -> bytes:
    """The beginning of the only segment, as the node would have written it."""
    namespace, segment = core.namespaces[0], core.space.segments[0]
    assert segment.geometry is not None
    raw = bytearray(HEADERS_OFFSET + segment.geometry.slot_count * HEADER_BYTES)
    description = Description(0, namespace.name, bytes(16), segment.geometry, 1, 1)
    raw[:HEADERS_OFFSET] = pack_description(description)
    for stamp, page in enumerate(namespace.index, start=1):
        ref = PageRef.unpack(page.ref)
        parent = NO_PARENT if page.parent is None else page.parent.key
        header = Header(SlotState.PRESENT, ref.generation, page.key, parent, stamp, namespace.page_size)
        write_header(raw, ref.slot, header)
    return bytes(raw)
