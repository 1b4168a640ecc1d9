"""Many copies of host memory in one call: past the processor's caches, and with the checksums of what passes through.

Pages are larger than caches: what is written into them with ordinary instructions is first read for that, for nothing,
and takes the place of what the engine computes with.  Here whole cache lines are written, and those to be read are
fetched in time, across the ends of copies: faster than ``memcpy`` by a quarter and more.  The checksum (CRC32C) is that
of the bytes as they are copied and costs next to nothing; computed afterwards it would read them again.  No library
does both at once.  Where the processor multiplies without carries in wide registers, sums are folded; elsewhere three
lanes are copied side by side, since the instruction for a sum takes as long as three of it begin.

Some processors take a load for one of what was just stored where both addresses have the same last twelve bits, and
wait: that costs nine tenths of the speed, and it is common, since the memory of engines and slots begins at pages.
There, such copies go by way of a buffer in the nearest cache, which lies half a page beside both.  Whether this
processor is one of them is tried once.

Compiled when it is first needed, which takes half a second each.  What always holds: when a call returns, everybody
sees what it wrote; the interpreter is free meanwhile.
"""

from __future__ import annotations

import functools
import timeit
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit  # type: ignore[import-untyped, unused-ignore]

from ems.pool.layout import crc32c
from ems.transfers.checksums import NOTHING, PageSums
from ems.transfers.intrinsics import (
    BYTE,
    FOLDS,
    HALF,
    INT,
    LINE,
    LINE_OF_LONGS,
    LONG,
    SUMS,
    add,
    copy_lines,
    fetch,
    move,
    nothing,
    settle,
)
from ems.transfers.plan import CopyPlan, Numbers

LANES = (4096, 1024, 256)
"""Bytes of each of three lanes; what remains of a copy is tried with the next smaller ones."""
AHEAD = 4096
"""So many bytes before it is copied a line is fetched, where there are no lanes."""
ALIAS = 4096
"""Bytes after which addresses look the same to a processor that compares a load with the stores before it."""
NEAR = 704
"""So many of these, from a line before its source on, are where a target looks the same while it is written."""
_TRIED = 1 << 16
"""Bytes that are copied to see what that costs; the best of :data:`_TRIES` counts."""
_TRIES = 7

_CHUNK = 3 * max(LANES)
"""Bytes that go by way of the buffer at a time."""
_ROOM = _CHUNK + ALIAS + LINE

