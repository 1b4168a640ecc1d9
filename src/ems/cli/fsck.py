"""``ems fsck``: check a tier below memory, every page against its checksum, and mend it."""

from __future__ import annotations

import time

from ems.cli.options import Flag, Format
from ems.cli.shown import counted, note, print_json, say
from ems.config import format_size
from ems.pool.tiers.fsck import Report, check
from ems.pool.tiers.repair import Finding
from ems.pool.tiers.settings import parse_tier

EXIT_WRONG = 1
_EVERY = 100


def fsck(tier: str, /, *, dry_run: Flag = False, output: Format = "table") -> int:
    """Check a tier below memory and mend it; a node may use it meanwhile.

    Good pages of damaged packs are written anew, and the packs set aside in the tier's quarantine. What is no pack of
    this release, or was sealed with another key, is named and left as it is. Exit status 1 when something is wrong that
    was not mended.

    Args:
        tier: The tier as 'ems node --tier' takes it, such as 'dir:/var/cache/ems'.
        dry_run: Change nothing, say only what is wrong.
    """
    config = parse_tier(tier)
    report = check(config, time.time(), dry_run=dry_run, progress=_say)
    if output == "json":
        print_json(report)
    else:
        _print(report)
    return EXIT_WRONG if report.unmended else 0


def _say(packs: int) -> None:
    if packs % _EVERY == 0:
        note(f"{counted(packs, 'pack')} checked")


def _print(report: Report) -> None:
    packs, pages = counted(report.packs, "pack"), counted(report.pages, "good page")
    say(f"{report.tier}: {packs}, {pages}, {format_size(report.bytes)}")
    for finding in report.findings:
        say(f"{finding.blob}: {finding.reason}, {_done(finding)}")
    if report.unchecked:
        unchecked = counted(report.unchecked, "pack")
        say(f"the checksums of {unchecked} are right; for want of the key nobody knows who wrote what is in there")
    if report.quarantined:
        say(f"set aside: {counted(len(report.quarantined), 'damaged pack')}, {', '.join(report.quarantined)}")
    if report.leftovers:
        pieces = counted(report.leftovers, "piece")
        say(f"{pieces} of dead writers, {'left' if report.dry_run else 'removed'}")
    if report.foreign:
        more = "" if report.foreign == len(report.foreign_names) else ", ..."
        foreign = counted(report.foreign, "other file")
        say(f"{foreign} not of EMS, left alone: {', '.join(report.foreign_names)}{more}")
    mended = len(report.findings) - report.unmended
    say("something is wrong" if report.unmended else f"{mended} mended, all else is well" if mended else "all is well")


def _done(finding: Finding) -> str:
    if finding.kind == "mended":
        return f"mended, {counted(finding.good_pages, 'page')} kept"
    if finding.kind == "damaged":
        return f"not mended, {counted(finding.good_pages, 'good page')}"
    return "left as it is"
