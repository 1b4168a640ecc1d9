"""Which bytes go where: the copies between engine blocks and pages, as three lists of numbers.

An engine has the bytes of one page in many places (one a layer, or one a layer, head and token); a driver copies them
fastest when it is told of all at once.  Brains: no tensor, no device, no byte is touched here.

What always holds: a plan names only bytes inside the rows that it was made of and the pages that it was given, and it
keeps these pages' memory mapped as long as it lives.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

Numbers = np.ndarray[Any, np.dtype[np.int64]]

STEP_BYTES = 2 << 20
"""What is copied in one call, so that who calls a copy off does not wait."""

ALL = slice(None)
"""All tensors of the rows."""


def numbers(values: Iterable[int]) -> Numbers:
    return np.fromiter(values, np.int64)


class Piece(NamedTuple):
    """Bytes that lie side by side in the engine and in a page, in every row.

    Those of the row ``(major, minor)`` begin ``major * major_stride + minor * minor_stride`` bytes behind ``address``;
    those of a page's row ``place`` begin ``offset + place * pitch`` bytes behind its start.
    """

    address: int
    major_stride: int
    minor_stride: int
    offset: int
    pitch: int
    size: int


class Slots(NamedTuple):
    """Slots of pages, of ``size`` bytes at least: where each begins, and who owns the memory."""

    starts: Numbers
    size: int
    memory: Sequence[memoryview]

    @classmethod
    def of(cls, pages: Sequence[memoryview]) -> Slots:
        starts = numbers(map(ctypes.addressof, map(ctypes.c_char.from_buffer, pages)))
        return cls(starts, min(map(len, pages), default=0), pages)

    def page(self, at: int) -> memoryview:
        """The bytes of one; only while somebody keeps these slots."""
        return memoryview((ctypes.c_ubyte * self.size).from_address(int(self.starts[at]))).cast("B")


class Rows(NamedTuple):
    """Rows to be copied; the n-th is ``(major[n], minor[n])`` in the engine and ``place[n]`` in the page ``owners[n]``.

    Of rows that follow each other on both sides, only the first is named; ``lengths`` says how many there are.
    """

    major: Numbers
    minor: Numbers
    place: Numbers
    owners: Numbers
    lengths: Numbers | None = None


class TokenSpan(NamedTuple):
    """Consecutive tokens of a page from its beginning, the n-th at ``positions[n]`` of engine block ``blocks[n]``."""

    blocks: Numbers
    positions: Numbers


class CopyPlan(NamedTuple):
    """The n-th copy is of ``sizes[n]`` bytes, between the addresses ``engine[n]`` and ``memory[n]``."""

    engine: Numbers
    memory: Numbers
    sizes: Numbers
    out: bool
    """Whether bytes go from the engine to the pages."""
    owners: Sequence[memoryview]
    """Who owns the memory."""
    starts: Numbers
    """Where the slots begin."""
    slots: Numbers | None = None
    """Which slot each copy is of, where copies come slot after slot and from the beginning to the end of each."""

    @property
    def sources(self) -> Numbers:
        return self.engine if self.out else self.memory

    @property
    def targets(self) -> Numbers:
        return self.memory if self.out else self.engine

    def in_steps(self, most: int, *, in_order: bool = False) -> Iterator[Step]:
        """The same copies, about ``most`` bytes at a time, slot after slot and from the beginning to the end of each.

        Those of one step may come in any order, unless they are to come ``in_order``: then it has its :attr:`slots`.
        """
        if not in_order and int(self.sizes.sum()) <= most:
            yield Step(self, len(self.starts))
            return
        rising = np.argsort(self.starts)
        begins = self.starts[rising]
        first = np.searchsorted(begins, self.memory, "right") - 1
        engine, memory, sizes = self.engine, self.memory, self.sizes
        parts = np.searchsorted(begins, memory + sizes, "left") - first
        if (parts > 1).any():  # one copy fills several slots
            within = np.arange(parts.sum()) - np.repeat(np.cumsum(parts) - parts, parts)
            ends = np.repeat(memory + sizes, parts)
            ahead, first = np.repeat(engine - memory, parts), np.repeat(first, parts) + within
            memory = np.where(within > 0, begins[first], np.repeat(memory, parts))
            following = np.append(begins, np.iinfo(np.int64).max)[first + 1]
            engine, sizes = memory + ahead, np.minimum(ends, following) - memory
        slots = rising[first]
        order = np.lexsort((memory, slots))
        slots, engine, memory, sizes = slots[order], engine[order], memory[order], sizes[order]
        step_of = (np.cumsum(sizes) - 1) // most
        ends = np.append(np.flatnonzero(step_of[1:] != step_of[:-1]) + 1, len(sizes))
        whole = np.append(slots[ends[:-1]], len(self.starts))
        begin = 0
        for end, reached in zip(ends.tolist(), whole.tolist(), strict=True):
            part = slice(begin, end)
            plan = CopyPlan(engine[part], memory[part], sizes[part], self.out, self.owners, self.starts, slots[part])
            yield Step(plan, reached)
            begin = end


class Step(NamedTuple):
    """A part of a plan, after which the ``whole`` leading slots are copied."""

    plan: CopyPlan
    whole: int


class PieceTable:
    """The pieces of one row, tensor by tensor; ``starts[t]`` is the first piece of tensor ``t``."""

    def __init__(self, pieces: Sequence[Sequence[Piece]]) -> None:
        self._starts = np.cumsum([0, *map(len, pieces)]).tolist()
        table = np.array([piece for of_tensor in pieces for piece in of_tensor], np.int64).reshape(-1, 6)
        self._columns = table.T[:, :, np.newaxis]

    def plan(self, rows: Rows, slots: Slots, *, out: bool, tensors: slice = ALL) -> CopyPlan:
        """Copies of ``rows``, or of their parts in ``tensors`` alone; what lies side by side is one copy."""
        first, end, _ = tensors.indices(len(self._starts) - 1)
        columns = self._columns[:, self._starts[first] : self._starts[end]]
        address, offset, size = columns[[0, 3, 5]]
        # Where all pieces have the same strides and pitch, as they mostly have, what follows from these is one row.
        shared = columns[[1, 2, 4]]
        major_stride, minor_stride, pitch = shared[:, :1] if (shared == shared[:, :1]).all() else shared
        # Piece by piece, so that neighbours on both sides come one after the other.
        engine = (address + (rows.major * major_stride + rows.minor * minor_stride)).ravel()
        memory = (offset + (slots.starts[rows.owners] + rows.place * pitch)).ravel()
        lengths = np.ones(len(rows.major), np.int64) if rows.lengths is None else rows.lengths
        return CopyPlan(*_joined(engine, memory, (size * lengths).ravel()), out, slots.memory, slots.starts)


def _joined(engine: Numbers, memory: Numbers, sizes: Numbers) -> tuple[Numbers, Numbers, Numbers]:
    follows = engine[1:] - engine[:-1] == sizes[:-1]
    if follows.any():
        follows &= memory[1:] - memory[:-1] == sizes[:-1]
    if not follows.any():
        return engine, memory, sizes
    starts = np.flatnonzero(np.concatenate(([True], ~follows)))
    return engine[starts], memory[starts], np.add.reduceat(sizes, starts)


def runs(shape: Sequence[int], strides: Sequence[int], size: int) -> tuple[Numbers, int]:
    """How values of ``size`` bytes lie in memory, in the order of their dimensions.

    Returns where each run of neighbours begins, in bytes, and the bytes of a run.
    """
    run, kept = size, len(shape)
    while kept and (strides[kept - 1] == run or shape[kept - 1] == 1):
        kept -= 1
        run *= shape[kept]
    offsets = np.zeros(1, np.int64)
    for length, stride in zip(shape[:kept], strides[:kept], strict=True):
        offsets = (offsets[:, np.newaxis] + np.arange(length) * stride).ravel()
    return offsets, run
