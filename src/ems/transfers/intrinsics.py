"""Single instructions of the processor, for the copies that Numba compiles: it has no words for them.

Each is an operation on addresses and integers.  Nothing here checks an address.

Checksums (CRC32C) are computed in one of two ways.  :func:`add` has the instruction that takes eight bytes at a time.
:func:`copy_lines` folds: two carry-less multiplications for every sixteen bytes bring the sum of one line of 64 bytes
to that of the next, so that only the last line goes through the instruction.  It needs wide multiplications to be the
faster one.  Source: Gopal et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction" (Intel).
"""

from __future__ import annotations

import platform
from typing import Any

from llvmlite import binding, ir  # type: ignore[import-untyped, unused-ignore]
from numba import types  # type: ignore[import-untyped, unused-ignore]
from numba.core import cgutils, config  # type: ignore[import-untyped, unused-ignore]
from numba.extending import intrinsic  # type: ignore[import-untyped, unused-ignore]

LINE = 64
"""Bytes that are written at a time: a cache line, or a whole number of them."""

BYTE, HALF, INT, LONG = map(ir.IntType, (8, 16, 32, 64))
LINE_OF_LONGS = ir.VectorType(LONG, LINE // 8)

_ARM = platform.machine() in {"aarch64", "arm64"}
_OTHER_TARGET = config.CPU_NAME is not None or config.CPU_FEATURES is not None
"""Whether Numba is told to compile for another processor than this one, of which nothing is known here."""
_FEATURES = {} if _OTHER_TARGET else binding.get_host_cpu_features()
SUMS = bool(_FEATURES.get("crc" if _ARM else "sse4.2", False))
"""Whether the processor has the instruction for CRC32C."""
_WIDTH = 512 if _FEATURES.get("avx512f", False) else 256
FOLDS = _WIDTH if SUMS and config.ENABLE_AVX and _FEATURES.get("vpclmulqdq", False) else 0
"""Bits that its carry-less multiplication takes at once; 0 where it does not take several factors."""

# The names of the instruction for CRC32C, by the bytes that it takes.
_NAMES = (
    {1: "llvm.aarch64.crc32cb", 2: "llvm.aarch64.crc32ch", 4: "llvm.aarch64.crc32cw", 8: "llvm.aarch64.crc32cx"}
    if _ARM
    else {
        1: "llvm.x86.sse42.crc32.32.8", 2: "llvm.x86.sse42.crc32.32.16",
        4: "llvm.x86.sse42.crc32.32.32", 8: "llvm.x86.sse42.crc32.64.64",
    }
)  # fmt: skip


def _go_past_caches(builder: Any, store: Any) -> None:
    store.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(INT, 1)]))


def _prefetch(builder: Any, address: Any) -> None:
    kind = ir.FunctionType(ir.VoidType(), [BYTE.as_pointer(), INT, INT, INT])
    call = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
    builder.call(call, [builder.inttoptr(address, BYTE.as_pointer()), *(ir.Constant(INT, n) for n in (0, 3, 1))])


def move(kind: ir.Type, align: int, *, past_caches: bool = False) -> Any:
    """An operation ``(target, source)``: copies a value of ``kind`` to an address that is a multiple of ``align``."""

    @intrinsic  # type: ignore[untyped-decorator, unused-ignore]
    def operation(_typing: Any, target: Any, source: Any) -> Any:  # noqa: ARG001 - by these names it is called
        def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            target, source = (builder.inttoptr(one, kind.as_pointer()) for one in arguments)
            value = builder.load(source, align=1)
            store = builder.store(value, target, align=align)
            if past_caches:
                _go_past_caches(builder, store)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), generate

    return operation


def add(size: int, words: int = 1) -> Any:
    """An operation ``(checksum, source)``: the checksum with ``words`` values of ``size`` bytes added."""

    @intrinsic  # type: ignore[untyped-decorator, unused-ignore]
    def operation(_typing: Any, checksum: Any, source: Any) -> Any:  # noqa: ARG001 - by these names it is called
        def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            kind = ir.IntType(8 * size)
            state = LONG if size == 8 and not _ARM else INT
            operand = INT if _ARM and size < 4 else kind
            name = _NAMES[size]
            call = cgutils.get_or_insert_function(builder.module, ir.FunctionType(state, [state, operand]), name)
            value = arguments[0] if state is LONG else builder.trunc(arguments[0], state)
            for word in range(words):
                place = builder.inttoptr(builder.add(arguments[1], ir.Constant(LONG, word * size)), kind.as_pointer())
                loaded = builder.load(place, align=1)
                value = builder.call(call, [value, loaded if operand == kind else builder.zext(loaded, operand)])
            return value if state is LONG else builder.zext(value, LONG)

        return types.int64(types.int64, types.int64), generate

    return operation


