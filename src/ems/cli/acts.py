"""What the verbs that administer a node have in common: one act, and its report once it is done."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec

from ems.cli.options import Asking
from ems.cli.shown import counted, note, print_json, say
from ems.errors import ConfigError, PoolRefused, PoolTimeout, Unauthorised
from ems.pool.client.pool_client import PoolClient
from ems.pool.protocol.acts import Acts, Follow
from ems.pool.protocol.limits import MAX_TEXT

_POLL_SECONDS = 0.05
PATIENCE = 120.0
"""Seconds that a verb waits for progress of what it began."""
_TELL_AFTER = 1.0
"""Seconds without progress after which it is said who is waited for."""


@contextmanager
def connected(path: Path) -> Iterator[PoolClient]:
    with closing(PoolClient(path, "ems", administers=True)) as client:
        try:
            yield client
        except Unauthorised as error:
            raise PoolRefused(
                f"the node on {path} serves tenants, and only its own user (number {path.stat().st_uid}) looks after "
                "it; call this as that user, as in 'sudo -u ems ems status'"
            ) from error


def figures(path: Path) -> dict[str, Any]:
    with connected(path) as client:
        return client.stats()


def answer(report: dict[str, Any], text: str, asked: Asking) -> None:
    if asked.json:
        print_json(report)
    else:
        say(text)


def ask(path: Path, act: Acts, *, dry_run: bool = False, timeout: float = PATIENCE) -> dict[str, Any]:
    for text in msgspec.structs.asdict(act).values():
        if isinstance(text, str) and len(text) > MAX_TEXT:
            raise ConfigError(f"{text[:40]}... has {len(text)} characters, expected a name of at most {MAX_TEXT}")
    with connected(path) as client:
        report = client.administer(act, dry_run=dry_run)
        since = time.monotonic()
        named = ""
        while not report.get("done", True):
            waited, who = time.monotonic() - since, " and ".join(holders(report))
            if waited >= timeout:
                waits = f", waits for {who}" if who else ""
                raise PoolTimeout(f"the node got no further for {timeout:g} s{waits} and goes on (job {report['job']})")
            if waited >= _TELL_AFTER and who and who != named:
                named = who
                note(f"waiting for {who}")
            time.sleep(_POLL_SECONDS)  # bounded by the deadline of this loop
            before, report = report, {**report, **client.administer(Follow(report["job"]))}
            if _progress(report) != _progress(before):
                since = time.monotonic()
        return report


def _progress(report: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in report.items() if name != "held_by"}


def holders(report: dict[str, Any]) -> Iterator[str]:
    """Who reads or writes what was to leave, one text each."""
    for one in report.get("held_by", ()):
        holds = [(one["leases"], "lease"), (one["reservations"], "reservation")]
        text = " and ".join(counted(count, what) for count, what in holds if count)
        who = f"{one['client']} (process {one['pid']}{one['tenant'] and ', tenant ' + one['tenant']})"
        yield f"{who}: {text} on {counted(one['pages'], 'page')}"
