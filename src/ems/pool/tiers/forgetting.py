"""Takes pages out of a tier of packs for good: what an administrator clears.

What always holds: the catalogue forgets what is meant before anything is removed, so that none of it is found any more;
a pack of which something stays is written anew before the old one is removed; what could not be removed is not learned
again by this node, and goes as soon as the place works.
"""

from __future__ import annotations

from ems.pool.tiers.answers import ForgetRequest, ForgetResult
from ems.pool.tiers.blobs import Gone, read_whole
from ems.pool.tiers.catalogue import Pack
from ems.pool.tiers.pack_format import Head, Malformed
from ems.pool.tiers.pack_store import PackStore
from ems.pool.tiers.repair import inspect, with_only

PORTION_SECONDS = 1.0
"""How long one call goes on, which gets something done however slow the place is; a pack goes whole."""
AT_ONCE = 64
"""Packs that are removed in one go."""


def count(store: PackStore, request: ForgetRequest) -> ForgetResult:
    """What ``request`` means of ``store``."""
    pages = size = 0
    fewer = _fewer(store, request)
    # What is also in a pack that is passed over is found there afterwards.
    others: set[bytes] = set()
    if request.unused_for:
        going = {pack.number for pack, _ in fewer}
        others.update(*(one.keys for one in store.catalogue.packs_of(request.namespace) if one.number not in going))
    for pack, staying in fewer:
        pages += sum(key not in staying and key not in others for key in store.catalogue.found_in(pack))
        leaving = [position for position, key in enumerate(pack.keys) if key not in staying]
        size += int(pack.head.records["stored"][leaving].sum()) if staying else pack.size
    return ForgetResult(pages, size, left=store.left_alone_of(request.namespace))


def forget(store: PackStore, request: ForgetRequest) -> ForgetResult:
    """Take out of ``store`` what of ``request`` can be done in a portion's time."""
    if store.unread or not store.scanned:
        store.look()
    store.snapshot_soon()
    until = store.clock() + PORTION_SECONDS
    fewer = _fewer(store, request)
    gone = [_let_go(store, pack) for pack, staying in fewer if not staying]
    remove(store, until)
    store.quarantine.clear(request.namespace, store.clock() - request.unused_for)
    parts = [(pack, staying) for pack, staying in fewer if staying]
    while parts:
        gone.append(_shrink(store, *parts.pop()))
        if store.clock() >= until:
            break
    remove(store, until)
    pages, size = (sum(column) for column in zip((0, 0), *gone, strict=True))
    more = bool(parts or store.leaving or store.unread)
    return ForgetResult(pages, size, more=more, left=store.left_alone_of(request.namespace))


def remove(store: PackStore, until: float) -> None:
    """Remove what is forgotten, some of it whatever the time; what fails stays to be removed."""
    while store.leaving:
        names = sorted(store.leaving)[:AT_ONCE]
        store.blobs.delete(names)
        store.leaving.difference_update(names)
        if store.clock() >= until:
            break


def _fewer(store: PackStore, request: ForgetRequest) -> list[tuple[Pack, set[bytes]]]:
    """The packs that have something of what is meant, and the keys of each that stay: mostly none."""
    oldest, spared = store.clock() - request.unused_for, frozenset(request.spared)
    fewer = []
    for pack in store.catalogue.packs_of(request.namespace):
        if request.unused_for and pack.used_at > oldest:
            continue
        # What is found in another pack need not stay in this one.
        staying = set(spared.intersection(store.catalogue.found_in(pack))) if spared else set()
        if len(staying) < len(pack.keys) or not pack.keys:
            fewer.append((pack, staying))
    return fewer


def _let_go(store: PackStore, pack: Pack, instead: str = "", head: Head | None = None) -> tuple[int, int]:
    """Forget ``pack``, which is to be removed; how many pages are not found any more, and how many bytes go.

    With a ``head`` the pack ``instead`` has what stays of it.
    """
    with store.lock:
        before = store.catalogue.pages
        store.leaving.add(pack.name)
        store.catalogue.remove(pack.name)
        if head is not None:
            store.catalogue.add(instead, head.total, head, pack.used_at)
        return before - store.catalogue.pages, max(pack.size - (0 if head is None else head.total), 0)


def _shrink(store: PackStore, pack: Pack, staying: set[bytes]) -> tuple[int, int]:
    """Write ``pack`` anew with the pages ``staying`` only; how many pages and bytes are gone."""
    try:
        raw = read_whole(store.blobs, pack.name)
        head, good, _ = inspect(raw, pack.name, store.keys)
    except (Gone, Malformed):
        return _let_go(store, pack)
    kept = [at for at in good if head.records["key"][at].tobytes() in staying]
    if head.seal is None or not kept:
        return _let_go(store, pack)
    name, parts, new = with_only(head, kept, raw)
    store.put(name, parts)
    return _let_go(store, pack, name, new)
