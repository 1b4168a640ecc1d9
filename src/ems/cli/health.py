"""``ems health``: what is well with the node and what is not."""

from __future__ import annotations

import msgspec

from ems.cli.acts import figures
from ems.cli.options import ASKING, Asking
from ems.cli.shown import print_facts, print_json
from ems.pool.administration.health import judge


def health(*, asked: Asking = ASKING) -> int:
    """Say what is well with the node and what is not; exit status 1 when something is not."""
    checks = judge(figures(asked.at))
    well = all(check.well for check in checks)
    if asked.json:
        print_json({"well": well, "checks": msgspec.to_builtins(checks)})
    else:
        print_facts([(check.name, f"{'well' if check.well else 'ILL'}, {check.seen}") for check in checks])
    return 0 if well else 1
