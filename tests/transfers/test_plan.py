"""Lists of copies: every value goes where it belongs, whatever the layout, and neighbours are one copy."""

from __future__ import annotations

import ctypes
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ems.errors import ConfigError
from ems.pool.layout import crc32c
from ems.transfers.checksums import PageSums
from ems.transfers.plan import CopyPlan, Slots, TokenSpan, runs
from ems.transfers.rows import BlockRows, PageBlocks, TokenRows
from ems.transfers.streaming import HostCopies

pytestmark = pytest.mark.hypothesis


def carry_out(plan: CopyPlan) -> None:
    for target, source, size in zip(plan.targets.tolist(), plan.sources.tolist(), plan.sizes.tolist(), strict=True):
        ctypes.memmove(target, source, size)


def strided(shape: tuple[int, ...], order: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Different numbers of the given shape, whose dimensions lie in memory in ``order``."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)
    back = [order.index(dimension) for dimension in range(len(shape))]
    return values.permute(order).contiguous().permute(back)


orders = st.permutations(range(4)).map(tuple)


@given(st.tuples(*[st.integers(1, 4)] * 4), orders, st.integers(1, 8))
def test_runs_name_every_byte_once_and_in_order(shape: tuple[int, ...], order: tuple[int, ...], size: int) -> None:
    array = np.arange(int(np.prod(shape)) * size, dtype=np.uint8)
    strides = [0] * 4
    step = size
    for dimension in reversed(order):
        strides[dimension] = step
        step *= shape[dimension]
    offsets, run = runs(shape, strides, size)
    named = [array[offset : offset + run] for offset in offsets.tolist()]
    expected = [
        array[sum(i * s for i, s in zip(index, strides, strict=True)) :][:size]
        for index in itertools.product(*map(range, shape))
    ]
    assert np.concatenate(named).tolist() == np.concatenate(expected).tolist()


@given(st.data(), orders, st.sampled_from([1, 2, 4]), st.integers(1, 3))
def test_blocks_go_to_pages_and_back(
    data: st.DataObject, order: tuple[int, ...], shards: int, page_blocks: int
) -> None:
    blocks, shape = 6, (6, 4, 3, 2)
    tensors = [strided(shape, order, seed) for seed in range(3)]
    rows = BlockRows(tensors, shards=shards, page_blocks=page_blocks)
    named = data.draw(
        st.lists(st.tuples(st.integers(0, blocks - 1), st.integers(0, shards - 1)), min_size=1, max_size=6, unique=True)
    )
    places = [number % page_blocks for number in range(len(named))]
    parts = [PageBlocks([block], shard, place) for (block, shard), place in zip(named, places, strict=True)]
    pages = [bytearray(rows.page_bytes) for _ in named]
    views = [memoryview(page) for page in pages]
    carry_out(rows.plan(parts, Slots.of(views), out=True))

    heads = 4 // shards
    for (block, shard), place, page in zip(named, places, pages, strict=True):
        for number, (tensor, head) in enumerate(itertools.product(tensors, range(heads))):
            row = tensor[block, shard * heads + head].contiguous().view(torch.uint8).numpy().tobytes()
            begin = number * len(row) * page_blocks + place * len(row)
            assert page[begin : begin + len(row)] == row

    other = [torch.zeros_like(tensor) for tensor in tensors]
    assert all(new.stride() == old.stride() for new, old in zip(other, tensors, strict=True))
    carry_out(BlockRows(other, shards=shards, page_blocks=page_blocks).plan(parts, Slots.of(views), out=False))
    untouched = set(itertools.product(range(blocks), range(shards))) - set(named)
    for new, old in zip(other, tensors, strict=True):
        for block, shard in named:
            part = slice(shard * heads, (shard + 1) * heads)
            assert torch.equal(new[block, part], old[block, part])
        assert not any(new[block, shard * heads : (shard + 1) * heads].any() for block, shard in untouched)


@given(st.data(), orders, st.integers(1, 3), st.booleans())
def test_steps_fill_page_after_page_and_their_checksums_are_those_of_the_pages(
    data: st.DataObject, order: tuple[int, ...], page_blocks: int, side_by_side: bool
) -> None:
    # Of one tensor with one head a page is one piece, and neighbours are one copy.
    heads, layers = data.draw(st.sampled_from([(4, 3), (1, 1)]))
    tensors = [strided((6, heads, 3, 2), order, seed) for seed in range(layers)]
    rows = BlockRows(tensors, page_blocks=page_blocks)
    size, count = rows.page_bytes, data.draw(st.integers(1, 6))
    memory = memoryview(bytearray(size * 6 if side_by_side else (size + 8) * 6))
    pitch = len(memory) // 6
    places = data.draw(st.permutations(range(6)))[:count]
    pages = [memory[place * pitch : place * pitch + size] for place in places]
    blocks = [data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=page_blocks)) for _ in pages]
    plan = rows.plan(list(map(PageBlocks, blocks)), Slots.of(pages), out=True)
    assert len(plan.sizes) <= count * rows.page_copies
    carry_out(plan)
    expected = [bytes(page) for page in pages]
    memory[:] = bytes(len(memory))
    sums = PageSums(Slots.of(pages))
    most, largest = data.draw(st.integers(1, 6 * size)), int(plan.sizes.max())
    summed = data.draw(st.booleans())
    for step in plan.in_steps(most, in_order=summed):
        if summed:
            HostCopies().copy(step.plan, sums)
        else:
            carry_out(step.plan)
        assert int(step.plan.sizes.sum()) < most + largest
        assert [bytes(page) for page in pages[: step.whole]] == expected[: step.whole]
        sums.whole = step.whole
        assert sums.done == [crc32c(page) for page in expected[: step.whole]]
    assert step.whole == count
    assert [bytes(page) for page in pages] == expected


