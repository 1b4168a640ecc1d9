"""Takes pages out of a tier of packs for good: what an administrator clears.

What always holds: the catalogue forgets what is meant before anything is removed, so that none of it is found any more;
a pack of which something stays is written anew before the old one is removed; what could not be removed is not learned
again by this node, and goes as soon as the place works.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from ems.pool.tiers.blobs import Blobs, Gone, read_whole
from ems.pool.tiers.catalogue import Catalogue, Pack
from ems.pool.tiers.pack_format import Malformed
from ems.pool.tiers.pack_seal import SealKeys
from ems.pool.tiers.repair import Put, Quarantine, inspect, with_only
from ems.pool.tiers.seam import ForgetRequest, ForgetResult

PORTION_SECONDS = 1.0
"""How long one call goes on, which gets something done however slow the place is; a pack goes whole."""
AT_ONCE = 64
"""Packs that are removed in one go."""


class Forgetting:
    """What is being taken out of the tier whose packs are in ``blobs`` and whose catalogue ``lock`` guards.

    ``put`` writes a blob, for which it makes room where the place is full.
    """

    def __init__(
        self,
        blobs: Blobs,
        put: Put,
        catalogue: Catalogue,
        lock: threading.Lock,
        keys: SealKeys,
        quarantine: Quarantine,
        clock: Callable[[], float],
    ) -> None:
        self._blobs = blobs
        self._put = put
        self._catalogue = catalogue
        self._lock = lock
        self._keys = keys
        self._quarantine = quarantine
        self._clock = clock
        self._leaving: dict[str, int] = {}
        """Packs that are forgotten and still to be removed, with their sizes."""

    def __contains__(self, name: str) -> bool:
        return name in self._leaving

    def count(self, request: ForgetRequest) -> ForgetResult:
        pages = size = 0
        fewer = self._fewer(request)
        # What is also in a pack that is passed over is found there afterwards.
        others: set[bytes] = set()
        if request.unused_for:
            going_packs = {pack.number for pack, _ in fewer}
            for pack in self._catalogue.packs_of(request.namespace):
                if pack.number not in going_packs:
                    others.update(pack.keys)
        for pack, staying in fewer:
            pages += sum(key not in staying and key not in others for key in self._catalogue.found_in(pack))
            going = [position for position, key in enumerate(pack.keys) if key not in staying]
            size += int(pack.records["stored"][going].sum()) if staying else pack.size
        return ForgetResult(pages, size)

    def forget(self, request: ForgetRequest) -> ForgetResult:
        until = self._clock() + PORTION_SECONDS
        parts: list[tuple[Pack, set[bytes]]] = []
        pages = size = 0
        for pack, staying in self._fewer(request):
            if staying:
                parts.append((pack, staying))
            else:
                pages += self._let_go(pack)
                size += pack.size
        self.remove(until)
        self._quarantine.clear(request.namespace, self._clock() - request.unused_for)
        while parts:
            fewer = self._shrink(*parts.pop())
            pages, size = pages + fewer[0], size + fewer[1]
            if self._clock() >= until:
                break
        self.remove(until)
        return ForgetResult(pages, size, more=bool(parts or self._leaving))

    def remove(self, until: float) -> None:
        """Remove what is forgotten, some of it whatever the time; what fails stays to be removed."""
        while self._leaving:
            names = list(self._leaving)[:AT_ONCE]
            self._blobs.delete(names)
            for name in names:
                self._leaving.pop(name, None)
            if self._clock() >= until:
                break

    def _fewer(self, request: ForgetRequest) -> list[tuple[Pack, set[bytes]]]:
        """The packs that have something of what is meant, and the keys of each that stay: mostly none."""
        spared = request.spared if isinstance(request.spared, frozenset | set) else frozenset(request.spared)
        oldest = self._clock() - request.unused_for
        fewer = []
        for pack in self._catalogue.packs_of(request.namespace):
            if request.unused_for and pack.used_at > oldest:
                continue
            # What is found in another pack need not stay in this one.
            staying = spared.intersection(self._catalogue.found_in(pack)) if spared else set()
            if len(staying) < len(pack.keys) or not pack.keys:
                fewer.append((pack, set(staying)))
        return fewer

    def _let_go(self, pack: Pack) -> int:
        """Forget ``pack``, which is to be removed; how many pages are not found any more."""
        with self._lock:
            before = self._catalogue.pages
            self._leaving[pack.name] = pack.size
            self._catalogue.remove(pack.name)
            return before - self._catalogue.pages

    def _shrink(self, pack: Pack, staying: set[bytes]) -> tuple[int, int]:
        """Write ``pack`` anew with the pages ``staying`` only; how many pages and bytes are gone."""
        try:
            raw = read_whole(self._blobs, pack.name)
            head, good, _ = inspect(raw, pack.name, self._keys)
        except (Gone, Malformed):
            return self._let_go(pack), pack.size
        kept = [at for at in good if head.records["key"][at].tobytes() in staying]
        if head.seal is None or not kept:
            return self._let_go(pack), pack.size
        name, parts, new = with_only(head, kept, raw)
        self._put(name, parts)
        with self._lock:
            before = self._catalogue.pages
            self._leaving[pack.name] = pack.size
            self._catalogue.remove(pack.name)
            self._catalogue.add(name, new.total, new, pack.used_at)
            return before - self._catalogue.pages, max(pack.size - new.total, 0)