@intrinsic  # type: ignore[untyped-decorator, unused-ignore]
def fetch(_typing: Any, _address: Any) -> Any:
    """Have a cache line brought near that will be read soon; harmless where there is none."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        _prefetch(builder, arguments[0])
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic  # type: ignore[untyped-decorator, unused-ignore]
def settle(_typing: Any) -> Any:
    """What was written past the caches is there for everybody before what follows."""

    def generate(context: Any, builder: Any, _signature: Any, _arguments: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic  # type: ignore[untyped-decorator, unused-ignore]
def nothing(_typing: Any, checksum: Any, source: Any) -> Any:  # noqa: ARG001 - as _add has them
    return types.int64(types.int64, types.int64), lambda _context, _builder, _signature, arguments: arguments[0]


POLYNOMIAL = 0x11EDC6F41
"""Of CRC32C, with the highest power first."""


def _factor(bits: int) -> int:
    """What takes eight bytes past ``bits`` bits that follow them, as a carry-less multiplication wants it.

    That is x to the power of ``bits`` - 1 modulo the polynomial, lowest power last: the product of two numbers whose
    bits are turned over is turned over and one place off.
    """
    power = 1
    for _ in range(bits - 1):
        power <<= 1
        if power >> 32:
            power ^= POLYNOMIAL
    return int(f"{power:032b}"[::-1], 2) << 32


def _folded(builder: Any, line: Any, width: int) -> Any:
    """What a ``line`` is worth 64 bytes further on: each half of each sixteen bytes times its factor, added up."""
    longs = width // 64
    part = ir.VectorType(LONG, longs)
    factors = ir.Constant(part, [_factor(8 * LINE + 64), _factor(8 * LINE)] * (longs // 2))
    kind = ir.FunctionType(part, [part, part, BYTE])
    call = cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.pclmulqdq.{width}")

    def folded(begin: int) -> Any:
        taken = ir.Constant(ir.VectorType(INT, longs), list(range(begin, begin + longs)))
        some = builder.shuffle_vector(line, line, taken)
        low, high = (builder.call(call, [some, factors, ir.Constant(BYTE, half)]) for half in (0x00, 0x11))
        return builder.xor(low, high)

    parts = [folded(begin) for begin in range(0, LINE // 8, longs)]
    if len(parts) == 1:
        return parts[0]
    return builder.shuffle_vector(*parts, ir.Constant(ir.VectorType(INT, LINE // 8), list(range(LINE // 8))))


def copy_lines(width: int, *, summed: bool) -> Any:
    """An operation ``(target, source, count, checksum, ahead, following)``: copies lines and returns their checksum.

    There is one line at least, and ``target`` is a multiple of :data:`LINE`.  Each line is fetched ``ahead`` bytes
    before it is read; where that is behind the last one, what lies at ``following`` is fetched, which comes next.
    """

    @intrinsic  # type: ignore[untyped-decorator, unused-ignore]
    def operation(
        _typing: Any, _target: Any, _source: Any, _count: Any, _checksum: Any, _ahead: Any, _following: Any
    ) -> Any:
        def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            target, source, count, checksum, ahead, following = arguments
            pointer, size = LINE_OF_LONGS.as_pointer(), ir.Constant(LONG, LINE)
            end = builder.add(source, builder.mul(count, size))

            def moved(offset: Any) -> Any:
                value = builder.load(builder.inttoptr(builder.add(source, offset), pointer), align=1)
                place = builder.inttoptr(builder.add(target, offset), pointer)
                _go_past_caches(builder, builder.store(value, place, align=LINE))
                return value

            total = cgutils.alloca_once(builder, LINE_OF_LONGS)
            first = moved(ir.Constant(LONG, 0))
            begun = builder.insert_element(ir.Constant(LINE_OF_LONGS, [0] * (LINE // 8)), checksum, ir.Constant(INT, 0))
            builder.store(builder.xor(first, begun), total)
            with cgutils.for_range(builder, count, start=ir.Constant(LONG, 1)) as loop:
                offset = builder.mul(loop.index, size)
                soon = builder.add(builder.add(source, offset), ahead)
                later = builder.add(following, builder.sub(soon, end))
                _prefetch(builder, builder.select(builder.icmp_signed("<", soon, end), soon, later))
                value = moved(offset)
                if summed:
                    builder.store(builder.xor(_folded(builder, builder.load(total), width), value), total)
            if not summed:
                return checksum
            last, result = builder.load(total), ir.Constant(LONG, 0)
            kind = ir.FunctionType(LONG, [LONG, LONG])
            call = cgutils.get_or_insert_function(builder.module, kind, _NAMES[8])
            for number in range(LINE // 8):
                result = builder.call(call, [result, builder.extract_element(last, ir.Constant(INT, number))])
            return result

        return types.int64(*6 * [types.int64]), generate

    return operation