@pytest.mark.parametrize("blocks", [[0, 1, 2, 3], [0, 1, 4, 5], [3, 0, 1, 2]])
def test_a_copy_that_fills_several_pages_counts_for_all_of_them(blocks: list[int]) -> None:
    rows = BlockRows([strided((6, 1, 3, 2), (0, 1, 2, 3))])
    memory = memoryview(bytearray(4 * rows.page_bytes))
    pages = [memory[at : at + rows.page_bytes] for at in range(0, len(memory), rows.page_bytes)]
    plan = rows.plan([PageBlocks([block]) for block in blocks], Slots.of(pages), out=True)
    assert len(plan.sizes) < len(blocks)
    for most in (1, rows.page_bytes, 1 << 20):
        sums = PageSums(Slots.of(pages))
        for step in plan.in_steps(most, in_order=True):
            HostCopies().copy(step.plan, sums)
            sums.whole = step.whole
        assert step.whole == len(blocks)
        assert sums.summed.tolist() == [rows.page_bytes] * len(blocks)
        assert sums.done == [crc32c(page) for page in pages]


def test_one_layer_alone_is_copied() -> None:
    tensors = [strided((4, 2, 3, 2), (0, 1, 2, 3), seed) for seed in range(3)]
    rows = BlockRows(tensors)
    page = bytearray(rows.page_bytes)
    carry_out(rows.plan([PageBlocks([2])], Slots.of([memoryview(page)]), out=True, tensors=slice(1, 2)))
    size = rows.page_bytes // 3
    assert page[size : 2 * size] == tensors[1][2].view(torch.uint8).numpy().tobytes()
    assert not any(page[:size])
    assert not any(page[2 * size :])


