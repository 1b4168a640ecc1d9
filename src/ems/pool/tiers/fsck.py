"""Checks a whole tier and mends it: every pack read, every page held against its checksum.

What always holds: with ``dry_run`` nothing is changed; a page that is good is still there afterwards; blobs that are
not ours are named and left alone.  A node may use the tier meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from ems.errors import ConfigError
from ems.pool.tiers.blobs import Blob, Blobs, Gone
from ems.pool.tiers.cipher import Secrets
from ems.pool.tiers.heads import PACK_NAME, read_whole
from ems.pool.tiers.opening import open_blobs
from ems.pool.tiers.repair import mend
from ems.pool.tiers.settings import TierConfig
from ems.pool.tiers.snapshot import CATALOGUE, is_snapshot

MAX_NAMED = 100
"""Foreign blobs that are named; more are only counted."""
LEFT_SECONDS = 600.0
"""What a writer has not finished for so long was left by one that died."""
_PROBE = "probe-"


class Finding(msgspec.Struct, frozen=True):
    """Something that is wrong with one blob, and whether it was mended."""

    blob: str
    reason: str
    good_pages: int
    bad_pages: int
    mended: bool


class Report(msgspec.Struct):
    """What a check found."""

    tier: str
    dry_run: bool
    packs: int = 0
    pages: int = 0
    bytes: int = 0
    findings: list[Finding] = []
    leftovers: int = 0
    """Pieces of writers and probes that died, which were removed (or would be)."""
    foreign: int = 0
    foreign_names: list[str] = []

    @property
    def unmended(self) -> int:
        """How many things are wrong and stay so."""
        return sum(not finding.mended for finding in self.findings)


def check(
    config: TierConfig, now: float, *, dry_run: bool, progress: Callable[[int], None], blobs: Blobs | None = None
) -> Report:
    """Check the tier of ``config``; ``progress`` is told the packs done so far.

    Raises:
        ConfigError: the tier cannot be used, or its folder is not there.
        TierFailed: it does not work.
    """
    _must_exist(config)
    place = blobs or open_blobs(config)
    keys = Secrets(config.key) if config.key is not None else None
    report = Report(config.name, dry_run)
    for blob in list(place.blobs()):
        if PACK_NAME.fullmatch(blob.name):
            _check_pack(place, blob, keys, report)
            progress(report.packs)
        elif blob.name == CATALOGUE:
            _check_catalogue(place, report)
        elif blob.name.startswith(_PROBE):
            _remove_probe(place, blob, now, report)
        else:
            report.foreign += 1
            if len(report.foreign_names) < MAX_NAMED:
                report.foreign_names.append(blob.name)
    report.leftovers += 0 if dry_run else place.sweep(now - LEFT_SECONDS)
    return report


def _must_exist(config: TierConfig) -> None:
    """A check must not make the folder that it was told to check."""
    if config.kind == "dir" and not Path(config.place).is_dir():
        raise ConfigError(f"{config.place} is no folder, name the folder of a tier")


def _check_pack(place: Blobs, blob: Blob, keys: Secrets | None, report: Report) -> None:
    verdict = mend(place, blob.name, keys, dry_run=report.dry_run)
    report.packs += 1
    report.pages += verdict.good
    report.bytes += blob.size
    if verdict.reason:
        report.findings.append(Finding(blob.name, verdict.reason, verdict.good, verdict.bad, verdict.mended))


def _check_catalogue(place: Blobs, report: Report) -> None:
    try:
        right = is_snapshot(read_whole(place, CATALOGUE))
    except Gone:
        return
    if not right:
        if not report.dry_run:
            place.delete([CATALOGUE])
        report.findings.append(Finding(CATALOGUE, "the written catalogue is damaged", 0, 0, not report.dry_run))


def _remove_probe(place: Blobs, blob: Blob, now: float, report: Report) -> None:
    if now - blob.modified >= LEFT_SECONDS:
        report.leftovers += 1
        if not report.dry_run:
            place.delete([blob.name])
