"""Engines with different numbers of ranks on one real pool: one reads what the other wrote, byte for byte."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ems.pool.client.pool_client import PoolClient
from ems.pool.keys import KeyChain
from ems.vllm.planes import Plane
from ems.vllm.requests import Load, LoadPart, Save
from ems.vllm.search import Prompt, Search
from tests.e2e.engines import Node, running_node, wait_for
from tests.vllm.engine_memory import equal
from tests.vllm.ranks import BLOCK, Ranks


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    with running_node("--size", "32MB", "--segment-size", "1MB") as running:
        wait_for(lambda: running.stats()["bytes_touched"] == 32 << 20, "the memory is touched")
        yield running


@pytest.mark.parametrize("by_layer", [False, True], ids=["whole", "by layer"])
@pytest.mark.parametrize("page_blocks", [1, 3], ids=["blocks", "chunks"])
@pytest.mark.parametrize(
    ("heads", "writers", "readers"),
    [(4, 1, 2), (4, 2, 1), (4, 2, 4), (2, 4, 1), (2, 1, 4), (1, 2, 1), (1, 1, 2)],
    ids=["1-2", "2-1", "2-4", "copies-1", "1-copies", "MLA 2-1", "MLA 1-2"],
)
def test_pages_serve_any_number_of_ranks(
    node: Node, heads: int, writers: int, readers: int, page_blocks: int, *, by_layer: bool
) -> None:
    """The last page is not full; in a chunk it has one block of three."""
    plane = Plane(f"default/m/{heads}{writers}{readers}{page_blocks}{by_layer}", shards=heads)
    one = Ranks(node, plane, heads, writers, seed=1, page_blocks=page_blocks, by_layer=by_layer)
    other = Ranks(node, plane, heads, readers, seed=2, page_blocks=page_blocks)
    reader = PoolClient(node.socket, "scheduler")
    tokens = list(range(14))
    size = BLOCK * page_blocks
    chain = KeyChain("model", size)
    full = chain.extend(tokens)
    tail = chain.tail(full, tokens[full * size :])
    try:
        one.save(
            Save(1, "r", 0, chain.parent(0), [*chain.tails(0, full), tail], [[5, 2, 7, 1]], partial=True),
            by_layer=by_layer,
        )
        search = Search(reader, [plane], size, 2.0)
        wait_for(lambda: search.reach(Prompt(tokens, chain, lambda _size: ()))[0] == 14, "the pages are committed")
        found = search.take(Prompt(tokens, chain, lambda _size: ()))
        assert (found.tokens, found.chunks) == (14, full)
        part = LoadPart(0, [1, 3, 4, 6], found.pages[0].keys, found.pages[0].packed_refs)
        if by_layer:
            rest, last = Load("r", found.leases[0].node, [part], in_step=True).split([plane], page_blocks)
            other.load(last, in_step=True)
            other.load(rest, in_step=True)
        else:
            other.load(Load("r", found.leases[0].node, [part]))
        copies = max(readers // heads, 1)
        for source, target in zip([5, 2, 7, 1], [1, 3, 4, 6], strict=True):
            expected = [layer[:: max(writers // heads, 1)] for layer in one.whole(source)]
            assert equal([layer[::copies] for layer in other.whole(target)], expected)
    finally:
        one.close()
        other.close()
        reader.close()
