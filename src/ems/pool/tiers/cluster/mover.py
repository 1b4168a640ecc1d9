"""Moves pages between the segments of a node and the cluster, in an agent: what each of its calls does.

What always holds: a page that is said to be fetched was proven to be the one that was asked for; where a tenant could
cut a segment's file, bytes are copied by the kernel, and what was cut is missing.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import random
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import msgspec

from ems.errors import EmsError
from ems.pool.layout import crc32c
from ems.pool.movement.hot_list import HotRun, merged
from ems.pool.segments.segment_file import SegmentFile
from ems.pool.segments.touch import TOUCH_STEP, populate, warm
from ems.pool.tiers.answers import Outcome, StoredTail
from ems.pool.tiers.cluster import calls
from ems.pool.tiers.cluster.direct_reads import DirectReads, HostSilent, NotRead
from ems.pool.tiers.cluster.objects import HEADER_BYTES, Objects, ObjectSeal
from ems.pool.tiers.cluster.silent_hosts import LEAST_RATE

AT_ONCE = 1024
"""Pages of one call to the store."""
MOST_FETCHING = MOST_STORING = MOST_LISTING = 4
MOST_READING = 64
"""Pages that one lane reads at a time.  Each is two transfers, and Mooncake refuses more than a thousand to a host."""
HOT_READS = 5
"""Of a list of hot pages that is there and is being written."""
LIST_ATTEMPTS = 5
"""To write a list of tails, until it is read with what was added."""
LISTS_AT_ONCE = 64  # what Mooncake's buffer has room for
LIST_PAUSE_SECONDS = 0.01
"""Between two of either, several times what a write of a list takes."""
OWN_SECONDS = 5.0
OWN_LIST_SECONDS = 2.0
"""How long calls of Mooncake's own may take for pages, beside what these take at the least rate, and for lists: less
than the node waits, which does not know what hangs."""
WAITING_NICENESS = 10
"""Of threads in which Mooncake's client waits for a transfer, which keeps a core busy: what transfers goes before."""
STAGING = 16 << 20
"""Bytes that are copied at a time where segments are not mapped."""
LISTED_BYTES = 128 << 10
"""Of the longest list that is read directly; few are longer."""
_WARMING = threading.Lock()
"""Held by who maps a segment: one after the other, or their rests would not add up."""
NO_ROOM, INVALID = -200, -600
_Bytes = tuple[memoryview, int]
TRANSFER_FAILED = -800
"""After this, bytes may still arrive."""


class Memory:
    """Bytes that Mooncake may read and write: ``mapped``, registered with ``store`` as long as this lives."""

    def __init__(self, store: Any, mapped: mmap.mmap) -> None:
        self._store = store
        self._anchor: Any = (ctypes.c_char * len(mapped)).from_buffer(mapped)
        self.address = ctypes.addressof(self._anchor)
        self.view = memoryview(mapped)
        self._warmed = self._closed = False
        if store.register_buffer(self.address, len(mapped)):
            raise EmsError(f"Mooncake does not take {len(mapped)} bytes of memory to move pages in")

    def warm(self) -> None:
        """Map all little by little, so that transfers find it mapped."""
        with _WARMING, contextlib.suppress(OSError):  # no room for what was never touched; or somebody cut the file
            for start in range(0, len(self.view), TOUCH_STEP):
                if self._closed:  # what was given up is not to be taken again
                    return
                warm(self.view[start : start + TOUCH_STEP])
            self._warmed = True

    def prepare(self, offset: int, size: int) -> None:
        """Map these bytes in one go before all are: a transfer that has to do it takes many times as long."""
        if self._warmed:
            return
        start = offset - offset % mmap.PAGESIZE
        with contextlib.suppress(OSError):  # somebody cut the file
            populate(self.address + start, offset + size - start)

    def close(self) -> None:
        """Its pages leave this process when nobody looks at them any more."""
        self._closed = True
        self._store.unregister_buffer(self.address)


class Segment(NamedTuple):
    """The file of a segment; ``memory`` is None where it is not to be looked at through a mapping."""

    file: SegmentFile
    memory: Memory | None


class Part(NamedTuple):
    """Pages of one namespace that are moved at a time, and the memory of each: its bytes and their address."""

    seal: ObjectSeal
    pages: list[calls.Place]
    segments: dict[int, Segment]
    memory: list[_Bytes]

    @property
    def names(self) -> list[str]:
        return [self.seal.name(page.key) for page in self.pages]


