"""Which page is in which pack of a tier, which packs leave when there is no room, which are too old.

A brain.  What always holds: a key is found in one pack as long as any pack has it, in the one that was known first; a
pack leaves as a whole; what is used keeps what it continues (its prefix's packs), so that no suffix outlives its prefix
for long.  Reading is safe beside one writer: it looks at single entries of dictionaries only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from ems.pool.keys import Tail
from ems.pool.tiers.answers import Holding, KeyRun
from ems.pool.tiers.pack_format import Head, Record

MAX_TAILS = 32
"""Tails that one directory lists; the oldest leaves the list first."""
_POSITION_BITS = 17
_POSITION_MASK = (1 << _POSITION_BITS) - 1
RUN = 64
"""Most keys of one run: namespaces that come up together take turns by runs."""
_HOPS = 64
"""Packs of a prefix that one use keeps."""
CATALOGUE = "ems-catalogue.bin"
"""What a node knew, for the next start."""
CATALOGUE_MAGIC = b"EMSCAT02"


class Pack(msgspec.Struct, eq=False):
    """One pack as the catalogue knows it."""

    number: int
    name: str
    size: int
    head: Head
    used_at: float
    keys: list[bytes]


class PackLocation(msgspec.Struct, frozen=True):
    """Where a page is: its pack and the record in it."""

    pack: Pack
    position: int

    @property
    def record(self) -> Record:
        """What its pack says of the page; made anew each time."""
        return Record(*self.pack.head.records[self.position].item())


class _Namespace(msgspec.Struct):
    page_size: int
    pages: dict[bytes, int] = {}
    elsewhere: dict[bytes, list[int]] = {}
    """Where pages are a second time: several nodes may write one page to a place that they share."""
    tails: dict[bytes, list[Tail]] = {}
    packs: dict[int, Pack] = {}
    size: int = 0
    used_at: float = 0.0


_NOTHING = _Namespace(0)


class Catalogue:
    """All that one node knows of a tier."""

    def __init__(self) -> None:
        self._namespaces: dict[str, _Namespace] = {}
        self._packs: dict[int, Pack] = {}
        self._by_name: dict[str, Pack] = {}
        self._next = 0
        self.bytes = 0
        self.pages = 0

    def __len__(self) -> int:
        return len(self._packs)

    def __iter__(self) -> Iterator[Pack]:
        return iter(list(self._packs.values()))

    def _of(self, namespace: str) -> _Namespace:
        return self._namespaces.get(namespace, _NOTHING)

    def page_size(self, namespace: str) -> int:
        """Bytes of a page of ``namespace``, 0 where there is none."""
        return self._of(namespace).page_size

    def holdings(self, now: float) -> dict[str, Holding]:
        return {
            name: Holding(known.page_size, len(known.pages), known.size, max(now - known.used_at, 0.0))
            for name, known in list(self._namespaces.items())
        }

    def packs_of(self, namespace: str) -> list[Pack]:
        """The packs of ``namespace``, that which was known first in front."""
        return list(self._of(namespace).packs.values())

    def found_in(self, pack: Pack) -> list[bytes]:
        """The keys that are found in ``pack``, not in another one."""
        base, pages = pack.number << _POSITION_BITS, self._of(pack.head.namespace).pages
        return [key for position, key in enumerate(pack.keys) if pages.get(key) == base | position]

    def add(self, name: str, size: int, head: Head, used_at: float) -> Pack | None:
        """A pack of ``size`` bytes is there; None, and nothing added, when its pages are not of the namespace's size.

        Pages that were known before stay where they were.
        """
        if (known := self._by_name.get(name)) is not None:
            return known
        namespace = self._namespaces.setdefault(head.namespace, _Namespace(head.page_size))
        if namespace.page_size != head.page_size:
            return None
        pack = Pack(self._next, name, size, head, used_at, head.records["key"].tolist())
        self._next += 1
        self._packs[pack.number] = self._by_name[name] = pack
        namespace.packs[pack.number] = pack
        namespace.size += size
        namespace.used_at = max(namespace.used_at, used_at)
        self.bytes += size
        base = pack.number << _POSITION_BITS
        before = len(namespace.pages)
        for position, key in enumerate(pack.keys):
            number = base | position
            first = namespace.pages.setdefault(key, number)
            if first < base:
                others = namespace.elsewhere.setdefault(key, [])
                # Once for each pack, however often somebody wrote the key into it.
                if not others or others[-1] < base:
                    others.append(number)
        self.pages += len(namespace.pages) - before
        for position, tail in head.tails.items():
            if namespace.pages[pack.keys[position]] == base | position:
                _list(namespace, tail)
        return pack

    def remove(self, name: str) -> None:
        pack = self._by_name.pop(name, None)
        if pack is None:
            return
        self.bytes -= pack.size
        for position in range(len(pack.keys)):
            self._forget(pack, position)
        del self._packs[pack.number]
        namespace = self._namespaces[pack.head.namespace]
        del namespace.packs[pack.number]
        namespace.size -= pack.size
        if not namespace.packs:
            del self._namespaces[pack.head.namespace]

    def _forget(self, pack: Pack, position: int) -> None:
        """The page is no more at ``position`` of ``pack``; it is found elsewhere from now on, if it is anywhere."""
        namespace, key = self._namespaces[pack.head.namespace], pack.keys[position]
        if (first := namespace.pages.get(key)) is None:
            return
        number = pack.number << _POSITION_BITS | position
        left = [one for one in (first, *namespace.elsewhere.pop(key, ())) if one != number]
        if left:
            namespace.pages[key] = left[0]
        else:
            del namespace.pages[key]
            self.pages -= 1
        if left[1:]:
            namespace.elsewhere[key] = left[1:]
        # The same page has the same tail wherever it is, which keeps its place in the list.
        tail, new = self._tail_at(first), self._tail_at(left[0]) if left else None
        if tail is not None and tail != new:
            _unlist(namespace, tail)
        if new is not None and tail != new:
            _list(namespace, new)

    def _tail_at(self, number: int) -> Tail | None:
        return self._packs[number >> _POSITION_BITS].head.tails.get(number & _POSITION_MASK)

    def drop(self, place: PackLocation) -> None:
        """The page at ``place`` turned out to be bad."""
        if self._packs.get(place.pack.number) is place.pack:
            self._forget(place.pack, place.position)

    def find(self, namespace: str, key: bytes) -> PackLocation | None:
        pages = self._of(namespace).pages
        while (number := pages.get(key)) is not None:
            pack = self._packs.get(number >> _POSITION_BITS)
            if pack is not None:
                return PackLocation(pack, number & _POSITION_MASK)
            # It went meanwhile: its keys had been found elsewhere, or nowhere any more, before that.
        return None

    def holds(self, namespace: str, keys: Sequence[bytes]) -> int:
        pages = self._of(namespace).pages
        for count, key in enumerate(keys):
            if key not in pages:
                return count
        return len(keys)

    def tail(self, namespace: str, key: bytes) -> Tail | None:
        """The tokens of the page of ``key``, if it is to be found by them."""
        place = self.find(namespace, key)
        return place.pack.head.tails.get(place.position) if place is not None else None

    def find_tail(self, namespace: str, tail: Tail) -> Tail | None:
        """The tail that shares most leading tokens with ``tail``, None when none shares any."""
        listed = self._of(namespace).tails.get(tail.directory, ())
        shares = [(one.common(tail.tokens), one) for one in listed]
        shared, best = max(shares, key=lambda pair: pair[0], default=(0, None))
        return best if shared else None

    def use(self, pack: Pack, now: float) -> list[Pack]:
        """Pages of ``pack`` were loaded: it and the packs of its prefix, which are returned, were used ``now``."""
        used = []
        at: Pack | None = pack
        for _ in range(_HOPS):
            if at is None or at in used or not at.keys:
                break
            at.used_at = max(at.used_at, now)
            used.append(at)
            if at.number in self._packs:
                namespace = self._namespaces[at.head.namespace]
                namespace.used_at = max(namespace.used_at, at.used_at)
            before = self.find(at.head.namespace, at.head.records["parent"][0].tobytes())
            at = before.pack if before is not None else None
        return used

    def recent(self, namespace: str) -> Iterator[KeyRun]:
        """The pages of ``namespace``: those of the pack that was used last first, but each prefix before its suffix.

        It looks at what is known while it is read.
        """
        seen: set[bytes] = set()
        keys: list[bytes] = []
        first = b""
        for pack in sorted(self.packs_of(namespace), key=lambda one: (-one.used_at, -one.number)):
            for key in pack.keys:
                for one, parent in reversed(self._prefix(namespace, key, seen)):
                    if keys and (parent != keys[-1] or len(keys) >= RUN):
                        yield KeyRun(first, keys)
                        keys = []
                    first = first if keys else parent
                    keys.append(one)
        if keys:
            yield KeyRun(first, keys)

    def _prefix(self, namespace: str, key: bytes, seen: set[bytes]) -> list[tuple[bytes, bytes]]:
        """``key`` and what it continues, as far as it is there and was not ``seen``: key and parent of each."""
        found = []
        while key not in seen and (place := self.find(namespace, key)) is not None:
            seen.add(key)
            parent = place.record.parent
            found.append((key, parent))
            key = parent
        return found

    def too_old(self, now: float, ttl: float) -> list[Pack]:
        """Packs that nobody used for ``ttl`` seconds (0: none is too old)."""
        return [pack for pack in self._packs.values() if ttl and now - pack.used_at >= ttl]

    def to_leave(self, most: int) -> list[Pack]:
        """Packs that must leave so that ``most`` bytes remain, those that were not used for longest first."""
        excess = self.bytes - most
        leaving: list[Pack] = []
        for pack in sorted(self._packs.values() if excess > 0 else (), key=lambda one: (one.used_at, one.number)):
            if excess <= 0:
                break
            leaving.append(pack)
            excess -= pack.size
        return leaving


def _unlist(namespace: _Namespace, tail: Tail) -> None:
    left = [one for one in namespace.tails.get(tail.directory, []) if one != tail]
    if left:
        namespace.tails[tail.directory] = left
    else:
        namespace.tails.pop(tail.directory, None)


def _list(namespace: _Namespace, tail: Tail) -> None:
    listed = namespace.tails.setdefault(tail.directory, [])
    if tail not in listed:
        namespace.tails[tail.directory] = [*listed[-MAX_TAILS + 1 :], tail]


def encode_packs(packs: Iterable[Pack]) -> list[bytes]:
    """The bytes in which ``packs`` are written down: their names, sizes and last uses, and their heads as they are."""
    kept = [(pack.name, pack.size, pack.used_at, pack.head.raw) for pack in packs]
    return [CATALOGUE_MAGIC, msgspec.msgpack.encode(kept)]


def decode_packs(raw: bytes) -> dict[str, tuple[int, float, bytes]]:
    """Size, last use and head of each pack by name; none when ``raw`` is damaged or something else.

    The heads prove themselves, or not, as those of packs do.
    """
    if not raw.startswith(CATALOGUE_MAGIC):
        return {}
    try:
        kept = msgspec.msgpack.decode(memoryview(raw)[len(CATALOGUE_MAGIC) :], type=list[tuple[str, int, float, bytes]])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return {}
    return {name: (size, used_at, head) for name, size, used_at, head in kept}
