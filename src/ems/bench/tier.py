"""How fast a directory tier writes and reads, beside plain sequential I/O of the same bytes on the same disk.

Both write new files of one size (a pack's), wait for the disk at the end, and read what is no longer in memory.  They
take turns, so that a disk that is slower for a while is slower for both.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
import tempfile
import timeit
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np

from ems.config import MIB, format_size
from ems.errors import ConfigError
from ems.pool.keys import NO_PARENT
from ems.pool.tiers.answers import Outcome, Stored, Wanted
from ems.pool.tiers.manager import PORTION
from ems.pool.tiers.pack_seal import make_key
from ems.pool.tiers.packs import open_packs
from ems.pool.tiers.settings import TierConfig

DEFAULT_PAGES = (64 << 10, 512 << 10, 4 * MIB)
NAMESPACE = "bench/tier/pages"


class TierPlan(msgspec.Struct, frozen=True):
    """What is measured: ``total`` bytes in pages of each of ``page_sizes``, so many ``rounds``."""

    total: int
    page_sizes: Sequence[int]
    rounds: int

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise ConfigError(f"{self.rounds} rounds, expected at least one")
        if any(size > self.total for size in self.page_sizes):
            raise ConfigError("a page is larger than all that is to be written, give a larger --total")


class TierRow(msgspec.Struct, frozen=True):
    """Medians in bytes a second; shares are the tier's part of the plain figure of the same round."""

    page_bytes: int
    plain_write: float
    tier_write: float
    write_share: float
    plain_read: float
    tier_read: float
    read_share: float


def measure(config: TierConfig, plan: TierPlan, progress: Callable[[str], None]) -> list[TierRow]:
    """Measure in a new folder below the tier's, which is removed at the end, and so is the tier's where it is made."""
    if config.kind != "dir":
        raise ConfigError("only tiers in a directory can be measured beside plain I/O, give dir:/folder")
    rows = []
    for size in plan.page_sizes:
        progress(f"pages of {format_size(size)}")
        rounds = [_round(config, plan.total // size * size, size) for _ in range(plan.rounds)]
        medians = [statistics.median(values) for values in zip(*rounds, strict=True)]
        shares = [statistics.median(one[2 * n + 1] / one[2 * n] for one in rounds) for n in range(2)]
        rows.append(TierRow(size, medians[0], medians[1], shares[0], medians[2], medians[3], shares[1]))
    return rows


def _round(config: TierConfig, total: int, page: int) -> tuple[float, float, float, float]:
    place = Path(config.place)
    there = place.is_dir()
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        home = Path(tempfile.mkdtemp(prefix="bench-", dir=place))
    except OSError as error:
        raise ConfigError(f"cannot write below {config.place} ({error.strerror}), give another folder") from error
    try:
        if config.key is None and config.seal_key is None:
            make_key(home / "seal.key")
            config = msgspec.structs.replace(config, seal_key=home / "seal.key")
        data = np.random.default_rng(7).integers(0, 256, total, dtype=np.uint8).data
        plain_write = total / timeit.timeit(lambda: _write_plain(home / "plain", data, config.batch), number=1)
        tier_write = total / timeit.timeit(lambda: _write_tier(config, home / "tier", data, page), number=1)
        into = memoryview(bytearray(total))
        _sync(home, forget=True)
        plain_read = total / timeit.timeit(lambda: _read_plain(home / "plain", into, config.batch), number=1)
        _sync(home, forget=True)
        into[:] = bytes(total)
        tier = open_packs(msgspec.structs.replace(config, place=str(home / "tier")))
        tier.maintain()
        tier_read = total / timeit.timeit(lambda: _read_tier(tier.load, config.readers, into, page), number=1)
        if into != data:
            raise ConfigError("what was read is not what was written, the disk cannot be trusted")
        return plain_write, tier_write, plain_read, tier_read
    finally:
        shutil.rmtree(home, ignore_errors=True)
        if not there:
            with contextlib.suppress(OSError):
                place.rmdir()


def _key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def _write_plain(folder: Path, data: memoryview, block: int) -> None:
    folder.mkdir()
    for number, start in enumerate(range(0, len(data), block)):
        descriptor = os.open(folder / f"{number:06}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        os.write(descriptor, data[start : start + block])
        os.close(descriptor)
    _sync(folder)


def _write_tier(config: TierConfig, folder: Path, data: memoryview, page: int) -> None:
    tier = open_packs(msgspec.structs.replace(config, place=str(folder)))
    step = max(config.batch // page, 1)
    count = len(data) // page
    for start in range(0, count, step):
        batch = range(start, min(start + step, count))
        pages = [
            Stored(_key(n + 1), _key(n) if n else bytes(NO_PARENT), None, data[n * page : (n + 1) * page])
            for n in batch
        ]
        tier.store(NAMESPACE, pages)
    _sync(folder)


def _sync(folder: Path, *, forget: bool = False) -> None:
    """Wait until the disk has all files below ``folder``; with ``forget`` the kernel keeps nothing of them."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            if forget:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def _read_plain(folder: Path, into: memoryview, block: int) -> None:
    for number, start in enumerate(range(0, len(into), block)):
        descriptor = os.open(folder / f"{number:06}", os.O_RDONLY)
        os.preadv(descriptor, [into[start : start + block]], 0)
        os.close(descriptor)


def _read_tier(
    load: Callable[[str, Sequence[Wanted]], list[Outcome]], readers: int, into: memoryview, page: int
) -> None:
    step = max(PORTION // page, 1)
    count = len(into) // page

    def portion(start: int) -> None:
        numbers = range(start, min(start + step, count))
        load(NAMESPACE, [Wanted(_key(n + 1), into[n * page : (n + 1) * page]) for n in numbers])

    with ThreadPoolExecutor(readers) as pool:
        list(pool.map(portion, range(0, count, step)))
