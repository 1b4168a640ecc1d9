"""Classes of pages whose uses are forecast together.

A page that was used more than once is judged by how often.  Of one that was used once, all that is known is where it
hangs: behind a prompt that only few have used, as the next turn of a conversation does, or behind nothing or something
that everybody uses; and whether it is the end of what was stored, which the next turn rarely repeats to the token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ems.pool.policy.memory import MOST_USES

if TYPE_CHECKING:
    from ems.pool.pages import Page

BEGUN, BEGUN_END, GOES_ON, GOES_ON_END = range(4)
"""Used once: what begins a prompt or hangs on what all share, and what goes on from what few used; the ends of both."""
KINDS = 8
"""Those, and uses of 2 or 3, 4 to 7, 8 to 15, and more."""
FEW = 7
"""Uses of what is not shared by everybody."""
KIND_OF_USES = [min(uses.bit_length() + 2, KINDS - 1) for uses in range(MOST_USES + 1)]


def kind_of(page: Page) -> int:
    """The class of a page that has one, after it was used or something was hung on it."""
    if page.uses > 1:
        return KIND_OF_USES[page.uses]
    kind: int = page.place.kind
    return kind & ~1 if page.suffixes is not None else kind


def kind_of_new(page: Page) -> int:
    """The class of a page that came just now; what it hangs on has its class already."""
    if page.uses > 1:
        return KIND_OF_USES[page.uses]
    end = page.suffixes is None
    parent = page.parent
    if parent is None or parent.place is None:
        return BEGUN + end
    goes_on = parent.uses <= FEW if parent.uses > 1 else parent.place.kind >= GOES_ON
    return (GOES_ON if goes_on else BEGUN) + end
