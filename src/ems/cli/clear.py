"""``ems clear``: take pages out of the pool."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Annotated, Any

from cyclopts import Parameter

from ems.cli.acts import answer, ask, holders
from ems.cli.options import CHANGING, Changing, Flag
from ems.cli.shown import complain, counted
from ems.config import format_size, parse_duration
from ems.errors import ConfigError
from ems.pool.protocol.acts import Clear


def clear(
    *,
    tenant: str | None = None,
    model: str | None = None,
    namespace: str | None = None,
    older_than: str | None = None,
    everything: Annotated[bool, Parameter(name="--all", negative="")] = False,
    memory_only: Flag = False,
    yes: Annotated[bool, Parameter(name=["--yes", "-y"], negative="")] = False,
    asked: Changing = CHANGING,
) -> int:
    """Take the pages out of the pool that fit all that is given: out of memory and of the tiers below it.

    Pages that somebody reads are not found any more and leave when they are released.  Exit status 1 when some of it is
    still there, with who holds it, or when nothing is called so.

    Args:
        tenant: Pages of this tenant.
        model: Pages of this model, in any layout.
        namespace: Pages of this namespace.
        older_than: Pages that were neither stored nor loaded for so long, such as 90s, 15m, 12h or 7d.
        everything: All pages.
        memory_only: Leave the tiers alone: what they have comes back when it is asked for.
        yes: Do not ask before everything is taken out.
    """
    seconds = None if older_than is None else parse_duration(older_than, name="--older-than")
    criteria = (tenant, model, namespace, seconds)
    if everything == any(one is not None for one in criteria):
        raise ConfigError("give --tenant, --model, --namespace or --older-than, or --all alone to take out everything")
    act = Clear(tenant, model, namespace, seconds, everything, memory_only)
    if everything and not yes and not asked.dry_run and not _agreed(act, asked):
        return 1
    report = ask(asked.at, act, dry_run=asked.dry_run)
    if asked.json or not report.get("unmatched"):
        answer(report, _sentence(report, dry_run=asked.dry_run), asked)
    complaints = list(_complaints(report, dry_run=asked.dry_run))
    for one in complaints:
        complain(one)
    return 1 if complaints else 0


def _agreed(act: Clear, asked: Changing) -> bool:
    if not sys.stdin.isatty():
        raise ConfigError("--all takes out everything and nobody can be asked here, add --yes if that is meant")
    would = _sentence(ask(asked.at, act, dry_run=True), dry_run=True)
    print(f"this {would}; go on? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _sentence(report: dict[str, Any], *, dry_run: bool) -> str:
    spaces = f"in {counted(len(report['namespaces']), 'namespace')}"
    tiers = "".join(
        f"; {tier['name']}: {counted(tier['pages'], 'page')} ({format_size(tier['bytes'])})"
        for tier in report.get("tiers", ())
    )
    pages = counted(report["matched"], "page")
    if dry_run:
        pinned = f"; {_pinned(report)}" if report["pinned"] else ""
        return f"would clear {pages} ({format_size(report['bytes'])}) {spaces}{pinned}{tiers}"
    return f"cleared {report['removed']} of {pages} {spaces}{tiers}"


def _pinned(report: dict[str, Any]) -> str:
    return f"{counted(report['pinned'], 'page')} {'stays' if report['pinned'] == 1 else 'stay'} because of pins"


def _complaints(report: dict[str, Any], *, dry_run: bool) -> Iterator[str]:
    if report.get("unmatched"):
        yield report["unmatched"]
    if report["pinned"] and not dry_run:
        yield f"{_pinned(report)}, `ems unpin NAMESPACE` ends them"
    if kept := report["kept"]:
        who = "; ".join(holders(report))
        why = f"in use by {who}" if who else "because pages that are pinned or came since continue them"
        yield f"{counted(kept, 'page')} {'stays' if kept == 1 else 'stay'}, {why}; clear again after that"
    for tier in report.get("tiers", ()):
        if tier["reason"]:
            yield _tier_complaint(tier)


def _tier_complaint(tier: dict[str, Any]) -> str:
    names, count = tier["remaining"], tier["namespaces_remaining"]
    more = f" and {count - len(names)} more" if count > len(names) else ""
    what = f"pages of {', '.join(names)}{more} may" if names else "pages may"
    return f"{tier['name']} could not be cleared, {tier['reason']}; {what} still be in it, clear again when it works"
