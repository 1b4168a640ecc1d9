"""Arguments as callers give them, made into plain ones or refused with a sentence.

Lists, tuples, arrays and tensors are all in use; only whole numbers are taken as such, because a fraction
that is cut off would name another block.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from itertools import accumulate
from typing import Any

import numpy as np

from ems.cc_v1.cc_config import CcKvOption
from ems.cc_v1.errors import invalid
from ems.pool.pages import ClusterWrite
from ems.transfers.plan import Numbers, TokenSpan

DAY_SECONDS = 86400.0
"""Longer time-outs are cut to this."""


def whole_numbers(name: str, values: Iterable[Any]) -> list[int]:
    """``values`` as plain integers of any size.

    Raises EmsException: EMS_INVALID_ARGUMENT, it is no sequence of whole numbers.
    """
    plain = values.tolist() if hasattr(values, "tolist") else values
    try:
        return [operator.index(value) for value in plain]
    except TypeError as error:
        raise invalid(f"{name} is not a sequence of whole numbers: {error}") from error


def slot_numbers(slot_mapping: Any) -> Numbers:
    """A copy of ``slot_mapping``, a tensor or sequence of whole numbers in one dimension, as 64-bit integers.

    Raises EmsException: EMS_INVALID_ARGUMENT, it is something else.
    """
    if hasattr(slot_mapping, "detach"):
        slot_mapping = slot_mapping.detach().cpu().numpy()
    try:
        numbers = np.asarray(slot_mapping)
    except ValueError as error:
        raise invalid(f"slot_mapping is not a sequence of whole numbers: {error}") from error
    if numbers.size == 0 and numbers.ndim == 1:
        return np.zeros(0, dtype=np.int64)
    if numbers.ndim != 1 or numbers.dtype.kind not in "iu" or numbers.dtype == np.uint64:
        raise invalid(
            f"slot_mapping has {numbers.ndim} dimensions of {numbers.dtype}, expected one dimension of whole numbers"
        )
    return numbers.astype(np.int64, copy=True)


def timeout_of(option: CcKvOption | None) -> float:
    """The time-out of ``option`` in seconds.

    Raises EmsException: EMS_INVALID_ARGUMENT, it is negative or no number.
    """
    option = option or CcKvOption()
    if not hasattr(option, "timeout"):
        raise invalid(f"option is a {type(option).__name__}, expected a CcKvOption or None")
    given: object = option.timeout
    if not isinstance(given, int | float) or isinstance(given, bool) or not given >= 0:
        raise invalid(f"option.timeout is {given!r}, expected milliseconds, at least 0")
    return min(given, DAY_SECONDS * 1000) / 1000


def reach_of(option: CcKvOption | None) -> tuple[bool, ClusterWrite]:
    """Whether a call keeps to this host, and when a cluster gets what it saves: without an option as the node says."""
    write: ClusterWrite = "on_save" if getattr(option, "write_rcache", True) else "never"
    return bool(getattr(option, "read_local_only", False)), "" if option is None else write


class Blocks:
    """The blocks of one transfer: their hashes, their numbers of tokens, their slots.

    A slot is ``block_id * block_size + position``, and the slots of a block may be anywhere and in any order.
    Raises EmsException: EMS_INVALID_ARGUMENT, the three do not fit together or name memory that is not there.
    """

    def __init__(
        self, hashes: list[int], offsets: list[int], slots: Numbers, *, block_size: int, num_blocks: int
    ) -> None:
        if len(offsets) != len(hashes):
            raise invalid(f"{len(offsets)} offsets for {len(hashes)} hashes, expected one number of tokens a block")
        for position, tokens in enumerate(offsets):
            if not 1 <= tokens <= block_size:
                raise invalid(
                    f"offset {position} is {tokens}, expected 1 to {block_size} tokens, which is the block size"
                )
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

    def span(self, position: int) -> TokenSpan:
        slots = self._slots[self._starts[position] : self._starts[position + 1]]
        return TokenSpan(slots // self.block_size, slots % self.block_size)

    def whole(self, position: int) -> bool:
        return self.offsets[position] == self.block_size
