"""What one publisher of KV events has told: a brain that turns engines' names of blocks into the router's.

An engine names a block by a hash of its own.  The router names it by the tokens up to its end, as
:func:`~ems.router.choosing.prefix_index.block_hashes` does, so that a prompt of token ids finds it.  Hence this
remembers, for each block of the engine, the router's name and in which places it is.

Batches are numbered from 0.  A number that is skipped is asked for; one that is smaller than what was expected means
that the engine was restarted, and all that it told of before is void.

Only blocks with which a piece of a prompt may end are reported.

What always holds: at most ``capacity`` blocks are remembered, those told of last; a block is reported as lost in a
place only when it has left all media that belong to the place.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from enum import IntEnum
from typing import Final, NamedTuple

from ems.engines.kv_events import AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, Event
from ems.router.choosing.prefix_index import PIECE_TOKENS, Place, block_hashes

CAPACITY: Final = 1 << 18
"""Blocks of one publisher that are remembered."""


class Medium(IntEnum):
    """Where a block is, as a bit."""

    GPU = 1
    CPU = 2
    STORAGE = 4
    EXTERNAL = 8


PLACES: Final = {Place.ENGINE: Medium.GPU, Place.HOST: Medium.CPU | Medium.STORAGE, Place.CLUSTER: Medium.EXTERNAL}
"""The media of each place."""


class Change(NamedTuple):
    """Blocks that a place has now, or has no more."""

    place: Place
    hashes: list[int]
    stored: bool


class _Block(NamedTuple):
    name: int
    end: int
    """Tokens of the prompt up to its end."""
    media: int


class Source:
    """One publisher; ``block_tokens`` is None until it told of the first block."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._known: OrderedDict[BlockHash, _Block] = OrderedDict()
        self.expected: int | None = None
        """The number of the next batch; None before the first one."""
        self.block_tokens: int | None = None
        self.adapters: set[str] = set()

    def __len__(self) -> int:
        return len(self._known)

    def missing(self, number: int) -> int | None:
        """Return the first batch before ``number`` that was not heard and should be asked for, if any."""
        first = 0 if self.expected is None or number < self.expected else self.expected
        return first if number > first else None

    def heard(self, number: int, events: Iterable[Event]) -> list[Change]:
        changes = self.lost() if self.expected is not None and number < self.expected else []
        self.expected = number + 1
        for event in events:
            changes += self._take(event)
        return changes

    def lost(self) -> list[Change]:
        """All that was told of is void: the engine was restarted, or is gone."""
        changes = []
        for place, media in PLACES.items():
            names = [block.name for block in self._known.values() if block.media & media and _ends_a_piece(block.end)]
            if names:
                changes.append(Change(place, names, stored=False))
        self._known.clear()
        self.expected = None
        return changes

    def _take(self, event: Event) -> list[Change]:
        if isinstance(event, AllBlocksCleared):
            return self._leaves(list(self._known), Medium.GPU)
        if event.group_idx:  # other groups have fewer of the same blocks: the first one stands for all
            return []
        medium = Medium.__members__.get((event.medium or "GPU").upper())
        if medium is None:
            return []
        if isinstance(event, BlockRemoved):
            return self._leaves(event.block_hashes, medium)
        return self._arrives(event, medium)

    def _arrives(self, event: BlockStored, medium: Medium) -> list[Change]:
        if event.block_size < 1 or any(key and set(key) != {event.lora_name} for key in event.extra_keys or ()):
            return []  # images and salts are not in the tokens, so their blocks have no name here
        if self.block_tokens is None:
            self.block_tokens = event.block_size
        parent, end = None, 0
        if event.parent_block_hash is not None:
            known = self._known.get(event.parent_block_hash)
            if known is None:
                return []  # its beginning was not heard of
            parent, end = known.name, known.end
        if event.lora_name:
            self.adapters.add(event.lora_name)
        names = block_hashes(event.token_ids, event.block_size, event.lora_name or "", parent)
        place = _place(medium)
        new = []
        for engine_name, name in zip(event.block_hashes, names, strict=False):
            before = self._known.pop(engine_name, None)
            media = before.media if before is not None else 0
            end += event.block_size
            self._known[engine_name] = _Block(name, end, media | medium)
            if not media & PLACES[place] and _ends_a_piece(end):
                new.append(name)
        changes = [Change(place, new, stored=True)] if new else []
        while len(self._known) > self._capacity:
            oldest = next(iter(self._known))
            for one in Medium:
                changes += self._leaves([oldest], one)
        return changes

    def _leaves(self, engine_names: Iterable[BlockHash], medium: Medium) -> list[Change]:
        place = _place(medium)
        gone = []
        for engine_name in engine_names:
            block = self._known.get(engine_name)
            if block is None or not block.media & medium:
                continue
            media = block.media & ~medium
            if media:
                self._known[engine_name] = _Block(block.name, block.end, media)
            else:
                del self._known[engine_name]
            if not media & PLACES[place] and _ends_a_piece(block.end):
                gone.append(block.name)
        return [Change(place, gone, stored=False)] if gone else []


def _place(medium: Medium) -> Place:
    return next(place for place, media in PLACES.items() if media & medium)


def _ends_a_piece(end: int) -> bool:
    return end % PIECE_TOKENS == 0
