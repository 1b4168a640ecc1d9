"""What policies have learned, written down for the next start of a node.

A brain.  It is a help only: a node without it begins to learn anew.  What always holds: what is damaged, or of another
form, is not believed at all; what is written is bounded by :data:`MOST_BYTES`; whatever is taken down of a node that
serves is taken in steps of at most :data:`STEP` pages, so it is not of one moment.
"""

from __future__ import annotations

import zlib
from collections.abc import Generator, Iterable
from typing import TYPE_CHECKING

import msgspec

from ems.pool.keys import KEY_BYTES, cut
from ems.pool.policy.seam import Learning

if TYPE_CHECKING:
    from ems.pool.core.index import Index

STEP = 4096
"""Pages that are looked at in one go, which takes about a millisecond."""
MOST_BYTES = 256 << 20
"""Bytes of all that is written; namespaces for which there is no room in it are left out."""
LARGEST = MOST_BYTES + (16 << 20)
"""Bytes of the largest file: names and lengths come on top."""
_MAGIC = b"EMSEXP01"
_HEAD = len(_MAGIC) + 4


class Experience(msgspec.Struct, frozen=True, array_like=True):
    """What the policy of one namespace knows: the pages that it had by their keys, 16 bytes each.

    ``uses`` has a byte and ``places`` two for each of them; ``learned`` is in the policy's own words.
    """

    namespace: str
    keys: bytes
    uses: bytes
    places: bytes
    learned: bytes

    @property
    def size(self) -> int:
        """About how many bytes it takes."""
        return len(self.keys) + len(self.uses) + len(self.places) + len(self.learned)


def take_down(
    namespaces: Iterable[tuple[str, Index]], *, still: bool = False
) -> Generator[None, None, list[Experience]]:
    """What is known of ``namespaces``, the most important first; yields after each step, and returns it at the end.

    With ``still`` nothing happens to them between the steps, and the order of their pages goes along.
    """
    taken: list[Experience] = []
    left = MOST_BYTES
    for name, index in namespaces:
        policy = index.policy
        if not isinstance(policy, Learning):
            continue
        keys, uses, places = [], [], []
        # A page is to count as newer than what hangs on it, which came after it.
        pages = list(policy) if still else list(index)[::-1]
        for at in range(0, len(pages), STEP):
            step = [page for page in pages[at : at + STEP] if page.present]
            keys += [page.key for page in step]
            uses.append(bytes([page.uses for page in step]))
            places.append(policy.places(step))
            yield
        one = Experience(name, b"".join(keys), b"".join(uses), b"".join(places), policy.learned())
        if one.size <= left:
            left -= one.size
            taken.append(one)
        yield
    return taken


def all_at_once(namespaces: Iterable[tuple[str, Index]]) -> list[Experience]:
    """What is known of ``namespaces``, the most important first."""
    taking = take_down(namespaces, still=True)
    while True:
        try:
            next(taking)
        except StopIteration as end:
            known: list[Experience] = end.value
            return known


def pack_experience(known: Iterable[Experience]) -> list[bytes]:
    """The bytes in which it is written down."""
    body = msgspec.msgpack.encode(list(known))
    return [_MAGIC, zlib.crc32(body).to_bytes(4, "little"), body]


def unpack_experience(raw: bytes) -> dict[str, Experience]:
    """What was written down, by namespace.

    Raises:
        ValueError: it is of another form, or damaged.
    """
    if len(raw) > LARGEST or not raw.startswith(_MAGIC):
        raise ValueError("it was written by another release")
    body = memoryview(raw)[_HEAD:]
    if zlib.crc32(body) != int.from_bytes(raw[len(_MAGIC) : _HEAD], "little"):
        raise ValueError("it is damaged")
    try:
        known = msgspec.msgpack.decode(body, type=list[Experience])
    except msgspec.MsgspecError as error:
        raise ValueError(f"it makes no sense: {error}") from error
    for one in known:
        keys = cut(one.keys, KEY_BYTES)
        if not len(keys) == len(set(keys)) == len(one.uses) or len(one.places) != 2 * len(keys):
            raise ValueError("its pages do not add up")
    return {one.namespace: one for one in known}
