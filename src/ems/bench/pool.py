"""Bandwidth of saves and loads beside plain memcpy, and latency of lookups, through the real client and a real node.

Pages come in batches of 32 MiB, as the blocks of one prompt do, and are saved 256 at a time at most.  Each page size is
measured in rounds, in which everything is done once, one after the other, so that all see the same machine; the median
round is reported.  The limits are plain copies of whole pages: between private memory (which the kernel may back with
huge pages), and between private memory and the very slots that a save and a load use (which on most hosts lie in pages
of 4 KiB); shares are of the latter.

A save is reserve, copy with checksum, commit, as the SDK makes it: a batch is reserved while the one before is copied,
and its commit is answered later.  A load is lookup with lease, header check, copy, checksum, header check, release.
Pages have twelve rows as twelve layers leave them.  Loads are measured with the node's policy of checking, and with no
page and with every page checked; their shares are of the former.  All memory was touched before.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import statistics
import tempfile
import time
import timeit
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from ems.config import MIB, NodeConfig, format_size
from ems.errors import ConfigError, NoSpace, PoolError, PoolRefused, PoolTimeout
from ems.pool.client.answers import Namespace
from ems.pool.client.pool_client import PoolClient
from ems.pool.keys import KEY_BYTES, NO_PARENT
from ems.pool.names import own_name
from ems.pool.node.launcher import ensure_node
from ems.pool.processes import process_lives
from ems.pool.protocol.acts import Clear, Follow, List
from ems.pool.segments.reader import Verify
from ems.pool.segments.touch import warm
from ems.pool.tenants.scram import from_environment
from ems.tables import Table
from ems.transfers.checksums import PageSums
from ems.transfers.plan import STEP_BYTES, CopyPlan, Piece, PieceTable, Rows, Slots, numbers

ROWS = 12
"""Rows of a page, as many as a model of twelve layers leaves."""
POOL_BYTES = 1024 * MIB
WORKING_SET = 128 * MIB
"""Bytes moved in one round; far above the processor's caches."""
BATCH = 32 * MIB
"""Bytes of one reservation, as a prompt of some thousand tokens leaves them."""
BATCH_PAGES = 256
"""Most pages of one reservation."""
TOUCH_SECONDS = 120.0
CLEAR_SECONDS = 30.0

_TOO_SMALL = "the pool has no room for the pages of this run, use a larger pool or none in use"

Bytes = npt.NDArray[np.uint8]
Progress = Callable[[str], None]


class PoolPlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is measured."""

    pages: tuple[int, ...] = (32 << 10, 128 << 10, 768 << 10, 4 << 20)
    keys: tuple[int, ...] = (1, 128, 1024)
    rounds: int = 5
    lookups: int = 400

    def __post_init__(self) -> None:
        if self.rounds < 1 or self.lookups < 1:
            raise ConfigError("rounds and lookups must be 1 or more")
        for page in self.pages:
            if not 4096 <= page <= 16 * MIB or page % ROWS % 4:
                raise ConfigError(f"a page of {page} bytes cannot be measured, expected 4KB to 16MB")
        for count in self.keys:
            if not 1 <= count <= 65536:
                raise ConfigError(f"lookups of {count} keys cannot be measured, expected 1 to 65536")


class Bandwidth(msgspec.Struct, frozen=True):
    """Gigabytes (10^9 bytes) a second for pages of one size, and the shares of plain copies to and from the slots.

    ``sampled_share`` and ``checked_share`` are the bandwidth of loads that check one page in some and each page, as a
    share of that of loads that check none.
    """

    page_bytes: int
    memcpy: float
    memcpy_to_slots: float
    save: float
    memcpy_from_slots: float
    load: float
    load_unchecked: float
    load_sampled: float
    load_checked: float
    save_share: float
    load_share: float
    sampled_share: float
    checked_share: float


class LookupLatency(msgspec.Struct, frozen=True):
    """Microseconds of one lookup of ``keys`` present keys, plain or with a lease on them."""

    keys: int
    lease: bool
    p50: float
    p90: float
    p99: float


class PoolReport(msgspec.Struct, frozen=True):
    """All figures of one run."""

    bandwidth: list[Bandwidth]
    lookups: list[LookupLatency]


@contextmanager
def own_node() -> Iterator[Path]:
    """A node for this run alone; yields its socket and leaves nothing behind."""
    directory = Path(tempfile.mkdtemp(prefix="ems-bench-", dir="/dev/shm"))
    config = NodeConfig(
        directory=directory, socket=directory / "node.sock", size=POOL_BYTES, segment_size=64 * MIB, http_port=None
    )
    try:
        ensure_node(config)
        try:
            yield config.socket
        finally:
            with suppress(PoolError, ProcessLookupError), closing(PoolClient(config.socket, "ems bench")) as client:
                client.connect()
                pid = client.node_pid
                os.kill(pid, signal.SIGTERM)
                _wait(lambda: not process_lives(pid), 10.0, "the node ends")
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _wait(condition: Callable[[], bool], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise PoolTimeout(f"waited {seconds:.0f} s in vain until {what}")
        time.sleep(0.02)  # bounded by the deadline of this loop


class Bench:
    """One client, its node's memory (touched and mapped first), and engine memory to copy from and to."""

    def __init__(self, socket: Path, progress: Progress) -> None:
        self._socket = socket
        self._client = PoolClient(socket, "ems bench", credentials=from_environment(os.environ))
        self._progress = progress
        from ems.transfers.streaming import HostCopies  # takes a moment, which other commands can do without

        self._copies = HostCopies()
        self._tag = secrets.token_hex(8)

    def close(self) -> None:
        self._client.close()

    def clear(self) -> None:
        """Take the pages of this run out of the pool, for which only an administrator can ask."""
        self._client.close()
        with closing(PoolClient(self._socket, "ems bench", administers=True)) as administrator:
            try:
                names = [row["namespace"] for row in administrator.administer(List())["namespaces"]]
                ours = [name for name in names if own_name(name).startswith(f"bench/{self._tag}/")]
                jobs = [administrator.administer(Clear(namespace=name))["job"] for name in ours]

                def done() -> bool:
                    return all(administrator.administer(Follow(job))["done"] for job in jobs)

                _wait(done, CLEAR_SECONDS, "the pages of this run left the pool")
            except PoolError as error:
                self._progress(f"the pages of this run stay in the pool until they are evicted: {error}")

    def touch(self) -> None:
        self._progress("touching memory")
        figures = self._client.stats()
        total = figures.get("bytes_total")
        if total is None:
            raise PoolRefused(
                "this node serves tenants, who see nothing of its memory, so it cannot be measured; leave --socket "
                "out, and a node of its own is started"
            )
        _wait(lambda: self._client.stats()["bytes_touched"] == total, TOUCH_SECONDS, "the node touched its memory")
        segments = self._client.segments(self._client.epoch)
        for number in range(self._client.segment_count):
            warm(segments.segment(number))

    def _namespace(self, page_bytes: int) -> Namespace:
        return Namespace(f"bench/{self._tag}/{page_bytes}", page_bytes)

    def bandwidth(self, page_bytes: int, rounds: int) -> Bandwidth:
        self._progress(f"pages of {format_size(page_bytes)}")
        count = max(WORKING_SET // page_bytes, 4)
        batch = max(BATCH // page_bytes, 1)
        engine = Engine(page_bytes, count)
        namespace = self._namespace(page_bytes)
        checks: dict[str, Verify | None] = {
            "load": None,
            "load_unchecked": Verify.NEVER,
            "load_sampled": Verify.SAMPLED,
            "load_checked": Verify.ALWAYS,
        }
        names = ("memcpy", "memcpy_to_slots", "save", "memcpy_from_slots", *checks)
        taken: dict[str, list[float]] = {name: [] for name in names}
        for _ in range(rounds + 1):
            keys = [os.urandom(KEY_BYTES) for _ in range(count)]
            taken["memcpy"].append(_seconds(engine.memcpy))
            taken["memcpy_to_slots"].append(self._copy_to_slots(namespace, engine, keys))
            taken["save"].append(_seconds(lambda keys=keys: self._save(namespace, engine, keys, batch)))  # type: ignore[misc]
            taken["memcpy_from_slots"].append(self._copy_from_slots(namespace, engine, keys))
            for name, policy in checks.items():
                taken[name].append(_seconds(partial(self._load, namespace, engine, keys, batch, policy)))
        # The first round warms engine memory and page tables.
        seconds = {name: statistics.median(values[1:]) for name, values in taken.items()}
        moved = page_bytes * count / 1e9
        speed = {name: round(moved / value, 2) for name, value in seconds.items()}
        return Bandwidth(
            page_bytes=page_bytes,
            **speed,
            save_share=round(seconds["memcpy_to_slots"] / seconds["save"], 3),
            load_share=round(seconds["memcpy_from_slots"] / seconds["load"], 3),
            sampled_share=round(seconds["load_unchecked"] / seconds["load_sampled"], 3),
            checked_share=round(seconds["load_unchecked"] / seconds["load_checked"], 3),
        )

    def _copy_to_slots(self, namespace: Namespace, engine: Engine, keys: Sequence[bytes]) -> float:
        """Seconds of the plain copies alone: the slots are promised before and given back after."""
        reserved = self._client.reserve(namespace, NO_PARENT, keys)
        if len(reserved.positions) != len(keys):
            raise NoSpace(_TOO_SMALL)
        segments = self._client.segments(reserved.epoch)
        pages = [segments.page(ref, namespace.page_size) for ref in reserved.granted.values()]
        seconds = _seconds(lambda: engine.plain_out(pages))
        self._client.abort(reserved)
        return seconds

    def _copy_from_slots(self, namespace: Namespace, engine: Engine, keys: Sequence[bytes]) -> float:
        """Seconds of the plain copies alone, out of pages that were saved just now."""
        hits = self._client.lookup(namespace, b"".join(keys), lease=True)
        if hits.lease is None or hits.count != len(keys):
            raise NoSpace(_TOO_SMALL)
        segments = self._client.segments(hits.lease.epoch)
        pages = [segments.page(ref, namespace.page_size) for ref in hits.lease.refs]
        seconds = _seconds(lambda: engine.plain_in(pages))
        self._client.release(hits.lease)
        return seconds

    def _save(self, namespace: Namespace, engine: Engine, keys: Sequence[bytes], batch: int) -> None:
        client, commit = self._client, None
        batch = min(batch, BATCH_PAGES)
        ahead = client.begin_reserve(namespace, NO_PARENT, keys[:batch])
        for first in range(0, len(keys), batch):
            reserved, part = client.end_reserve(ahead), ahead.keys
            if following := keys[first + batch : first + 2 * batch]:
                ahead = client.begin_reserve(namespace, NO_PARENT, following)
            if len(reserved.positions) != len(part):
                raise NoSpace(_TOO_SMALL)
            starts, memory = client.segments(reserved.epoch).places(reserved.packed_refs, namespace.page_size)
            slots = Slots(starts, namespace.page_size, memory)
            sums = PageSums(slots)
            blocks = range(first, first + len(part))
            for step in engine.plan(blocks, slots, out=True).in_steps(STEP_BYTES, in_order=True):
                self._copies.copy(step.plan, sums)
                sums.whole = step.whole
            if commit is not None:
                client.end_commit(commit)
            commit = client.begin_commit(reserved, checksums=sums.done)
        if commit is not None:
            client.end_commit(commit)

    def _load(
        self, namespace: Namespace, engine: Engine, keys: Sequence[bytes], batch: int, policy: Verify | None
    ) -> None:
        for first in range(0, len(keys), batch):
            part = keys[first : first + batch]
            hits = self._client.lookup(namespace, b"".join(part), lease=True)
            if hits.count != len(part) or hits.lease is None:
                raise NoSpace("pages of this run were evicted while it ran, use a larger pool or none in use")
            reader = self._client.reader(namespace, hits.lease.epoch, policy)
            pages = reader.look(hits.lease.packed_refs, b"".join(part))
            slots = Slots(pages.starts[: pages.present], namespace.page_size, pages.segments)
            good = 0
            for step in engine.plan(range(first, first + pages.present), slots, out=False).in_steps(STEP_BYTES):
                self._copies.copy(step.plan)
                good = reader.sound(pages, good, step.whole)
            if reader.corrupt or reader.same(pages, 0, pages.present) < len(part):
                raise NoSpace("pages of this run changed while they were leased")
            self._client.release(hits.lease)

    def lookups(self, keys: int, repeats: int, *, lease: bool) -> LookupLatency:
        self._progress(f"lookups of {keys} keys{' with a lease' if lease else ''}")
        namespace = self._namespace(256)
        chain = [bytes([1]) + number.to_bytes(KEY_BYTES - 1, "little") for number in range(keys)]
        reserved = self._client.reserve(namespace, NO_PARENT, chain)
        self._client.commit(reserved)
        joined = b"".join(chain)
        taken = []
        for _ in range(repeats):
            begin = time.perf_counter()
            hits = self._client.lookup(namespace, joined, lease=lease)
            taken.append(time.perf_counter() - begin)
            if hits.count != keys:
                raise NoSpace(f"only {hits.count} of {keys} keys of this run are in the pool, use a larger pool")
            if hits.lease is not None:
                self._client.release(hits.lease)
        return LookupLatency(keys, lease, *(round(1e6 * float(cut), 1) for cut in np.percentile(taken, (50, 90, 99))))


class Engine:
    """Memory as an engine has it: one array a row, ``[blocks, row bytes]``, and a plain copy of it."""

    def __init__(self, page_bytes: int, blocks: int) -> None:
        row = page_bytes // ROWS
        sizes = [row] * (ROWS - 1) + [page_bytes - row * (ROWS - 1)]
        self._rows = [np.full((blocks, size), number, dtype=np.uint8) for number, size in enumerate(sizes)]
        ends = np.cumsum([0, *sizes]).tolist()
        self._pieces = PieceTable(
            [
                [Piece(rows.__array_interface__["data"][0], size, 0, start, size, size)]
                for rows, size, start in zip(self._rows, sizes, ends[:-1], strict=True)
            ]
        )
        self._source: Bytes = np.full((blocks, page_bytes), 1, dtype=np.uint8)
        self._target: Bytes = np.full((blocks, page_bytes), 2, dtype=np.uint8)

    def memcpy(self) -> None:
        """The limit: page after page from one place to another."""
        for source, target in zip(self._source, self._target, strict=True):
            target[:] = source

    def plain_out(self, pages: Sequence[memoryview]) -> None:
        for source, page in zip(self._source, pages, strict=True):
            np.frombuffer(page, dtype=np.uint8)[:] = source

    def plain_in(self, pages: Sequence[memoryview]) -> None:
        for target, page in zip(self._target, pages, strict=True):
            target[:] = np.frombuffer(page, dtype=np.uint8)

    def plan(self, blocks: range, slots: Slots, *, out: bool) -> CopyPlan:
        nothing = np.zeros(len(blocks), np.int64)
        return self._pieces.plan(Rows(numbers(blocks), nothing, nothing, np.arange(len(blocks))), slots, out=out)


def measure(plan: PoolPlan, socket: Path | None, progress: Progress) -> PoolReport:
    with nullcontext(socket) if socket else own_node() as used, closing(Bench(used, progress)) as bench:
        bench.touch()
        try:
            bandwidth = [bench.bandwidth(page, plan.rounds) for page in plan.pages]
            lookups = [bench.lookups(keys, plan.lookups, lease=lease) for lease in (False, True) for keys in plan.keys]
        finally:
            if socket:  # also after Ctrl-C; a node of its own goes with all that it has
                bench.clear()
    return PoolReport(bandwidth, lookups)


def _seconds(work: Callable[[], object]) -> float:
    return timeit.timeit(work, number=1)


def tables(report: PoolReport) -> list[Table]:
    """How the figures are shown."""
    bandwidth, checks = [], []
    for row in report.bandwidth:
        size = format_size(row.page_bytes)
        save, load = f"{row.save_share:.0%}", f"{row.load_share:.0%}"
        to_slots, from_slots = _gigabytes(row.memcpy_to_slots, row.save), _gigabytes(row.memcpy_from_slots, row.load)
        bandwidth.append((size, *_gigabytes(row.memcpy), *to_slots, save, *from_slots, load))
        sampled, checked = f"{row.sampled_share:.0%}", f"{row.checked_share:.0%}"
        loads = _gigabytes(row.load_unchecked, row.load_sampled)
        checks.append((size, *loads, sampled, *_gigabytes(row.load_checked), checked))
    lookups = [
        (str(row.keys), "yes" if row.lease else "no", f"{row.p50:.0f}", f"{row.p90:.0f}", f"{row.p99:.0f}")
        for row in report.lookups
    ]
    columns = ("page", "memcpy", "to slots", "save", "share", "from slots", "load", "share")
    title = "Loads with checksums, as a share of loads without"
    return [
        Table(columns, bandwidth, "Bandwidth in GB/s"),
        Table(("page", "no page", "sampled", "share", "every page", "share"), checks, title),
        Table(("keys", "lease", "p50", "p90", "p99"), lookups, "Lookup in µs"),
    ]


def _gigabytes(*speeds: float) -> list[str]:
    return [f"{speed:.2f}" for speed in speeds]
