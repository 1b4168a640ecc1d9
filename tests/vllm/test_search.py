"""How much of a prompt is found over several planes: never more than can be used, and leases that balance."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from ems.pool.client.answers import Hits, Lease, LookupHints, Namespace, TailHit
from ems.pool.keys import KEY_BYTES, KeyChain, Tail, cut, page_key, page_keys, split_keys
from ems.pool.layout import REF_BYTES
from ems.pool.protocol import coding, messages
from ems.pool.reasons.words import Reason
from ems.vllm.planes import Plane, first_in_sight
from ems.vllm.requests import NOTHING
from ems.vllm.search import Prompt, Search

BLOCK = 4


class Shelf:
    """As much of a pool as a search sees: pages by namespace, leases that are out."""

    def __init__(self) -> None:
        self.pages: dict[str, list[bytes]] = {}
        self.tails: list[Tail] = []
        self.leases: dict[int, bytes] = {}
        self.node = "node"
        self.calls = 0
        self.computing: set[float] = set()
        """What a page was said to take to be computed."""
        self.below: list[bytes] = []
        """Keys that come up from a tier below memory."""
        self.asked: list[tuple[bytes, bool]] = []
        """Directories in which tails were looked for, and whether with a lease."""
        self.directories: set[bytes] = set()
        """Directories of which the node was told, with keys, that a tail may be looked for in them."""
        self.lose_after: int | None = None
        """Number of calls after which all pages are gone."""

    def lookup(
        self, namespace: Namespace, keys: bytes, *, lease: bool = False, timeout: float, hints: LookupHints
    ) -> Hits:
        assert timeout
        assert not hints.patience, "nobody said that the node may wait"
        self.computing.add(hints.compute)
        assert coding.encode_request(messages.Lookup(0, keys, directories=hints.directories)), "as a node takes it"
        self.directories.update(split_keys(hints.directories))
        here = self._here(namespace)
        wanted = [keys[i : i + KEY_BYTES] for i in range(0, len(keys), KEY_BYTES)]
        count = next((i for i, key in enumerate(wanted) if key not in here), len(wanted))
        held = self._lease(wanted[:count]) if lease and count else None
        return Hits(count, 0, held, None, sum(key in self.below for key in wanted[count:]))

    def lookup_tail(
        self, namespace: Namespace, tail: Tail, *, lease: bool = False, timeout: float, shards: int, patience: float
    ) -> TailHit:
        assert timeout
        assert not patience
        assert tail.directory in self.directories or not self.directories, "it could be asked for with the keys"
        self.asked.append((tail.directory, lease))
        here = self._here(namespace)
        found = [(other.common(tail.tokens), other) for other in self.tails if other.directory == tail.directory]
        found = [(shared, other) for shared, other in found if shared and other.key in here]
        if not found:
            return TailHit(0, b"", pending=False, lease=None)
        shared, best = max(found, key=lambda pair: pair[0])
        return TailHit(shared, best.key, pending=False, lease=self._lease([best.key]) if lease else None)

    def explain(self, name: str, keys: bytes, timeout: float) -> Any:
        """As a node does: what is there behind something that is not is no prefix."""
        assert timeout
        here, codes = self._here(Namespace(name, 0)), bytearray()
        for start in range(0, len(keys), KEY_BYTES):
            behind = Reason.GAP.code if any(codes) else 0
            codes.append(behind if keys[start : start + KEY_BYTES] in here else Reason.NEVER_STORED.code)
        return SimpleNamespace(codes=bytes(codes))

    def release(self, lease: Lease) -> None:
        del self.leases[lease.number]

    def _here(self, namespace: Namespace) -> list[bytes]:
        self.calls += 1
        if self.lose_after is not None and self.calls > self.lose_after:
            return []
        return self.pages.get(namespace.name, [])

    def _lease(self, keys: list[bytes]) -> Lease:
        number = len(self.leases) + self.calls * 100
        self.leases[number] = b"".join(keys)
        # A reference of the test is the beginning of the key that it stands for.
        return Lease(self.node, 1, number, b"".join(key[:REF_BYTES] for key in keys))


def make_prompt(tokens: int) -> Prompt:
    ids = list(range(tokens))
    chain = KeyChain("model", BLOCK)
    chain.extend(ids)
    return Prompt(ids, chain, lambda _size: ())


def put(shelf: Shelf, plane: Plane, prompt: Prompt, block: int, *, shards: int | None = None) -> None:
    key = prompt.chain[block : block + 1][0]
    pages = shelf.pages.setdefault(plane.namespace, [])
    pages += [page_key(key, shard) for shard in range(plane.shards if shards is None else shards)]


def put_tail(shelf: Shelf, planes: list[Plane], prompt: Prompt, block: int) -> None:
    tail = prompt.chain.tail(block, prompt.tokens[block * BLOCK :])
    shelf.tails.append(tail)
    for plane in planes:
        shelf.pages.setdefault(plane.namespace, []).extend(page_key(tail.key, shard) for shard in range(plane.shards))


def search(shelf: Any, planes: list[Plane]) -> Search:
    return Search(shelf, planes, BLOCK, 1.0)


def furthest(planes: list[Plane], there: dict[str, set[int]], prompt: Prompt, tail_at: int) -> int:
    """The most tokens of ``prompt`` that all planes can go on from; all of it if a tail is at its last block."""

    def usable(full: int, tail: int) -> bool:
        tokens = full * BLOCK + tail
        needed = (set(range(first_in_sight(plane.window, tokens - 1, BLOCK), full)) for plane in planes)
        return all(blocks <= there[plane.namespace] for plane, blocks in zip(planes, needed, strict=True))

    best = max((full * BLOCK for full in range(1, len(prompt.chain) + 1) if usable(full, 0)), default=0)
    tail = len(prompt.tokens) % BLOCK
    return len(prompt.tokens) if tail_at >= 0 and usable(tail_at, tail) else best


@given(data=st.data())
def test_what_is_found_is_what_can_be_used(data: st.DataObject) -> None:
    shelf = Shelf()
    planes = [Plane("full", shards=data.draw(st.integers(1, 2)))]
    if data.draw(st.booleans()):
        planes.append(Plane("window", group=1, shards=2, window=data.draw(st.integers(1, 12))))
    if data.draw(st.booleans()):
        planes.append(Plane("stage", stage=1))
    prompt = make_prompt(data.draw(st.integers(1, 30)))
    blocks = len(prompt.chain)
    there = {plane.namespace: {block for block in range(blocks) if data.draw(st.integers(0, 4))} for plane in planes}
    for plane in planes:
        for block in there[plane.namespace]:
            put(shelf, plane, prompt, block)
    with_tail = bool(len(prompt.tokens) % BLOCK) and data.draw(st.booleans())
    if with_tail:
        put_tail(shelf, planes, prompt, blocks)

    found = search(shelf, planes).take(prompt)

    best = furthest(planes, there, prompt, blocks if with_tail else -1)
    assert found.tokens == best
    for pages in found.pages:
        plane = planes[pages.plane]
        wanted = prompt.chain.packed(pages.first, found.chunks)
        assert pages.keys.startswith(wanted)
        assert pages.first <= first_in_sight(plane.window, found.tokens - 1, BLOCK)
        named = cut(page_keys(pages.keys, plane.shards), KEY_BYTES)
        assert pages.packed_refs == b"".join(key[:REF_BYTES] for key in named)
    assert set(shelf.leases) == {lease.number for lease in found.leases}


@given(data=st.data())
def test_a_prompt_goes_on_from_the_last_state_that_all_such_layers_have(data: st.DataObject) -> None:
    """Behind chunks that are all there, and never from the prompt's end: its last token is computed again."""
    shelf, prompt = Shelf(), make_prompt(data.draw(st.integers(1, 40)))
    full = Plane("full", shards=data.draw(st.integers(1, 2)))
    states = [Plane(f"state {at}", group=at, shards=2, window=1, state=True) for at in (1, 2)]
    chunks = data.draw(st.integers(0, len(prompt.chain)))
    for chunk in range(chunks):
        put(shelf, full, prompt, chunk)
    there = [set(data.draw(st.sets(st.integers(1, len(prompt.chain))))) if len(prompt.chain) else set() for _ in states]
    for plane, ends in zip(states, there, strict=True):
        for end in ends:
            put(shelf, plane, prompt, end - 1)
    put_tail(shelf, [full, *states], prompt, len(prompt.chain))

    found = search(shelf, [full, *states]).take(prompt)

    last = min(chunks, (len(prompt.tokens) - 1) // BLOCK)
    best = max((end for end in there[0] & there[1] if end <= last), default=0)
    assert found.tokens == best * BLOCK
    assert [pages.first for pages in found.pages] == ([0, best - 1, best - 1] if best else [])
    assert set(shelf.leases) == {lease.number for lease in found.leases}


@given(data=st.data())
def test_chunks_of_several_sizes_end_where_those_of_all_do(data: st.DataObject) -> None:
    """As below vLLM's OffloadingConnector, where groups may have blocks of several sizes."""
    shelf, prompt = Shelf(), make_prompt(data.draw(st.integers(1, 30)))
    sizes = {2: KeyChain("model", BLOCK // 2), 4: KeyChain("model", BLOCK // 4)}
    for chain in sizes.values():
        chain.extend(prompt.tokens)
    prompt.finer = sizes
    window = data.draw(st.integers(1, 12))
    planes = [Plane("full"), Plane("fine", group=1, shards=2, parts=2), Plane("window", 2, window=window, parts=4)]
    there = {}
    for plane in planes:
        chain = prompt.chain_of(plane)
        there[plane.namespace] = {at for at in range(len(chain)) if data.draw(st.integers(0, 9))}
        keys = b"".join(chain[at : at + 1][0] for at in sorted(there[plane.namespace]))
        shelf.pages[plane.namespace] = cut(page_keys(keys, plane.shards), KEY_BYTES) if keys else []

    found = Search(cast("Any", shelf), planes, BLOCK, 1.0, tails=False).take(prompt)

    def usable(chunks: int) -> bool:
        needed = (
            set(range(first_in_sight(plane.window, chunks * BLOCK - 1, BLOCK // plane.parts), chunks * plane.parts))
            for plane in planes
        )
        return all(parts <= there[plane.namespace] for plane, parts in zip(planes, needed, strict=True))

    assert found.chunks == max((chunks for chunks in range(1, len(prompt.chain) + 1) if usable(chunks)), default=0)
    assert found.tokens == found.chunks * BLOCK
    for pages in found.pages:
        plane = planes[pages.plane]
        assert pages.keys == prompt.chain_of(plane).packed(pages.first, found.chunks * plane.parts)
    assert set(shelf.leases) == {lease.number for lease in found.leases}


def test_a_block_that_lacks_a_shard_is_not_there() -> None:
    shelf, plane, prompt = Shelf(), Plane("full", shards=2), make_prompt(12)
    put(shelf, plane, prompt, 0)
    put(shelf, plane, prompt, 1, shards=1)
    put(shelf, plane, prompt, 2)

    assert search(shelf, [plane]).take(prompt).tokens == BLOCK


def test_a_tail_that_lacks_a_plane_is_not_there() -> None:
    shelf, planes, prompt = Shelf(), [Plane("full"), Plane("other", stage=1)], make_prompt(6)
    for plane in planes:
        put(shelf, plane, prompt, 0)
    put_tail(shelf, planes[:1], prompt, 1)
    assert search(shelf, planes).take(prompt).tokens == 4

    put_tail(shelf, planes[1:], prompt, 1)
    assert search(shelf, planes).take(prompt).tokens == 6


@given(st.integers(1, 12))
def test_pages_that_go_during_the_search_are_not_promised(calls: int) -> None:
    shelf, planes, prompt = Shelf(), [Plane("full", shards=2), Plane("window", group=1, window=6)], make_prompt(16)
    for plane in planes:
        for block in range(4):
            put(shelf, plane, prompt, block)
    shelf.lose_after = calls
    found = search(shelf, planes).take(prompt)

    assert found == NOTHING or len(found.leases) == 2
    assert set(shelf.leases) == {lease.number for lease in found.leases}


def test_what_comes_up_from_a_tier_is_told_and_pages_share_the_computing() -> None:
    shelf, prompt = Shelf(), make_prompt(4 * BLOCK)
    planes = [Plane("full", shards=2)]
    looking = search(shelf, planes)
    looking.computing = 0.5
    told = []
    for below in ([], [bytes(page_keys(prompt.chain.packed(0, 1), 2)[:KEY_BYTES])], []):
        shelf.below = below
        looking.take(prompt)
        told.append(looking.promoting)
    assert told == [False, True, False]
    assert shelf.computing == {0.25}


def test_the_end_of_a_prompt_is_asked_for_while_what_stands_before_it_comes_up() -> None:
    shelf, planes, prompt = Shelf(), [Plane("full")], make_prompt(4 * BLOCK + 2)
    put(shelf, planes[0], prompt, 0)
    shelf.below = list(prompt.chain[1:4])
    looking = search(shelf, planes)
    end = prompt.chain.tail(4, prompt.tokens[4 * BLOCK :])

    assert looking.take(prompt).tokens == looking.reach(prompt)[0] == BLOCK
    assert shelf.directories == {tail.directory for tail in [*prompt.chain.tails(0, 4), end]}
    assert shelf.asked == [(end.directory, False)] * 2

    shelf.below = []
    for block in range(1, 4):
        put(shelf, planes[0], prompt, block)
    put_tail(shelf, planes, prompt, 4)
    assert looking.take(prompt).tokens == len(prompt.tokens)
    assert shelf.asked[2:] == [(end.directory, True)]
