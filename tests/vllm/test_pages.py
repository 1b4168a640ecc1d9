"""Engine tensors as a rank's pages: every layout gives the same bytes, and what is no such tensor is refused."""

from __future__ import annotations

import itertools

import pytest
import torch

from ems.errors import ConfigError
from ems.pool.keys import KEY_BYTES, Tail, page_key
from ems.pool.layout import REF_BYTES
from ems.transfers.device import CpuDevice
from ems.transfers.plan import Slots
from ems.transfers.rows import PageBlocks, PartsOfPages
from ems.vllm.layers import LayerOrder
from ems.vllm.model import LocalPlane
from ems.vllm.pages import PlaneRows, plane_rows
from ems.vllm.planes import Plane, Portion, TokenOrder
from ems.vllm.requests import LoadPart, Save

BLOCKS, HEADS, TOKENS, WIDTH = 4, 2, 6, 8
NAMES = ("layers.0", "layers.1")


def local(portion: Portion | None = None, *, heads: int = HEADS, window: int = 0, number: int = 0) -> LocalPlane:
    mine = portion or Portion(0, 2)
    return LocalPlane(number, Plane("p", shards=2, window=window), NAMES, mine, (heads, heads))


def values(dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """All layers, in the order layer, block, head, token, value."""
    shape = (len(NAMES), BLOCKS, HEADS, TOKENS, WIDTH)
    return torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(dtype)


def page(rows: PlaneRows, block: int, shard: int) -> bytes:
    place = bytearray(rows.namespace.page_size)
    CpuDevice().copy(rows.rows.plan([PageBlocks([block], shard)], Slots.of([memoryview(place)]), out=True))
    return bytes(place)


@pytest.mark.parametrize(
    "order",
    [(0, 1, 2, 3, 4), (0, 1, 3, 2, 4), (0, 2, 1, 3, 4), (1, 0, 2, 3, 4), (1, 0, 3, 2, 4), (1, 2, 0, 3, 4)],
    ids=["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn], ids=str)
def test_every_layout_has_the_same_pages(order: tuple[int, ...], dtype: torch.dtype) -> None:
    whole = values(dtype)
    # The same values, in memory in another order of the dimensions.
    memory = whole.permute(order).contiguous().permute([order.index(dimension) for dimension in range(5)])
    tensors = {name: memory[layer] for layer, name in enumerate(NAMES)}
    (rows,) = plane_rows([local()], tensors, BLOCKS, 1)

    for block, shard in itertools.product(range(BLOCKS), range(2)):
        expected = torch.stack([whole[layer, block, shard] for layer in range(len(NAMES))])
        assert page(rows, block, shard) == expected.view(torch.uint8).numpy().tobytes()

    other = memoryview(bytearray(page(rows, 3, 1)))
    CpuDevice().copy(rows.rows.plan([PageBlocks([1], 1)], Slots.of([other]), out=False))
    for layer, name in enumerate(NAMES):
        assert torch.equal(tensors[name][1, 1].view(torch.uint8), whole[layer, 3, 1].view(torch.uint8))
        assert torch.equal(tensors[name][1, 0].view(torch.uint8), whole[layer, 1, 0].view(torch.uint8))


def test_blocks_that_kernels_cut_in_pieces_are_whole_again() -> None:
    whole = values()
    pieces = whole.unflatten(3, (3, 2)).transpose(2, 3).reshape(len(NAMES), BLOCKS * 3, HEADS, 2, WIDTH)
    (rows,) = plane_rows([local()], {name: pieces[layer] for layer, name in enumerate(NAMES)}, BLOCKS, 1)

    assert (
        page(rows, 2, 1) == torch.stack([whole[layer, 2, 1] for layer in range(2)]).view(torch.uint8).numpy().tobytes()
    )


def test_a_latent_state_has_one_head() -> None:
    tensors = {name: torch.zeros(BLOCKS, TOKENS, WIDTH) for name in NAMES}
    (rows,) = plane_rows([local(Portion(), heads=1)], tensors, BLOCKS, 1)

    assert rows.namespace.page_size == 2 * TOKENS * WIDTH * 4


@pytest.mark.parametrize(
    "shape",
    [(BLOCKS, 2, TOKENS, HEADS, WIDTH), (2, BLOCKS, TOKENS, HEADS, WIDTH), (BLOCKS, TOKENS, HEADS, WIDTH), (BLOCKS, 9)],
    ids=["K and V apart", "K and V outside", "heads inside", "two dimensions"],
)
def test_tensors_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=r"expected \[4 blocks, 2 heads, tokens, values\]"):
        plane_rows([local()], {name: torch.zeros(shape) for name in NAMES}, BLOCKS, 1)


def test_keys_and_values_may_be_in_tensors_of_their_own() -> None:
    """As on Ascend; each layer's are copied together where layers are copied one by one."""
    shape = (BLOCKS, TOKENS, HEADS, WIDTH)
    generator = torch.Generator().manual_seed(5)
    caches = {name: tuple(torch.randn(shape, generator=generator) for _ in range(2)) for name in NAMES}
    (rows,) = plane_rows([local()], caches, BLOCKS, 1)

    parts = [part[2, :, 1].contiguous() for name in NAMES for part in caches[name]]
    assert page(rows, 2, 1) == torch.cat(parts).view(torch.uint8).numpy().tobytes()
    assert [layer.tensors for layer in LayerOrder([rows]).layers] == [slice(0, 2), slice(2, 4)]


def test_a_latent_state_in_parts_has_one_head() -> None:
    """The parts of sparse attention differ in width and type."""
    latent, rope = torch.randn(BLOCKS, TOKENS, 1, WIDTH), torch.randn(BLOCKS, TOKENS, 1, 2)
    indexer = torch.ones(BLOCKS, TOKENS, 1, 3, dtype=torch.int8)
    (rows,) = plane_rows(
        [local(Portion(), heads=1)], dict.fromkeys(NAMES, (latent, rope.to(torch.bfloat16), indexer)), BLOCKS, 1
    )
    layer = [latent[1], rope[1].to(torch.bfloat16), indexer[1]]
    expected = b"".join(part.contiguous().view(torch.uint8).numpy().tobytes() for part in layer)
    assert page(rows, 1, 0) == expected * 2


def test_parts_of_another_shape_are_refused() -> None:
    pair = (torch.zeros(BLOCKS, TOKENS, HEADS, WIDTH), torch.zeros(BLOCKS, TOKENS, HEADS + 1, WIDTH))
    with pytest.raises(ConfigError, match=r"for layer layers\.0 \(part 1\), expected"):
        plane_rows([local()], dict.fromkeys(NAMES, pair), BLOCKS, 1)


def test_a_layer_without_a_tensor_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no KV cache for layer layers\.1"):
        plane_rows([local()], {"layers.0": torch.zeros(BLOCKS, HEADS, TOKENS, WIDTH)}, BLOCKS, 1)


def parts_of(pages: PartsOfPages) -> list[PageBlocks]:
    blocks, *columns = (column.tolist() for column in pages)
    return [
        PageBlocks(blocks[begin : begin + count], shard, first)
        for begin, count, shard, first in zip(*columns, strict=True)
    ]


def tails(count: int) -> list[Tail]:
    return [Tail(bytes([number]) * 16, b"1234") for number in range(count)]


def test_blocks_that_the_engine_dropped_are_neither_loaded_nor_stored() -> None:
    tensors = [[torch.zeros(BLOCKS, HEADS, TOKENS, WIDTH)] for _ in NAMES]
    windowed, full = PlaneRows(local(window=8), tensors), PlaneRows(local(), tensors)
    save = Save(1, "r", 0, bytes(16), tails(3), [[0, 2, 3]])

    assert [stored.part.blocks for stored in windowed.stored(save)[1]] == [[2], [2], [3], [3]]
    assert [stored.part.blocks for stored in full.stored(save)[1]] == [[0], [0], [2], [2], [3], [3]]
    part = LoadPart(0, [0, 2], bytes(2 * KEY_BYTES), bytes(4 * REF_BYTES))
    assert parts_of(windowed.loaded(part)[0]) == [PageBlocks([2], 0), PageBlocks([2], 1)]
    assert len(parts_of(full.loaded(part)[0])) == 4


def test_pages_of_several_blocks_may_begin_and_end_within_them() -> None:
    rows = PlaneRows(local(), [[torch.zeros(BLOCKS, HEADS, TOKENS, WIDTH)] for _ in NAMES], 3)
    _, stored = rows.stored(Save(1, "r", 0, bytes(16), tails(2), [[3, 1, 2, 0]], partial=True))
    assert [page.part for page in stored] == [
        PageBlocks([3, 1, 2], 1),
        PageBlocks([3, 1, 2], 0),
        PageBlocks([0], 1),
        PageBlocks([0], 0),
    ]
    parts, _, _ = rows.loaded(LoadPart(0, [2, 3, 0, 1], bytes(2 * KEY_BYTES), bytes(4 * REF_BYTES), skip=2))
    assert parts.begins.tolist() == [0, 0, 1, 1]
    assert parts_of(parts) == [
        PageBlocks([2], 0, 2),
        PageBlocks([2], 1, 2),
        PageBlocks([3, 0, 1], 0),
        PageBlocks([3, 0, 1], 1),
    ]


def test_a_rank_loads_the_pages_of_its_own_shards() -> None:
    rows = PlaneRows(local(Portion(1, 1)), [[torch.zeros(BLOCKS, HEADS // 2, TOKENS, WIDTH)] for _ in NAMES])
    keys = bytes(range(2 * KEY_BYTES))
    parts, refs, found = rows.loaded(LoadPart(0, [3, 1], keys, bytes(range(4 * REF_BYTES))))
    assert parts_of(parts) == [PageBlocks([3]), PageBlocks([1])]
    assert found == page_key(keys[:KEY_BYTES], 1) + page_key(keys[KEY_BYTES:], 1)
    assert refs == bytes([*range(REF_BYTES, 2 * REF_BYTES), *range(3 * REF_BYTES, 4 * REF_BYTES)])


@pytest.mark.parametrize("order", [TokenOrder.TOKENS, TokenOrder.CPU_VECTOR, TokenOrder.CPU_AMX], ids=str)
def test_blocks_of_two_sizes_have_the_same_pages(order: TokenOrder) -> None:
    """Where it is known how the engine orders the tokens of a block."""
    heads, tokens, width = 2, 256, 64
    state = torch.randn(2, heads, tokens, width, generator=torch.Generator().manual_seed(7)).to(torch.bfloat16)

    def engine(size: int) -> tuple[PlaneRows, torch.Tensor]:
        keys, of_values = state.unflatten(2, (-1, size)).transpose(1, 2)  # [blocks, heads, size, width] each
        if order is TokenOrder.TOKENS:
            cache = torch.cat([keys, of_values], 3).contiguous()
        else:
            if order is TokenOrder.CPU_VECTOR:
                packed = keys.transpose(2, 3), of_values
            else:
                packed = (
                    keys.unflatten(2, (-1, 16)).unflatten(4, (-1, 2)).permute(0, 1, 2, 4, 3, 5),
                    of_values.unflatten(2, (-1, 2)).unflatten(4, (-1, 16)).permute(0, 1, 4, 2, 5, 3),
                )
            flat = [part.reshape(tokens // size, heads, -1) for part in packed]
            cache = torch.cat(flat, 2).view(tokens // size, heads, size, 2 * width)
        plane = Plane("p", shards=2, order=order)
        local_plane = LocalPlane(0, plane, ("layers.0",), Portion(0, 2), (heads,))
        (rows,) = plane_rows([local_plane], {"layers.0": cache}, tokens // size, tokens // size)
        return rows, cache

    (small, _), (large, target) = engine(32), engine(128)
    pages = [memoryview(bytearray(small.rows.page_bytes)) for _ in range(2)]
    CpuDevice().copy(small.rows.plan([PageBlocks(range(8), shard) for shard in range(2)], Slots.of(pages), out=True))
    before = target.clone()
    target.zero_()
    CpuDevice().copy(large.rows.plan([PageBlocks(range(2), shard) for shard in range(2)], Slots.of(pages), out=False))
    assert torch.equal(target, before)


def test_only_the_first_shard_of_the_first_plane_is_found_by_its_tokens() -> None:
    tensors = [[torch.zeros(BLOCKS, HEADS, TOKENS, WIDTH)] for _ in NAMES]
    save = Save(1, "r", 4, b"p" * 16, tails(2), [[1, 2]], partial=True)

    def found_by(rows: PlaneRows) -> list[Tail]:
        return [page.tail for page in rows.stored(save)[1] if page.tail is not None]

    pages = PlaneRows(local(), tensors).stored(save)[1]
    assert [page.tail for page in pages] == [None, save.tails[0], None, save.tails[1]]
    assert all(page.tail is None or page.tail.key == page.key for page in pages)
    assert found_by(PlaneRows(local(number=1), tensors)) == []
    halves = [[tensor[:, :1]] for (tensor,) in tensors]
    assert found_by(PlaneRows(local(Portion(1, 1), heads=2), halves)) == []
    # Replicas take turns; chunk 4 is the first of the save.
    assert found_by(PlaneRows(local(Portion(0, 2, 0, 2)), tensors)) == [save.tails[0]]
    assert found_by(PlaneRows(local(Portion(0, 2, 1, 2)), tensors)) == [save.tails[1]]
