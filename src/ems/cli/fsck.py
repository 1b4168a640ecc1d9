"""``ems fsck``: check a tier below memory, every page against its checksum, and mend it."""

from __future__ import annotations

import sys
import time
from typing import Annotated, Literal

import msgspec
from cyclopts import Parameter

from ems.config import format_size
from ems.pool.tiers.fsck import Report, check
from ems.pool.tiers.settings import parse_tier

Output = Literal["text", "json"]
EXIT_WRONG = 1
_EVERY = 100


def fsck(
    tier: str,
    /,
    *,
    dry_run: bool = False,
    output: Annotated[Output, Parameter(name=["--output", "-o"])] = "text",
) -> int:
    """Check a tier below memory and mend it; a node may use it meanwhile.

    Exit status 1 when something is wrong that was not mended.

    Parameters
    ----------
    tier
        The tier as 'ems node --tier' takes it, such as 'dir:/var/cache/ems'.
    dry_run
        Change nothing, say only what is wrong.
    output
        Text for people or JSON for scripts.
    """
    config = parse_tier(tier)
    report = check(config, time.time(), dry_run=dry_run, progress=_say)
    if output == "json":
        print(msgspec.json.format(msgspec.json.encode(report)).decode())
    else:
        _print(report)
    return EXIT_WRONG if report.unmended else 0


def _say(packs: int) -> None:
    if packs % _EVERY == 0:
        print(f"{packs} packs checked", file=sys.stderr)


def _print(report: Report) -> None:
    print(f"{report.tier}: {report.packs} packs, {report.pages} good pages, {format_size(report.bytes)}")
    for finding in report.findings:
        done = "mended" if finding.mended else "not mended"
        kept = f", {finding.good_pages} pages kept" if finding.mended else ""
        print(f"{finding.blob}: {finding.reason}, {done}{kept}")
    if report.leftovers:
        print(f"{report.leftovers} pieces that dead writers left, {'left' if report.dry_run else 'removed'}")
    if report.foreign:
        more = "" if report.foreign == len(report.foreign_names) else ", ..."
        print(f"{report.foreign} that are not of EMS and were left alone: {', '.join(report.foreign_names)}{more}")
    print("something is wrong" if report.unmended else "all is well")
