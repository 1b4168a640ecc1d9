"""Checks a whole tier and mends it: every pack read, every page held against its seal and its checksum.

What always holds: with ``dry_run`` nothing is changed; a page that is good is still there afterwards; what is not
understood is named and left as it is.  A node may use the tier meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec

from ems.errors import ConfigError
from ems.pool.tiers.blobs import Blob, Blobs, Gone, read_part
from ems.pool.tiers.catalogue import CATALOGUE
from ems.pool.tiers.pack_format import PACK_NAME, Malformed, find_head
from ems.pool.tiers.pack_seal import SealKeys, open_keys
from ems.pool.tiers.pack_store import PROBE_BYTES, PROBE_NAME, UNFINISHED_SECONDS
from ems.pool.tiers.packs import open_blobs
from ems.pool.tiers.repair import QUARANTINE, Finding, Quarantine, mend
from ems.pool.tiers.settings import TierConfig

MAX_NAMED = 100
"""Foreign blobs that are named; more are only counted."""


class Report(msgspec.Struct):
    """What a check found."""

    tier: str
    dry_run: bool
    packs: int = 0
    pages: int = 0
    bytes: int = 0
    findings: list[Finding] = []
    """What is wrong, or was."""
    unchecked: int = 0
    """Packs whose checksums are right and whose seals could not be checked, for want of their key."""
    quarantined: list[str] = []
    """Damaged packs that are kept aside."""
    leftovers: int = 0
    """Pieces of writers and probes that died, which were removed (or would be)."""
    foreign: int = 0
    foreign_names: list[str] = []

    @property
    def unmended(self) -> int:
        """How many things are wrong and stay so."""
        return sum(finding.kind != "mended" for finding in self.findings)


def check(config: TierConfig, now: float, *, dry_run: bool, progress: Callable[[int], None]) -> Report:
    """Check the tier of ``config``; ``progress`` is told the packs done so far.

    Raises ConfigError: the tier cannot be used, or its folder is not there.  TierFailed: it does not work.
    """
    if config.kind == "dir" and not Path(config.place).is_dir():
        # A check must not make the folder that it was told to check.
        raise ConfigError(f"{config.place} is no folder, name the folder of a tier")
    place, keys = open_blobs(config), open_keys(config, make=False)
    report, quarantine = Report(config.name, dry_run), Quarantine(place, config.size)
    listed = list(place.blobs())
    quarantine.know(listed)
    leftovers = []
    for blob in listed:
        is_pack = PACK_NAME.fullmatch(blob.name) is not None
        if blob.refused and (is_pack or blob.name == CATALOGUE):
            report.findings.append(Finding(blob.name, "not_believed", blob.refused))
        elif is_pack and blob.size:
            finding = _no_pack(place, blob, keys) or mend(
                place, place.put, blob.name, keys, quarantine, dry_run=dry_run
            )
            report.packs += 1
            report.pages += finding.good_pages
            report.bytes += blob.size
            report.unchecked += finding.kind == "unchecked"
            report.findings += [finding] if finding.reason else []
            progress(report.packs)
        elif not blob.refused and _is_leftover(blob):
            if now - blob.modified >= UNFINISHED_SECONDS:
                report.leftovers += 1
                leftovers.append(blob.name)
        elif blob.refused or (blob.name != CATALOGUE and not blob.name.startswith(QUARANTINE)):
            report.foreign += 1
            report.foreign_names += [blob.name] if report.foreign <= MAX_NAMED else []
    if not dry_run:
        place.delete(leftovers)
        report.leftovers += place.sweep(now - UNFINISHED_SECONDS)
    report.quarantined = quarantine.names
    return report


def _no_pack(place: Blobs, blob: Blob, keys: SealKeys | None) -> Finding | None:
    """Why ``blob`` is none, from its two ends alone: it may be as large as anything."""
    try:
        find_head(partial(read_part, place, blob.name), blob.size, blob.name, keys)
    except Malformed as error:
        return Finding(blob.name, "unreadable", str(error))
    except Gone:
        return Finding(blob.name, "gone")
    return None


def _is_leftover(blob: Blob) -> bool:
    """Whether it is a probe, or a pack that got its name but no bytes before the host went down."""
    probe = PROBE_NAME.fullmatch(blob.name) is not None and blob.size == PROBE_BYTES
    return probe or (PACK_NAME.fullmatch(blob.name) is not None and not blob.size)
