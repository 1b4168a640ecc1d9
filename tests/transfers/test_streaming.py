"""Copies past the caches: every byte arrives and no other is touched, and checksums are those of the library."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ems.pool.layout import crc32c
from ems.transfers import streaming
from ems.transfers.checksums import NOTHING, PageSums
from ems.transfers.intrinsics import FOLDS, LINE, SUMS
from ems.transfers.plan import CopyPlan, Numbers, Slots, numbers
from ems.transfers.streaming import ALIAS, LANES, NEAR, HostCopies, copy_all, copy_summed, near_here

ROOM = 2 * LINE
"""Bytes around each copy that nobody may touch."""
sizes = st.one_of(st.integers(0, 3 * LINE), st.integers(0, 4 * sum(3 * lane for lane in LANES)))
shifts = st.integers(0, LINE - 1)
far = st.integers(0, ALIAS - 1)
each_way = pytest.mark.parametrize("folds", [bits for bits in (0, 256, 512) if bits <= FOLDS])
"""In lanes, and as wide as this processor folds."""


class Copies:
    """Copies of random bytes between two buffers, the n-th of ``sizes[n]`` bytes at odd places."""

    def __init__(self, seed: int, sizes: list[int], source_shift: int, target_shift: int) -> None:
        total = sum(sizes) + ROOM * (len(sizes) + 1) + ALIAS
        self.source = np.random.default_rng(seed).integers(0, 256, total, np.uint8)
        self.target = np.zeros(total, np.uint8)
        begins = np.cumsum([0, *sizes[:-1]]) + ROOM * np.arange(1, len(sizes) + 1)
        self.sizes = numbers(sizes)
        self.sources: Numbers = self.source.ctypes.data + begins + source_shift
        self.targets: Numbers = self.target.ctypes.data + begins + target_shift
        self.expected = np.zeros(total, np.uint8)
        self.pieces = []
        for begin, size in zip(begins.tolist(), sizes, strict=True):
            piece = self.source[begin + source_shift :][:size]
            self.expected[begin + target_shift :][:size] = piece
            self.pieces.append(piece.tobytes())


@each_way
@given(st.integers(0, 99), st.lists(sizes, min_size=1, max_size=4), shifts, far)
@example(0, [3 * lane for lane in LANES], 0, 0)
@example(0, [3 * lane - 1 for lane in LANES], 1, 63)
def test_every_byte_arrives_and_no_other_is_touched(
    folds: int, seed: int, sizes: list[int], source_shift: int, target_shift: int
) -> None:
    copies = Copies(seed, sizes, source_shift, target_shift)
    copy_all(folds, NEAR)(copies.targets, copies.sources, copies.sizes)
    assert (copies.target == copies.expected).all()


@each_way
@pytest.mark.parametrize("ahead", [-LINE, 1 - LINE, -16, 0, 1, LINE, NEAR - LINE - 1, NEAR - LINE, ALIAS // 2])
@pytest.mark.parametrize("near", [0, pytest.param(NEAR, marks=pytest.mark.slow)])
def test_places_that_look_the_same_to_a_processor_are_copied_alike(ahead: int, folds: int, near: int) -> None:
    source = np.random.default_rng(1).integers(0, 256, 4 * sum(3 * lane for lane in LANES) + 77, np.uint8)
    size, call = len(source), copy_summed(folds, near)
    assert call is not None
    sums, summed = numbers([NOTHING]), numbers([0])
    for copy in (
        copy_all(folds),
        lambda targets, sources, sizes: call(targets, sources, sizes, numbers([0]), sums, summed),
    ):
        target = np.zeros(size + ALIAS + 2 * ROOM, np.uint8)
        shift = ROOM + (source.ctypes.data + ahead - target.ctypes.data - ROOM) % ALIAS
        copy(numbers([target.ctypes.data + shift]), numbers([source.ctypes.data]), numbers([size]))
        assert (target[shift : shift + size] == source).all()
        assert not target[:shift].any()
        assert not target[shift + size :].any()
    assert (sums[0] ^ NOTHING, summed[0]) == (crc32c(source.tobytes()), size)


@each_way
def test_whether_this_processor_waits_is_tried_once(folds: int) -> None:
    assert near_here(folds) in {0, NEAR}
    assert near_here(folds) is near_here(folds)


@each_way
@given(st.integers(0, 99), st.lists(st.tuples(sizes, st.integers(0, 2)), min_size=1, max_size=6), shifts, far)
@example(0, [(3 * lane, 0) for lane in LANES], 0, 0)
@example(0, [(12 * sum(LANES) + 63, 1)], 5, 3)
def test_checksums_are_those_of_what_was_copied_for_each_owner(
    folds: int, seed: int, owned: list[tuple[int, int]], source_shift: int, target_shift: int
) -> None:
    call = copy_summed(folds, NEAR)
    assert call is not None, "this processor computes no checksums, which all that we know of do"
    copies = Copies(seed, [size for size, _ in owned], source_shift, target_shift)
    sums, counted = np.full(3, NOTHING, np.int64), np.zeros(3, np.int64)
    call(copies.targets, copies.sources, copies.sizes, numbers(owner for _, owner in owned), sums, counted)
    assert (copies.target == copies.expected).all()
    for owner in range(3):
        mine = b"".join(piece for piece, (_, whose) in zip(copies.pieces, owned, strict=True) if whose == owner)
        assert int(sums[owner]) ^ NOTHING == crc32c(mine)
        assert counted[owner] == len(mine)


@pytest.mark.process
@pytest.mark.parametrize(("told", "sums"), [({"NUMBA_ENABLE_AVX": "0"}, SUMS), ({"NUMBA_CPU_NAME": "generic"}, False)])
def test_instructions_for_which_numba_is_not_to_compile_do_not_end_the_process(
    told: dict[str, str], sums: bool
) -> None:
    program = "from ems.transfers.streaming import HostCopies; print(HostCopies().sums)"
    run = [sys.executable, "-c", program]
    assert subprocess.check_output(run, env={**os.environ, **told}, text=True).strip() == str(sums)


@pytest.mark.parametrize("instruction", [True, False])
def test_pages_that_were_filled_in_part_or_without_sums_are_looked_at(
    monkeypatch: pytest.MonkeyPatch, instruction: bool
) -> None:
    if not instruction:
        monkeypatch.setattr(streaming, "copy_summed", lambda: None)
    copies = HostCopies()
    assert copies.sums is instruction
    memory = memoryview(bytearray(b"old" * 100))
    pages = [memory[:100], memory[100:200], memory[200:]]
    source = np.arange(250, dtype=np.uint8)
    start = np.frombuffer(memory, np.uint8).ctypes.data
    targets, lengths = numbers([start, start + 100]), numbers([100, 50])
    engine = numbers([source.ctypes.data, source.ctypes.data + 100])
    plan = CopyPlan(engine, targets, lengths, True, pages, numbers([start, start + 100, start + 200]), numbers([0, 1]))
    sums = PageSums(Slots.of(pages))
    copies.copy(plan, sums)
    sums.whole = 2
    assert bytes(memory) == source.tobytes()[:150] + (b"old" * 100)[150:]
    assert sums.done == [crc32c(page) for page in pages[:2]]