def test_neighbours_on_both_sides_are_one_copy() -> None:
    tensors = [strided((8, 1, 3, 2), (0, 1, 2, 3), seed) for seed in range(2)]
    rows = BlockRows(tensors, page_blocks=4)
    page = memoryview(bytearray(rows.page_bytes))
    following = rows.plan([PageBlocks([4, 5, 6, 7])], Slots.of([page]), out=True)
    assert following.sizes.tolist() == [rows.page_bytes // 2] * 2
    apart = rows.plan([PageBlocks([4, 6, 5, 7])], Slots.of([page]), out=True)
    assert len(apart.sizes) == 8


@pytest.mark.parametrize(
    ("row", "place"), [((4, 0), 0), ((-1, 0), 0), ((0, 2), 0), ((0, -1), 0), ((0, 0), 2), ((0, 0), -1)]
)
def test_nothing_outside_of_the_tensors_and_pages_is_named(row: tuple[int, int], place: int) -> None:
    rows = BlockRows([torch.zeros(4, 2, 3)], shards=2, page_blocks=2)
    page = memoryview(bytearray(rows.page_bytes))
    with pytest.raises(IndexError, match="there are 0 to"):
        rows.plan([PageBlocks([row[0]], row[1], place)], Slots.of([page]), out=False)
    with pytest.raises(IndexError, match="smaller than"):
        rows.plan([PageBlocks([0])], Slots.of([page[1:]]), out=False)


def test_tensors_that_do_not_fit_together_are_refused() -> None:
    with pytest.raises(ConfigError, match="no KV cache tensors"):
        BlockRows([])
    with pytest.raises(ConfigError, match="the same number in all"):
        BlockRows([torch.zeros(4, 2, 3), torch.zeros(5, 2, 3)])
    with pytest.raises(ConfigError, match="multiple of 2"):
        BlockRows([torch.zeros(4, 3, 3)], shards=2)


@given(
    st.lists(st.integers(0, 31), min_size=1, max_size=4, unique=True),
    orders,
    st.sampled_from([torch.bfloat16, torch.float64, torch.float8_e5m2, torch.bool]),
)
def test_tokens_go_to_pages_and_back(slots: list[int], order: tuple[int, ...], dtype: torch.dtype) -> None:
    shape = (8, 4, 2, 3)
    caches = [[strided(shape, order, seed).to(dtype) for seed in range(2)] for _ in range(2)]
    rows = TokenRows(caches)
    numbers = np.array(slots)
    span = TokenSpan(numbers // 4, numbers % 4)
    page = bytearray(rows.page_bytes)
    carry_out(rows.plan([span], Slots.of([memoryview(page)]), out=True))
    flat = [tensor for layer in caches for tensor in layer]
    for part, tensor in zip(rows.parts, flat, strict=True):
        raw = tensor[span.blocks, span.positions].contiguous().view(torch.uint8).numpy().tobytes()
        assert page[part.start : part.start + len(raw)] == raw

    other = [[torch.zeros_like(tensor) for tensor in layer] for layer in caches]
    carry_out(TokenRows(other).plan([span], Slots.of([memoryview(page)]), out=False))
    for new, old in zip([tensor for layer in other for tensor in layer], flat, strict=True):
        chosen = torch.zeros(8, 4, dtype=torch.bool)
        chosen[span.blocks, span.positions] = True
        assert torch.equal(new[chosen].double(), old[chosen].double())
        assert not new[~chosen].double().any()


def test_tokens_that_follow_each_other_are_one_copy_a_tensor() -> None:
    rows = TokenRows([[torch.zeros(8, 4, 2, 3), torch.zeros(8, 4, 2, 3)]])
    pages = [memoryview(bytearray(rows.page_bytes)) for _ in range(3)]
    spans = [
        TokenSpan(np.array([2, 2, 2, 2]), np.arange(4)),
        TokenSpan(np.array([3, 3]), np.array([0, 1])),
        TokenSpan(np.array([3, 3]), np.array([3, 2])),
    ]
    assert rows.plan(spans, Slots.of(pages), out=True).sizes.tolist() == [96, 48, 24, 24] * 2


def test_token_pages_begin_on_even_addresses() -> None:
    rows = TokenRows([[torch.zeros(2, 3, 1, 1, dtype=torch.int8), torch.zeros(2, 3, 1, 5, dtype=torch.float64)]])
    assert [part.start for part in rows.parts] == [0, 8]
    assert rows.page_bytes == 8 + 3 * 5 * 8


@pytest.mark.parametrize(("block", "position"), [(8, 0), (-1, 0), (0, 4), (0, -1)])
def test_no_token_outside_of_the_tensors_is_named(block: int, position: int) -> None:
    rows = TokenRows([[torch.zeros(8, 4, 2, 3)]])
    page = memoryview(bytearray(rows.page_bytes))
    with pytest.raises(IndexError, match="there are 0 to"):
        rows.plan([TokenSpan(np.array([block]), np.array([position]))], Slots.of([page]), out=True)
    five = TokenSpan(np.zeros(5, np.int64), np.array([0, 1, 2, 3, 0]))
    with pytest.raises(IndexError, match="room for 4 tokens"):
        rows.plan([five], Slots.of([page]), out=True)
