"""Which engine memory belongs to which block: token slots, cut into blocks.

A slot is ``block_id * block_size + position``.  Most blocks lie in one run inside one engine block, which is
copied as it is; any other order is possible and copied token by token.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ems.cc_v1.errors import invalid

if TYPE_CHECKING:
    from collections.abc import Sequence

Numbers = np.ndarray[Any, np.dtype[np.int64]]


class SlotRun(NamedTuple):
    """``tokens`` tokens that lie side by side in engine block ``block``, the first at position ``first``."""

    block: int
    first: int
    tokens: int


class Scattered(NamedTuple):
    """Tokens anywhere: token ``i`` at ``positions[i]`` of engine block ``blocks[i]``."""

    blocks: Numbers
    positions: Numbers

    @property
    def tokens(self) -> int:
        return len(self.blocks)


SlotSpan = SlotRun | Scattered


def place_of(slots: Numbers, block_size: int) -> SlotSpan:
    count, first, last = len(slots), int(slots[0]), int(slots[-1])
    if last - first == count - 1 and first // block_size == last // block_size and bool((np.diff(slots) == 1).all()):
        return SlotRun(first // block_size, first % block_size, count)
    return Scattered(slots // block_size, slots % block_size)


class Blocks:
    """The blocks of one transfer: their hashes, their numbers of tokens, their slots.

    Raises:
        EmsException: EMS_INVALID_ARGUMENT, the three do not fit together or name memory that is not there.
    """

    def __init__(
        self, hashes: list[int], offsets: list[int], slots: Numbers, *, block_size: int, num_blocks: int
    ) -> None:
        if len(offsets) != len(hashes):
            raise invalid(f"{len(offsets)} offsets for {len(hashes)} hashes, expected one number of tokens a block")
        _check_offsets(offsets, block_size)
        if sum(offsets) != len(slots):
            raise invalid(
                f"slot_mapping has {len(slots)} entries, but the offsets sum to {sum(offsets)}; give one slot a token"
            )
        if len(slots) and not 0 <= int(slots.min()) <= int(slots.max()) < num_blocks * block_size:
            raise invalid(
                f"slot_mapping names slots {int(slots.min())} to {int(slots.max())}, but the registered caches have "
                f"slots 0 to {num_blocks * block_size - 1}"
            )
        self.hashes = hashes
        self.offsets = offsets
        self.block_size = block_size
        self._slots = slots
        self._starts = [0, *accumulate(offsets)]

    def __len__(self) -> int:
        return len(self.hashes)

    def place(self, position: int) -> SlotSpan:
        return place_of(self._slots[self._starts[position] : self._starts[position + 1]], self.block_size)

    def whole(self, position: int) -> bool:
        return self.offsets[position] == self.block_size


def _check_offsets(offsets: Sequence[int], block_size: int) -> None:
    for position, tokens in enumerate(offsets):
        if not 1 <= tokens <= block_size:
            raise invalid(f"offset {position} is {tokens}, expected 1 to {block_size} tokens, which is the block size")