_move_1, _move_2, _move_4, _move_8 = (move(kind, 1) for kind in (BYTE, HALF, INT, LONG))
_move_line, _keep_line = move(LINE_OF_LONGS, LINE, past_caches=True), move(LINE_OF_LONGS, 1)
_add_1, _add_2, _add_4, _add_8, _add_line = add(1), add(2), add(4), add(8), add(8, LINE // 8)


def _lane_tables() -> Any:
    """For each of :data:`LANES` what that many zero bytes make of a checksum, by its four bytes and their values."""
    tables = np.zeros((len(LANES), 4, 256), np.int64)
    for table, lane in zip(tables, LANES, strict=True):
        for bit in range(32):
            effect = crc32c(bytes(lane), 1 << bit ^ NOTHING) ^ NOTHING
            table[bit // 8, np.arange(256) >> bit % 8 & 1 == 1] ^= effect
    return tables


def _in_lanes(add_line: Any) -> Any:
    """Whole lines, in three lanes side by side as far as there are enough; as :func:`copy_lines` has them."""
    tables = _lane_tables()

    @njit(inline="always")  # type: ignore[untyped-decorator, unused-ignore]
    def passed(table: Any, checksum: int) -> int:
        """What a lane of zero bytes makes of ``checksum``."""
        low = table[0, checksum & 255] ^ table[1, checksum >> 8 & 255]
        return low ^ table[2, checksum >> 16 & 255] ^ table[3, checksum >> 24]  # type: ignore[no-any-return]

    @njit(nogil=True)  # type: ignore[untyped-decorator, unused-ignore]
    def lines(target: int, source: int, count: int, checksum: int, _ahead: int, _following: int) -> int:
        onward, at, end = target - source, source, source + count * LINE
        number = 0
        for lane in LANES:
            while at + 3 * lane <= end:
                second = third = np.int64(0)
                for a in range(at, at + lane, LINE):
                    b, c = a + lane, a + 2 * lane
                    fetch(c + lane)
                    fetch(c + 2 * lane)
                    fetch(c + 3 * lane)
                    _move_line(a + onward, a)
                    _move_line(b + onward, b)
                    _move_line(c + onward, c)
                    checksum, second, third = add_line(checksum, a), add_line(second, b), add_line(third, c)
                checksum = passed(tables[number], passed(tables[number], checksum) ^ second) ^ third
                at += 3 * lane
            number += 1  # noqa: SIM113 - the compiler knows no enumerate over a tuple that it unrolls
        while at < end:
            _move_line(at + onward, at)
            checksum = add_line(checksum, at)
            at += LINE
        return checksum

    return lines


def _copier(add_1: Any, add_2: Any, add_4: Any, add_8: Any, lines: Any) -> Any:  # noqa: C901 - parts are inlined
    """A copy ``(target, source, size, checksum, following, near, room)`` that returns the checksum after these bytes.

    ``following`` is the source of the next one, ``near`` as :data:`NEAR`, ``room`` the address of :data:`_ROOM` bytes
    that it may use.
    """

    @njit(nogil=True)  # type: ignore[untyped-decorator, unused-ignore]
    def some(target: int, source: int, size: int, checksum: int) -> int:
        ahead, end = target - source, source + size
        while source + 8 <= end:
            _move_8(source + ahead, source)
            checksum = add_8(checksum, source)
            source += 8
        if size & 4:
            _move_4(source + ahead, source)
            checksum = add_4(checksum, source)
            source += 4
        if size & 2:
            _move_2(source + ahead, source)
            checksum = add_2(checksum, source)
            source += 2
        if size & 1:
            _move_1(source + ahead, source)
            checksum = add_1(checksum, source)
        return checksum

    @njit(nogil=True)  # type: ignore[untyped-decorator, unused-ignore]
    def copy(target: int, source: int, size: int, checksum: int, following: int, near: int, room: int) -> int:
        begun = min(-target & (LINE - 1), size)
        checksum = some(target, source, begun, checksum)
        ahead, at, end = target - source, source + begun, source + size
        whole = (end - at) & -LINE
        if (ahead + LINE) % ALIAS < near:
            begin = (room + LINE + (at + ALIAS // 2 - room) % ALIAS) & -LINE
            soon = min(whole, AHEAD)
            while whole:
                chunk = min(whole, _CHUNK)
                for a in range(0, chunk, LINE):
                    fetch(at + a + soon if a + soon < whole else following + a + soon - whole)
                    _keep_line(begin + a, at + a)
                checksum = lines(at + ahead, begin, chunk // LINE, checksum, LINE, begin)
                at += chunk
                whole -= chunk
        elif whole:
            checksum = lines(at + ahead, at, whole // LINE, checksum, min(whole, AHEAD), following)
            at += whole
        return some(at + ahead, at, end - at, checksum)  # type: ignore[no-any-return, unused-ignore]

    return copy


@functools.cache
def _compiled(folds: int) -> Any:
    lines = copy_lines(folds, summed=False) if folds else _in_lanes(nothing)
    one = _copier(nothing, nothing, nothing, nothing, lines)

    @njit("void(int64[::1], int64[::1], int64[::1], int64)", nogil=True)  # type: ignore[untyped-decorator, unused-ignore]
    def copy(targets: Numbers, sources: Numbers, sizes: Numbers, near: int) -> None:
        room = np.empty(_ROOM, np.uint8)
        for number in range(len(sizes)):
            following = sources[min(number + 1, len(sizes) - 1)]
            one(targets[number], sources[number], sizes[number], 0, following, near, room.ctypes.data)
        settle()

    return copy


@functools.cache
def near_here(folds: int = FOLDS) -> int:
    """:data:`NEAR` where this processor waits for stores to places that look the same, else 0."""
    memory, copy = np.zeros(2 * _TRIED + 2 * ALIAS, np.uint8), _compiled(folds)
    source = memory.ctypes.data
    alike = source + _TRIED + -_TRIED % ALIAS + NEAR // 2

    def taken(target: int) -> float:
        call = functools.partial(copy, *(np.array([one], np.int64) for one in (target, source, _TRIED)), 0)
        return min(timeit.repeat(call, number=1, repeat=_TRIES))

    return NEAR if taken(alike) > 2 * taken(alike + ALIAS // 2) else 0


@functools.cache
def copy_all(folds: int = FOLDS, near: int | None = None) -> Callable[[Numbers, Numbers, Numbers], None]:
    """The call that copies; it takes targets, sources and sizes."""
    copy, near = _compiled(folds), near_here(folds) if near is None else near
    return lambda targets, sources, sizes: copy(targets, sources, sizes, near)


@functools.cache
def copy_summed(
    folds: int = FOLDS, near: int | None = None
) -> Callable[[Numbers, Numbers, Numbers, Numbers, Numbers, Numbers], None] | None:
    """The same with checksums; None where the processor has no instruction for them.

    It takes besides whose each copy is, and by owner the sums so far and the bytes that are in them; it goes on with
    both.
    """
    if not SUMS:
        return None
    near = near_here(folds) if near is None else near
    one = _copier(_add_1, _add_2, _add_4, _add_8, copy_lines(folds, summed=True) if folds else _in_lanes(_add_line))

    @njit(  # type: ignore[untyped-decorator, unused-ignore]
        "void(int64[::1], int64[::1], int64[::1], int64[::1], int64[::1], int64[::1], int64)", nogil=True
    )
    def copy(
        targets: Numbers, sources: Numbers, sizes: Numbers, owners: Numbers, sums: Numbers, summed: Numbers, near: int
    ) -> None:
        room = np.empty(_ROOM, np.uint8)
        for number in range(len(sizes)):
            owner, size, following = owners[number], sizes[number], sources[min(number + 1, len(sizes) - 1)]
            sums[owner] = one(targets[number], sources[number], size, sums[owner], following, near, room.ctypes.data)
            summed[owner] += size
        settle()

    return lambda *arguments: copy(*arguments, near)


class HostCopies:
    """Copies between an engine's memory and pages where both are memory of this host."""

    def __init__(self) -> None:
        self._copy = copy_all()
        self._copy_summed = copy_summed()
        self.sums = self._copy_summed is not None
        """Whether :meth:`copy` takes checksums."""

    def copy(self, plan: CopyPlan, sums: PageSums | None = None) -> None:
        """Copy what ``plan`` says, and add it to the ``sums`` of its pages where it knows its slots."""
        if self._copy_summed is None or sums is None or plan.slots is None:
            self._copy(plan.targets, plan.sources, plan.sizes)
        else:
            self._copy_summed(plan.targets, plan.sources, plan.sizes, plan.slots, sums.sums, sums.summed)
