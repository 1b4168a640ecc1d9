"""Random histories of saves, loads and lookups beside a model in plain Python."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from tests.cc_v1.conftest import NEVER, OPTION
from tests.kit.examples import examples
from tests.kit.node import NodeProcess

if TYPE_CHECKING:
    from ems.cc_v1.context_caching import ContextCaching
    from tests.cc_v1.conftest import Connect

BLOCK, BLOCKS = 4, 6
SLOTS = BLOCK * BLOCKS
_fresh = itertools.count()


@st.composite
def transfers(draw: st.DrawFn) -> tuple[str, list[int], list[int], list[int]]:
    """What to do, hashes, offsets, slots: blocks whole or not, in engine order or scattered."""
    verb = draw(st.sampled_from(["save", "save", "load", "exists"]))
    hashes = draw(st.lists(st.integers(-2, 3), max_size=BLOCKS))
    tidy = draw(st.booleans())
    offsets = [BLOCK if tidy else draw(st.sampled_from([BLOCK, BLOCK, 1, 2, 3])) for _ in hashes]
    slots = draw(st.permutations(range(SLOTS)))
    if tidy and draw(st.booleans()):
        order = draw(st.permutations(range(BLOCKS)))
        slots = [block * BLOCK + position for block in order for position in range(BLOCK)]
    return verb, hashes, offsets, list(slots[: sum(offsets)])


class Model:
    """What the pool must answer."""

    def __init__(self) -> None:
        self.whole: dict[int, Any] = {}
        self.begun: dict[int, Any] = {}

    def save(self, hashed: int, data: Any) -> None:
        if len(data) == BLOCK:
            self.whole.setdefault(hashed, data)
        elif hashed not in self.whole:
            self.begun.setdefault(hashed, data)

    def load(self, hashed: int, count: int) -> Any:
        """The tokens, None where the pool has fewer."""
        page = self.whole.get(hashed)
        if page is None and count < BLOCK:
            page = self.begun.get(hashed)
        return page[:count] if page is not None and len(page) >= count else None

    def exists(self, hashes: list[int]) -> int:
        return len(list(itertools.takewhile(lambda h: h in self.whole or h in self.begun, hashes)))


@examples(120, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_the_pool_answers_like_the_model(node: NodeProcess, connect: Connect, data: st.DataObject) -> None:
    cc = connect(node, model_id="histories", health=NEVER)
    caches = [[torch.zeros(BLOCKS, BLOCK, 1, 2, dtype=torch.int64) for _ in range(2)]]
    cc.register_kvcache(caches)
    model, base = Model(), next(_fresh) << 70
    numbers = itertools.count(1)
    # One reservation for each block, for some, or for all: the next is asked for while the one before is copied.
    with patch("ems.cc_v1.transfers.RESERVATION_BYTES", data.draw(st.sampled_from([1, 256, 1 << 20]))):
        _go_through(cc, caches, model, numbers, base, data)


def _go_through(
    cc: ContextCaching, caches: Any, model: Model, numbers: itertools.count[int], base: int, data: st.DataObject
) -> None:
    for _ in range(data.draw(st.integers(1, 8))):
        verb, hashes, offsets, slots = data.draw(transfers())
        named = [hashed + base for hashed in hashes]
        if verb == "exists":
            assert cc.exists(named, OPTION).success == model.exists(hashes)
        elif verb == "save":
            _save(cc, caches, model, numbers, (hashes, named, offsets, slots))
        else:
            _load(cc, caches, model, (hashes, named, offsets, slots))


def _flat(caches: list[list[Any]]) -> Any:
    """Row ``i`` is all that slot ``i`` holds."""
    return torch.cat([tensor.reshape(SLOTS, -1) for layer in caches for tensor in layer], dim=1)


def _save(cc: ContextCaching, caches: list[list[Any]], model: Model, numbers: Any, what: Any) -> None:
    hashes, named, offsets, slots = what
    for tensor in caches[0]:
        tensor.copy_(torch.tensor([next(numbers) for _ in range(tensor.numel())]).reshape(tensor.shape))
    result = cc.get_result(cc.async_save(slots, named, offsets, OPTION))
    assert result.success == len(hashes)
    memory, begin = _flat(caches), 0
    for hashed, count in zip(hashes, offsets, strict=True):
        model.save(hashed, memory[slots[begin : begin + count]].clone())
        begin += count


def _load(cc: ContextCaching, caches: list[list[Any]], model: Model, what: Any) -> None:
    hashes, named, offsets, slots = what
    expected, begin, loaded = _flat(caches).clone(), 0, 0
    for hashed, count in zip(hashes, offsets, strict=True):
        page = model.load(hashed, count)
        if page is None:
            break
        expected[slots[begin : begin + count]] = page
        begin += count
        loaded += 1
    result = cc.get_result(cc.async_load(slots, named, offsets, OPTION))
    assert result.success == loaded
    assert torch.equal(_flat(caches), expected)
