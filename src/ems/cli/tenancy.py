"""What the ``ems tenant`` and ``ems key`` verbs share: the file, its change, the node that must obey, the output."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from ems.cli.acts import figures
from ems.cli.options import Asking, Changing
from ems.cli.shown import note, print_json
from ems.config import default_tenants
from ems.errors import EmsError, PoolError, PoolUnavailable
from ems.pool.names import tenant_of
from ems.pool.node.audit import NAME, AuditLog, act
from ems.pool.tenants import store
from ems.pool.tenants.registry import SECRET_BYTES, Registry


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Reading(Asking):
    """Which file of tenants, which node, and for whom the answer is."""

    tenants: Annotated[Path | None, Parameter(env_var="EMS_TENANTS")] = None
    """The file of tenants, default /etc/ems/tenants.json (root) or ~/.config/ems/tenants.json."""

    @property
    def file(self) -> Path:
        return self.tenants if self.tenants not in (None, Path()) else default_tenants()


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Writing(Reading, Changing):
    """The same for a verb that changes the file, which the node is to obey."""


READING = Reading()
WRITING = Writing()
OBEY_SECONDS = 5.0
"""How long a node may take to read a file that was changed."""
_POLL_SECONDS = 0.05


def change(
    verb: str,
    what: Mapping[str, object],
    apply: Callable[[Registry], Registry],
    *,
    asked: Writing,
    create: bool = False,
) -> Registry:
    """Make a change of the file of tenants and write it into the audit log; what is there after it.

    In a dry run all is checked and nothing changed.
    """
    path = asked.file
    if asked.dry_run:
        return apply(store.read(path) if path.exists() or not create else Registry(secret=bytes(SECRET_BYTES)))
    log = AuditLog(path.with_name(NAME))
    with store.changing(path, create=create) as before:
        try:
            after = apply(before)
        except EmsError as error:
            log.record(act(verb, what, f"refused: {error}"))
            raise
        log.record(act(verb, what))
        store.write(path, after)
    return after


def change_and_tell(
    verb: str,
    what: Mapping[str, object],
    apply: Callable[[Registry], Registry],
    said: str,
    *,
    asked: Writing,
    create: bool = False,
) -> None:
    """:func:`change`, and say what was done and whether the node obeys."""
    after = change(verb, what, apply, asked=asked, create=create)
    if asked.json:
        print_json({**what, "revision": after.revision, "dry_run": asked.dry_run})
    if asked.dry_run:
        note(f"{said}, were this not a dry run: nothing was changed")
        return
    note(said)
    tell(asked, after.revision)


def tell(asked: Writing, revision: int) -> None:
    """Wait until the node obeys ``revision`` of the file, and say on stderr whether it does."""
    path = asked.at
    file = str(asked.file.absolute())
    deadline = time.monotonic() + OBEY_SECONDS
    try:
        while True:
            known: Any = figures(path).get("tenants") or {}
            if known.get("file") != file:
                note(f"the node on {path} does not read {file}, start it with 'ems node --tenants {file}'")
                return
            if known["revision"] >= revision:
                unkept = known.get("quotas_unkept")
                note(
                    f"the node on {path} has the new keys and keeps the quotas of before: {unkept}"
                    if unkept
                    else f"the node on {path} obeys"
                )
                return
            if time.monotonic() >= deadline:
                note(f"the node on {path} has not read {file} yet, see its log")
                return
            time.sleep(_POLL_SECONDS)  # bounded by the deadline of this loop
    except PoolUnavailable:
        note(f"no node runs on {path}, the next one started with --tenants {file} obeys")
    except PoolError as error:
        note(f"the node on {path} could not be asked whether it obeys: {error}")


def usage(socket: Path) -> dict[str, int] | None:
    """Bytes of pages of each tenant on the running node; None when it cannot be asked."""
    used: dict[str, int] = {}
    try:
        rows: Any = figures(socket)["namespaces"]
    except EmsError:
        return None
    for row in rows:
        owner = tenant_of(row["name"])
        used[owner] = used.get(owner, 0) + row["pages"] * row["page_size"]
    return used
