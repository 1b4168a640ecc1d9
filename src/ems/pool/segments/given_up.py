"""With which segments a pool goes on that gave some up while it ran, when it was made smaller.

Which these are is in a file beside them, so that the pool stays smaller.

Their files stay, because a gap in their numbers would cost the segments behind it.  What always holds: a segment is in
the file only when its memory was given back, and out of it before anything is put into it again; a file that cannot be
read knows of none, and the pool is then as large as its files.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet


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
