"""``ems clear``: take pages out of the pool."""

from __future__ import annotations

import re
import sys
from typing import Annotated, Any

from cyclopts import Parameter

from ems.cli.acts import ask
from ems.cli.options import CHANGING, Changing
from ems.cli.shown import print_json
from ems.config import format_size
from ems.errors import ConfigError
from ems.pool.administration.acts import Clear

_AGE = re.compile(r"([0-9]+(?:\.[0-9]+)?)(s|m|h|d|)")
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


def clear(
    *,
    tenant: str | None = None,
    model: str | None = None,
    namespace: str | None = None,
    older_than: str | None = None,
    everything: Annotated[bool, Parameter(name="--all", negative="")] = False,
    memory_only: Annotated[bool, Parameter(negative="")] = False,
    asked: Changing = CHANGING,
) -> int:
    """Take the pages out of the pool that fit all that is given: out of memory and of the tiers below it.

    Pages that somebody reads are not found any more and leave when they are released.  Exit status 1 when a tier could
    not be cleared.

    Parameters
    ----------
    tenant
        Pages of this tenant.
    model
        Pages of this model, in any layout.
    namespace
        Pages of this namespace.
    older_than
        Pages that were neither stored nor loaded for so long, such as 90s, 15m, 12h or 7d.
    everything
        All pages.
    memory_only
        Leave the tiers alone: what they have comes back when it is asked for.
    """
    seconds = None if older_than is None else parse_age(older_than, "--older-than")
    criteria = (tenant, model, namespace, seconds)
    if everything == any(one is not None for one in criteria):
        raise ConfigError("give --tenant, --model, --namespace or --older-than, or --all alone to take out everything")
    act = Clear(tenant, model, namespace, seconds, everything, memory_only)
    report = ask(asked.socket, act, dry_run=asked.dry_run)
    if asked.json:
        print_json(report)
    else:
        print(_sentence(report, dry_run=asked.dry_run))
    left = [tier for tier in report.get("tiers", ()) if tier["reason"]]
    for tier in left:
        print(f"error: {_complaint(tier)}", file=sys.stderr)
    return 1 if left else 0


def parse_age(text: str, name: str) -> float:
    """Seconds meant by ``text``: a number with a unit (s, m, h, d) or without (seconds).

    Raises:
        ConfigError: it is none.
    """
    match = _AGE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"{name} is {text!r}, expected a number with a unit such as 90s, 15m, 12h or 7d")
    return float(match[1]) * _SECONDS[match[2]]


def _sentence(report: dict[str, Any], *, dry_run: bool) -> str:
    spaces = f"in {len(report['namespaces'])} namespaces"
    tiers = "".join(
        f"; {tier['name']}: {tier['pages']} pages ({format_size(tier['bytes'])})" for tier in report.get("tiers", ())
    )
    if dry_run:
        return f"would clear {report['matched']} pages ({format_size(report['bytes'])}) {spaces}{tiers}"
    kept = f"; {report['kept']} stay because they are in use" if report["kept"] else ""
    return f"cleared {report['removed']} of {report['matched']} pages {spaces}{kept}{tiers}"


def _complaint(tier: dict[str, Any]) -> str:
    names, count = tier["remaining"], tier["namespaces_remaining"]
    more = f" and {count - len(names)} more" if count > len(names) else ""
    what = f"pages of {', '.join(names)}{more} may" if names else "pages may"
    return f"{tier['name']} could not be cleared, {tier['reason']}; {what} still be in it, clear again when it works"