class Mover:
    """Moves pages between the segments of a node and the cluster; several threads, each with a :class:`Lane`."""

    def __init__(self, store: Any, reads: DirectReads, objects: Objects, config: Any, mark_config: Any) -> None:
        self.store = store
        self.reads = reads
        self.objects = objects
        self.config = config
        self.mark_config = mark_config
        """For the object by which a host sees whether what it lends is still there: it never leaves for others."""
        self.listed: set[str] = set()
        """The lists of hot pages that could be read; for the only lane that is asked for them at a time."""
        self.hot_lock = threading.Lock()
        self.clears = 0
        """How often a namespace was cleared; with the lock above, so that no list of before is written behind that."""
        self.segments: dict[int, Segment] = {}
        self._lock = threading.Lock()
        self.fetches = _behind(max(min((os.cpu_count() or 1) // 2, MOST_FETCHING), 1))
        """Has calls made that fetch: more of them at once than cores to wait on are slower."""
        self.stores = _behind(MOST_STORING)
        self.lists = _behind(MOST_LISTING)

    def know(self, call: calls.Attach | calls.Detach, descriptors: list[int]) -> None:
        """The node has one segment more, whose descriptor is taken, or one less."""
        with self._lock:
            known = self.segments.get(call.segment)
            if isinstance(call, calls.Detach):
                if known is not None and known.memory is not None:
                    known.memory.close()
                self.segments.pop(call.segment, None)
            elif known is None:
                descriptor = descriptors.pop()
                memory = Memory(self.store, mmap.mmap(descriptor, call.size)) if call.mapped else None
                self.segments[call.segment] = Segment(SegmentFile(descriptor, call.size), memory)
                if memory is not None:
                    threading.Thread(target=memory.warm, name="ems-warm", daemon=True).start()


def _behind(threads: int) -> ThreadPoolExecutor:
    """``threads`` that stand behind all others for a core; with Linux a niceness is that of one thread."""
    return ThreadPoolExecutor(threads, initializer=os.nice, initargs=(WAITING_NICENESS,))


class Lane:
    """What one thread works with: memory for headers, and for pages that are copied."""

    def __init__(self, mover: Mover, cancelled: Callable[[], bool] = lambda: False) -> None:
        self._mover = mover
        self._cancelled = cancelled
        """Whether nobody waits for the call that this works at."""
        self._store = mover.store
        self._headers = Memory(mover.store, mmap.mmap(-1, AT_ONCE * HEADER_BYTES))
        self._listed = Memory(mover.store, mmap.mmap(-1, LISTED_BYTES))
        self._staging: Memory | None = None
        self._answers: dict[type[calls.Call], Callable[[Any], calls.Answer]] = {
            calls.Exist: lambda call: calls.Answer(self._exist(call)),
            calls.Fetch: lambda call: self._in_parts(call, self._fetch),
            calls.Store: lambda call: self._in_parts(call, self._put),
            calls.FindTails: lambda call: calls.Answer(tails=self._find_tails(call)),
            calls.ListTails: lambda call: calls.Answer(self._list_tails(call)),
            calls.ShareHot: lambda call: calls.Answer(hot=self._share_hot(call)),
            calls.Clear: lambda call: calls.Answer(self._clear(call)),
            calls.Probe: lambda _: self._probe(),
            calls.Mark: lambda call: calls.Answer([self._mark(call.name)]),
        }

    def answer(self, call: calls.Call, descriptors: list[int]) -> calls.Answer:
        if isinstance(call, calls.Attach | calls.Detach):
            self._mover.know(call, descriptors)
            return calls.Answer()
        try:
            return self._answers[type(call)](call)
        except HostSilent:
            return calls.Answer(unsafe=True, silent=self._mover.reads.silent())

    def _seal(self, namespace: str) -> ObjectSeal | None:
        return self._mover.objects.of(namespace)

    def _exist(self, call: calls.Exist) -> list[int]:
        seal = self._seal(call.namespace)
        if seal is None:
            return [0] * len([*call.keys, *call.directories])
        names = [*map(seal.name, call.keys), *map(seal.listing_name, call.directories)]
        found: list[int] = self._store.batch_is_exist(names)
        if any(code < 0 for code in found):
            raise EmsError(f"the master did not say which pages there are ({min(found)})")
        return found

    # Pages

    def _in_parts(self, call: calls.Fetch | calls.Store, move: Callable[[Part], calls.Answer]) -> calls.Answer:
        """Have ``call`` done as many pages at a time as there is memory for; an answer to all of it."""
        seal = self._seal(call.namespace)
        if seal is None:
            return calls.Answer([Outcome.WRONG_KEY] * len(call.pages), [0] * len(call.pages))
        answer = calls.Answer()
        # For all of it: the node lets go of the segments of a call that it gave up.
        segments = {page.segment: self._mover.segments[page.segment] for page in call.pages}
        mapped = all(one.memory is not None for one in segments.values())
        most = AT_ONCE if mapped else max(min(STAGING // call.size, AT_ONCE), 1)
        for start in range(0, len(call.pages), most):
            pages = call.pages[start : start + most]
            moved = move(Part(seal, pages, segments, self._memory(pages, segments, call.size)))
            codes, sums, direct = answer.codes + moved.codes, answer.sums + moved.sums, answer.direct + moved.direct
            answer = msgspec.structs.replace(moved, codes=codes, sums=sums, direct=direct)
            if moved.unsafe:  # bytes may still arrive where the next part would be copied from
                break
        rest = len(call.pages) - len(answer.codes)
        codes, sums = answer.codes + [Outcome.MISSING] * rest, answer.sums + [0] * rest
        return msgspec.structs.replace(answer, codes=codes, sums=sums)

    def _memory(self, pages: Sequence[calls.Place], segments: dict[int, Segment], size: int) -> list[_Bytes]:
        """The bytes of ``pages``, ``size`` each, or bytes in their stead, with their addresses."""
        found = []
        for position, page in enumerate(pages):
            memory, offset = segments[page.segment].memory, page.offset
            if memory is None:
                memory, offset = self._staged(len(pages) * size), position * size
            memory.prepare(offset, size)
            found.append((memory.view[offset : offset + size], memory.address + offset))
        return found

    def _staged(self, size: int) -> Memory:
        if self._staging is None or len(self._staging.view) < size:
            if self._staging is not None:
                self._staging.close()
            self._staging = Memory(self._store, mmap.mmap(-1, max(size, STAGING)))
        return self._staging

    def _header(self, position: int) -> tuple[memoryview, int]:
        at = position * HEADER_BYTES
        return self._headers.view[at : at + HEADER_BYTES], self._headers.address + at

    def _target(self, part: Part, position: int) -> tuple[list[int], list[int]]:
        """Where header and bytes of a page go to or come from, and how many there are."""
        view, address = part.memory[position]
        return [self._header(position)[1], address], [HEADER_BYTES, len(view)]

    def _fetch(self, part: Part) -> calls.Answer:
        reads, names = self._mover.reads, part.names
        sources = reads.find(names)
        begun: list[list[int]] = []
        answers = [(Outcome.MISSING, 0)] * len(names)
        rest, unsafe = [], False
        for at in range(len(names)):
            # What follows comes while this is proven.
            for name in names[len(begun) : at + MOST_READING]:
                target = self._target(part, len(begun))
                begun.append(reads.begin(sources[name], *target) if name in sources and not unsafe else [])
            transfers, source = begun[at], sources.get(names[at])
            if source is not None and transfers and not reads.ended(source, transfers):
                unsafe = True
            elif source is not None and not transfers and reads.is_silent(source.endpoint):
                continue  # it may lie there only
            elif transfers and (proven := self._proven(part, at))[0] is not Outcome.CORRUPT:
                answers[at] = proven
            else:
                rest.append(at)
        fetched = 0
        if rest and not unsafe:
            unsafe = self._fetch_rest(part, rest, answers)
            there = [names[at] for at in rest if answers[at][0] is Outcome.DONE]
            fetched = len(there)
            reads.reached(there)
        codes, sums = [int(outcome) for outcome, _ in answers], [checksum for _, checksum in answers]
        direct, silent = codes.count(Outcome.DONE) - fetched, reads.silent() if unsafe else {}
        return calls.Answer(codes, sums, unsafe=unsafe, direct=direct, silent=silent)

    def _fetch_rest(self, part: Part, rest: Sequence[int], answers: list[tuple[Outcome, int]]) -> bool:
        """Have Mooncake itself fetch the ``rest`` of the pages, and say in ``answers`` what became of them.

        It knows which had to make room for others meanwhile.  Whether bytes may still arrive.
        """
        targets = [self._target(part, at) for at in rest]
        get, places, sizes_of = self._store.batch_get_into_multi_buffers, *zip(*targets, strict=True)
        names, size = [part.seal.name(part.pages[at].key) for at in rest], sum(map(sum, sizes_of))
        try:
            seconds = OWN_SECONDS + size / LEAST_RATE
            found: list[int] = self._mover.reads.call(self._mover.fetches, seconds, get, names, places, sizes_of)
        except HostSilent:
            return True
        for at, name, (_, sizes), code in zip(rest, names, targets, found, strict=True):
            if code == sum(sizes):
                answers[at] = self._proven(part, at)
            elif code in (INVALID, TRANSFER_FAILED) and 0 < self._store.get_size(name) != sum(sizes):
                answers[at] = Outcome.WRONG_SIZE, 0  # what is too short is read beyond its end, which fails
            if answers[at][0] in {Outcome.CORRUPT, Outcome.WRONG_SIZE}:
                # Nobody who has the secret wrote it: it makes room for the page that is computed instead.
                self._store.remove(name, force=True)
        return TRANSFER_FAILED in found

    def _proven(self, part: Part, position: int) -> tuple[Outcome, int]:
        """What came of a page that was fetched, and the checksum of its bytes."""
        page, (view, _) = part.pages[position], part.memory[position]
        opened = part.seal.open(self._header(position)[0], page.key, view)
        if opened is None:
            return Outcome.CORRUPT, 0
        segment = part.segments[page.segment]
        if segment.memory is None and not (segment.file.whole() and segment.file.write(page.offset, view)):
            return Outcome.MISSING, 0
        return Outcome.DONE, opened.checksum

    def _put(self, part: Part) -> calls.Answer:
        names = part.names
        there = self._store.batch_is_exist(names)
        codes = [int(Outcome.PRESENT)] * len(names)
        ready: list[int] = []
        for position, (page, (view, _)) in enumerate(zip(part.pages, part.memory, strict=True)):
            if there[position] == 1:
                continue
            segment = part.segments[page.segment]
            if segment.memory is None and not segment.file.read_into(page.offset, view):
                codes[position] = Outcome.MISSING
                continue
            checksum = crc32c(view)
            if page.checksum is not None and checksum != page.checksum:
                codes[position] = Outcome.CORRUPT
                continue
            self._header(position)[0][:] = part.seal.header(page.key, page.parent, view, checksum)
            ready.append(position)
        if ready and self._cancelled():  # what was read may be another page
            raise EmsError("nobody waits for these pages to be stored")
        if ready:
            put, new = self._store.batch_put_from_multi_buffers, [names[at] for at in ready]
            addresses, sizes = zip(*(self._target(part, at) for at in ready), strict=True)
            done: list[int] = self._mover.stores.submit(put, new, addresses, sizes, self._mover.config).result()
            for name in new if self._cancelled() else ():  # it may have been cleared meanwhile
                self._store.remove(name, force=True)
            if all(code not in (0, NO_ROOM) for code in done):
                raise EmsError(f"Mooncake did not take pages ({done[0]})")
            # Of what somebody else began to store, and may never finish, Mooncake says that it was stored.
            for position, code, has in zip(ready, done, self._store.batch_is_exist(new), strict=True):
                codes[position] = Outcome.NO_ROOM if code else Outcome.DONE if has == 1 else Outcome.MISSING
        return calls.Answer(codes)

    # Tails, removal, a test

    def _lists(self, names: Sequence[str]) -> list[bytes | None]:
        """The objects ``names``, which list something; empty where there is none, None where its host is silent.

        What still arrives after a transfer that failed spoils the next list at most, which is then not proven.
        """
        reads, memory = self._mover.reads, self._listed
        found = reads.read(names, memory.address, memory.view)
        rest = [name for name, raw in zip(names, found, strict=True) if raw is NotRead.DIRECTLY]
        others: dict[str, bytes] = {}
        if rest:
            lists = reads.call(self._mover.lists, OWN_LIST_SECONDS, self._store.get_batch, rest)
            others = dict(zip(rest, lists, strict=True))
            reads.reached([name for name in rest if others[name]])
        return [raw if isinstance(raw, bytes) else others.get(name) for name, raw in zip(names, found, strict=True)]

    def _find_tails(self, call: calls.FindTails) -> list[calls.Listed]:
        seal = self._seal(call.namespace)
        if seal is None:
            return []
        raws = self._lists([seal.listing_name(one) for one in call.directories])
        return [
            calls.Listed(found.tail, found.parent)
            for directory, raw in zip(call.directories, raws, strict=True)
            for found in seal.listed(directory, raw or b"")
        ]

    def _list_tails(self, call: calls.ListTails) -> list[int]:
        seal = self._seal(call.namespace)
        if seal is None:
            return []
        left: dict[bytes, list[StoredTail]] = {}
        for one in call.tails:
            left.setdefault(bytes(one.tail.directory), []).append(StoredTail(one.tail, one.parent))
        for attempt in range(LIST_ATTEMPTS):
            if attempt:
                pause = LIST_PAUSE_SECONDS * random.uniform(0.5, 1.5)  # or two hosts that write at once go on doing so
                time.sleep(pause)  # on this lane's thread: Mooncake tells nobody when a write has ended
            raws = self._lists([seal.listing_name(directory) for directory in left])
            lists: dict[str, bytes] = {}
            for (directory, added), raw in zip(list(left.items()), raws, strict=True):
                before = seal.listed(directory, raw or b"")
                new = [one for one in added if one not in before]
                # On a silent host others' tails may be listed; what was written is there, or was lost to another host.
                if raw is None or not new:
                    del left[directory]
                elif before or attempt:  # a list that another host is writing reads as if there were none
                    lists[seal.listing_name(directory)] = seal.listing(directory, [*before, *new])
            if not left:
                break
            write, config, names = self._store.upsert_batch, self._mover.config, list(lists)
            for some in (names[start : start + LISTS_AT_ONCE] for start in range(0, len(names), LISTS_AT_ONCE)):
                self._mover.stores.submit(write, some, [lists[name] for name in some], config).result()
        return [0] * len(left)

    def _share_hot(self, call: calls.ShareHot) -> list[calls.HotList]:
        clears = self._mover.clears
        sealed = [(one, seal) for one in call.lists if (seal := self._seal(one.namespace)) is not None]
        lists = []
        for (told, seal), before in zip(sealed, self._read_hot([seal for _, seal in sealed]), strict=True):
            after = merged(before or [], told.runs)
            # Who writes at the same moment may win, and a silent host's list stays: what was told is told again.
            if before is None or (after != before and not self._put_hot(seal, after, clears)):
                after = before or []
            lists.append(calls.HotList(told.namespace, after))
        return lists

    def _put_hot(self, seal: ObjectSeal, runs: list[HotRun], clears: int) -> bool:
        """Write a list, unless more was cleared than those ``clears`` when it was read."""
        with self._mover.hot_lock:
            if clears != self._mover.clears:
                return False
            return not self._store.upsert(seal.hot_name, seal.hot_list(runs), self._mover.config)

    def _read_hot(self, seals: Sequence[ObjectSeal]) -> list[list[HotRun] | None]:
        """What the lists say, None where a host is silent; one that is being written is soon read again."""
        lists: dict[str, list[HotRun] | None] = {}
        names = {seal.hot_name: seal for seal in seals}
        for attempt in range(HOT_READS):
            left = [name for name in names if name not in lists and (attempt < 2 or name in self._mover.listed)]
            if not left:
                break
            if attempt:
                time.sleep(LIST_PAUSE_SECONDS)  # on this lane's thread: Mooncake tells nobody when a write has ended
            for name, raw in zip(left, self._lists(left), strict=True):
                if raw is None:
                    lists[name] = None
                elif (found := names[name].hot_listed(raw)) is not None:
                    lists[name] = found
                    self._mover.listed.add(name)
        self._mover.listed.difference_update(name for name in names if name not in lists)
        return [lists.get(name, []) for name in names]

    def _clear(self, call: calls.Clear) -> list[int]:
        seal = self._seal(call.namespace)
        if seal is None:
            return [0]
        with self._mover.hot_lock:
            self._mover.clears += 1
            count: int = self._store.remove_by_regex(seal.all_names, force=True)
        if count < 0:
            raise EmsError(f"Mooncake did not remove what was cleared ({count})")
        return [count]

    def _mark(self, name: str) -> int:
        found: int = self._store.is_exist(name)
        code = found or self._store.put(name, b"lent", self._mover.mark_config)
        if code < 0 and code != NO_ROOM:
            raise EmsError(f"the master did not say whether what this host lends is still there ({code})")
        return found or int(code == NO_ROOM)  # where all that is lent is in use, or nothing is yet: nothing was lost

    def _probe(self) -> calls.Answer:
        name, content = f"ems-probe-{secrets.token_hex(8)}", secrets.token_bytes(4096)
        if code := self._store.put(name, content, self._mover.config):
            raise EmsError(f"what was written for a test was not taken ({code}), as long as no host lends free memory")
        try:
            if self._store.get(name) != content:
                raise EmsError("what was written for a test is not what was read back")
        finally:
            self._store.remove(name, force=True)
        return calls.Answer()
