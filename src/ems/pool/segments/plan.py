"""How many segments a node has, how large they are, and which of them have no memory.  A brain.

A pool that was made smaller while it ran gave the memory of some segments back.  Which these are is in a file beside
them, so that the pool stays smaller.  Their files stay, because a gap in their numbers would cost the segments behind
it.  What always holds: a segment is in that file only when its memory was given back, and out of it before anything is
put into it again; a file that cannot be read knows of none, and the pool is then as large as its files.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from ems.config import NodeConfig, default_pool_size, format_size, pick_segment_size
from ems.errors import ConfigError

MAX_SEGMENTS = 4096


def plan_segments(config: NodeConfig, free: int, memory: int, found: Sequence[int] = ()) -> list[int]:
    """Sizes of the segments of a node, where the file system has ``free`` bytes left and the machine ``memory``.

    An earlier node left segments of the sizes ``found``, whose memory is among the free.  Settings that are not given
    stay as they were.  Raises ConfigError: no pool can be made like that.
    """
    size = config.size or sum(found) or default_pool_size(free, memory)
    if size > free:
        raise ConfigError(
            f"a pool of {format_size(size)} does not fit in {config.directory}, which has {format_size(free)} free; "
            "give a smaller --size or mount a larger shared memory file system"
        )
    kept = found[0] if found and found[0] <= size else 0
    segment = (config.segment_size or kept or pick_segment_size(size)) // mmap.PAGESIZE * mmap.PAGESIZE
    if not segment:
        raise ConfigError(
            f"segments of {format_size(config.segment_size or size)} are smaller than a memory page of "
            f"{mmap.PAGESIZE} bytes, give a larger {'--segment-size' if config.segment_size else '--size'}"
        )
    count = size // segment
    if not count:
        raise ConfigError(
            f"segments of {format_size(segment)} do not fit in a pool of {format_size(size)}, give a smaller "
            "--segment-size or a larger --size"
        )
    if count > MAX_SEGMENTS:
        raise ConfigError(
            f"a pool of {format_size(size)} in segments of {format_size(segment)} makes {count} of them, expected at "
            f"most {MAX_SEGMENTS}; give a larger --segment-size"
        )
    return [segment] * count


def lay_out(found: int, gone: AbstractSet[int], wanted: int) -> tuple[int, set[int]]:
    """How many of ``found`` segments a pool of ``wanted`` ones goes on with, and which of these stay given up.

    ``gone`` were given up, and come back, the first ones first, where more are wanted than the others.
    """
    before = sorted(number for number in gone if number < found)
    stay = set(before[max(wanted - (found - len(before)), 0) :])
    if wanted >= found - len(stay):
        return max(found, wanted) if not stay else found, stay
    live = [number for number in range(found) if number not in stay]
    count = live[wanted - 1] + 1
    return count, {number for number in stay if number < count}
