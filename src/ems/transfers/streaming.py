"""Many copies of host memory in one call: past the processor's caches, and with the checksums of what passes through.

Pages are larger than caches: what is written into them with ordinary instructions is first read for that, for nothing,
and takes the place of what the engine computes with.  Here whole cache lines are written, three lanes side by side,
which keeps memory busy: faster than ``memcpy`` by a quarter and more.  The checksum (CRC32C) is that of the bytes as
they are copied and costs next to nothing; computed afterwards it would read them again.  No library does both at once.

A processor takes a load for one of what was just stored where both addresses have the same last twelve bits, and waits:
that costs nine tenths of the speed, and it is common, since the memory of engines and slots begins at pages.  Such
copies go by way of a buffer in the nearest cache, which lies half a page beside both.

Compiled when it is first needed, which takes half a second each.  What always holds: when a call returns, everybody
sees what it wrote; the interpreter is free meanwhile.
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import binding, ir  # type: ignore[import-untyped, unused-ignore]
from numba import njit, types  # type: ignore[import-untyped, unused-ignore]
from numba.core import cgutils  # type: ignore[import-untyped, unused-ignore]
from numba.extending import intrinsic  # type: ignore[import-untyped, unused-ignore]

from ems.pool.layout import crc32c
from ems.transfers.checksums import NOTHING, PageSums
from ems.transfers.plan import CopyPlan, Numbers

LINE = 64
"""Bytes that are written at a time: a cache line, or a whole number of them."""
LANES = (4096, 1024, 256)
"""Bytes of each of three lanes; what remains of a copy is tried with the next smaller ones."""
ALIAS = 4096
"""Bytes after which addresses look the same to a processor that compares a load with the stores before it."""
NEAR = 704
"""So many of these, from a line before its source on, are where a target looks the same while it is written."""

_ROOM = 3 * max(LANES) + ALIAS + LINE

_BYTE, _HALF, _INT, _LONG = map(ir.IntType, (8, 16, 32, 64))
_LINE = ir.VectorType(_LONG, LINE // 8)

# The processor's instructions for CRC32C: the feature that has them, and their names by the bytes that they take.
_ARM = platform.machine() in {"aarch64", "arm64"}
_FEATURE = "crc" if _ARM else "sse4.2"
_NAMES = (
    {1: "llvm.aarch64.crc32cb", 2: "llvm.aarch64.crc32ch", 4: "llvm.aarch64.crc32cw", 8: "llvm.aarch64.crc32cx"}
    if _ARM
    else {
        1: "llvm.x86.sse42.crc32.32.8", 2: "llvm.x86.sse42.crc32.32.16",
        4: "llvm.x86.sse42.crc32.32.32", 8: "llvm.x86.sse42.crc32.64.64",
    }
)  # fmt: skip


def _move(kind: ir.Type, align: int, *, past_caches: bool = False) -> Any:
    """An operation ``(target, source)``: copies a value of ``kind`` to an address that is a multiple of ``align``."""

    @intrinsic  # type: ignore[untyped-decorator, unused-ignore]
    def move(_typing: Any, target: Any, source: Any) -> Any:  # noqa: ARG001 - by these names it is called
        def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            target, source = (builder.inttoptr(one, kind.as_pointer()) for one in arguments)
            value = builder.load(source, align=1)
            store = builder.store(value, target, align=align)
            if past_caches:
                store.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(_INT, 1)]))
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), generate

    return move


def _add(size: int, words: int = 1) -> Any:
    """An operation ``(checksum, source)``: the checksum with ``words`` values of ``size`` bytes added."""

    @intrinsic  # type: ignore[untyped-decorator, unused-ignore]
    def add(_typing: Any, checksum: Any, source: Any) -> Any:  # noqa: ARG001 - by these names it is called
        def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            kind = ir.IntType(8 * size)
            state = _LONG if size == 8 and not _ARM else _INT
            operand = _INT if _ARM and size < 4 else kind
            name = _NAMES[size]
            call = cgutils.get_or_insert_function(builder.module, ir.FunctionType(state, [state, operand]), name)
            value = arguments[0] if state is _LONG else builder.trunc(arguments[0], state)
            for word in range(words):
                place = builder.inttoptr(builder.add(arguments[1], ir.Constant(_LONG, word * size)), kind.as_pointer())
                loaded = builder.load(place, align=1)
                value = builder.call(call, [value, loaded if operand == kind else builder.zext(loaded, operand)])
            return value if state is _LONG else builder.zext(value, _LONG)

        return types.int64(types.int64, types.int64), generate

    return add


@intrinsic  # type: ignore[untyped-decorator, unused-ignore]
def _fetch(_typing: Any, _address: Any) -> Any:
    """Have a cache line brought near that will be read soon; harmless where there is none."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [_BYTE.as_pointer(), _INT, _INT, _INT])
        call = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        address = builder.inttoptr(arguments[0], _BYTE.as_pointer())
        builder.call(call, [address, *(ir.Constant(_INT, number) for number in (0, 3, 1))])
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic  # type: ignore[untyped-decorator, unused-ignore]
def _settle(_typing: Any) -> Any:
    """What was written past the caches is there for everybody before what follows."""

    def generate(context: Any, builder: Any, _signature: Any, _arguments: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic  # type: ignore[untyped-decorator, unused-ignore]
def _nothing(_typing: Any, checksum: Any, source: Any) -> Any:  # noqa: ARG001 - as _add has them
    return types.int64(types.int64, types.int64), lambda _context, _builder, _signature, arguments: arguments[0]


_move_1, _move_2, _move_4, _move_8 = (_move(kind, 1) for kind in (_BYTE, _HALF, _INT, _LONG))
_move_line, _keep_line = _move(_LINE, LINE, past_caches=True), _move(_LINE, 1)


def _lane_tables() -> Any:
    """For each of :data:`LANES` what that many zero bytes make of a checksum, by its four bytes and their values."""
    tables = np.zeros((len(LANES), 4, 256), np.int64)
    for table, lane in zip(tables, LANES, strict=True):
        for bit in range(32):
            effect = crc32c(bytes(lane), 1 << bit ^ NOTHING) ^ NOTHING
            table[bit // 8, np.arange(256) >> bit % 8 & 1 == 1] ^= effect
    return tables


def _copier(add_1: Any, add_2: Any, add_4: Any, add_8: Any, add_line: Any) -> Any:  # noqa: C901, PLR0915 - parts are inlined
    """A copy ``(target, source, size, checksum, tables, room)`` that returns the checksum after these bytes.

    ``room`` is the address of :data:`_ROOM` bytes that it may use.
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

    @njit(inline="always")  # type: ignore[untyped-decorator, unused-ignore]
    def passed(table: Any, checksum: int) -> int:
        """What a lane of zero bytes makes of ``checksum``."""
        low = table[0, checksum & 255] ^ table[1, checksum >> 8 & 255]
        return low ^ table[2, checksum >> 16 & 255] ^ table[3, checksum >> 24]  # type: ignore[no-any-return]

    @njit(nogil=True)  # type: ignore[untyped-decorator, unused-ignore]
    def copy(target: int, source: int, size: int, checksum: int, tables: Any, room: int) -> int:
        begun = min(-target & (LINE - 1), size)
        checksum = some(target, source, begun, checksum)
        ahead, at, end = target - source, source + begun, source + size
        aliased = (ahead + LINE) % ALIAS < NEAR
        number = 0
        for lane in LANES:
            while at + 3 * lane <= end:
                second = third = np.int64(0)
                begin, onward = at, ahead
                if aliased:
                    begin = (room + LINE + (at + ALIAS // 2 - room) % ALIAS) & -LINE
                    onward = at + ahead - begin
                    for a in range(at, at + 3 * lane, LINE):
                        _fetch(a + 3 * lane)
                        _keep_line(begin + a - at, a)
                for a in range(begin, begin + lane, LINE):
                    b, c = a + lane, a + 2 * lane
                    if not aliased:
                        _fetch(c + lane)
                        _fetch(c + 2 * lane)
                        _fetch(c + 3 * lane)
                    _move_line(a + onward, a)
                    _move_line(b + onward, b)
                    _move_line(c + onward, c)
                    checksum, second, third = add_line(checksum, a), add_line(second, b), add_line(third, c)
                checksum = passed(tables[number], passed(tables[number], checksum) ^ second) ^ third
                at += 3 * lane
            number += 1  # noqa: SIM113 - the compiler knows no enumerate over a tuple that it unrolls
        while at + LINE <= end:
            _move_line(at + ahead, at)
            checksum = add_line(checksum, at)
            at += LINE
        return some(at + ahead, at, end - at, checksum)  # type: ignore[no-any-return, unused-ignore]

    return copy


@functools.cache
def copy_all() -> Callable[[Numbers, Numbers, Numbers], None]:
    """The call that copies; it takes targets, sources and sizes."""
    one, tables = _copier(*5 * [_nothing]), _lane_tables()

    @njit("void(int64[::1], int64[::1], int64[::1], int64[:, :, ::1])", nogil=True)  # type: ignore[untyped-decorator, unused-ignore]
    def copy(targets: Numbers, sources: Numbers, sizes: Numbers, tables: Any) -> None:
        room = np.empty(_ROOM, np.uint8)
        for number in range(len(sizes)):
            one(targets[number], sources[number], sizes[number], 0, tables, room.ctypes.data)
        _settle()

    return lambda targets, sources, sizes: copy(targets, sources, sizes, tables)


@functools.cache
def copy_summed() -> Callable[[Numbers, Numbers, Numbers, Numbers, Numbers, Numbers], None] | None:
    """The same with checksums; None where the processor has no instruction for them.

    It takes besides whose each copy is, and by owner the sums so far and the bytes that are in them; it goes on with
    both.
    """
    if not binding.get_host_cpu_features().get(_FEATURE, False):
        return None
    one, tables = _copier(_add(1), _add(2), _add(4), _add(8), _add(8, LINE // 8)), _lane_tables()

    @njit(  # type: ignore[untyped-decorator, unused-ignore]
        "void(int64[::1], int64[::1], int64[::1], int64[::1], int64[::1], int64[::1], int64[:, :, ::1])", nogil=True
    )
    def copy(
        targets: Numbers, sources: Numbers, sizes: Numbers, owners: Numbers, sums: Numbers, summed: Numbers, tables: Any
    ) -> None:
        room = np.empty(_ROOM, np.uint8)
        for number in range(len(sizes)):
            owner, size = owners[number], sizes[number]
            sums[owner] = one(targets[number], sources[number], size, sums[owner], tables, room.ctypes.data)
            summed[owner] += size
        _settle()

    return lambda *arguments: copy(*arguments, tables)


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
