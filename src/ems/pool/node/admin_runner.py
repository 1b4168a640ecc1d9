"""Does an administrator's acts on a running node: the shell around :mod:`ems.pool.administration`.

What always holds: only the node's own user and root are served; a step of long work is done in each round of the loop,
so clients are served in between; memory is had and given back as the brain asks for, in parts.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import msgspec
import structlog

from ems.errors import ConfigError, PoolRefused, Unauthorised
from ems.pool.administration.passes import RETRY_SECONDS
from ems.pool.administration.service import AdminService
from ems.pool.node.audit import NAME, Act, AuditLog
from ems.pool.protocol.acts import Acts, Follow, List, Show, Upgrade
from ems.pool.tenants.gate import Peer

if TYPE_CHECKING:
    import asyncio

    from ems.pool.node.pool_node import Node

GIVE_UP_BYTES = 4 << 20
"""Memory that is given back in one round of the loop, about a millisecond's work."""
GIVE_UP_RETRY_SECONDS = 1.0
"""Until it is tried again to give memory back where there was no room for the file in its place."""

_log = structlog.get_logger("ems.node")


class AdminRunner:
    """The administrator's side of one node."""

    def __init__(self, node: Node) -> None:
        self._node = node
        tiers = node.tier_manager if node.tier_manager.states else None
        self._service = AdminService(node.core, node.arena.free_bytes, tiers, who=node.clients.who)
        file = node.config.tenants
        self._audit = None if file is None else AuditLog(file.with_name(NAME))
        """Where acts are written down."""
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        self._changed = False
        """Whether an act may have changed what is pinned since that was written down."""

    def do(self, peer: Peer, act: Acts, *, dry_run: bool) -> dict[str, Any]:
        """Do ``act`` for ``peer``, or begin it.

        Raises Unauthorised: it is another user.  PoolRefused: it cannot be done.
        """
        if peer.uid not in (os.geteuid(), 0):
            raise Unauthorised("only the node's own user and root may administer it, use the account that runs it")
        silent = dry_run or isinstance(act, List | Show | Follow)
        try:
            report = self._do(act, dry_run=dry_run)
        except PoolRefused as error:
            if not silent:
                self._note(peer, act, f"refused: {error}")
            raise
        if not silent:
            self._changed = True
            self._note(peer, act, "done" if report.get("done", True) else "begun")
        self._keep_pins()
        self._carry_out()
        self._work()
        return report

    def _keep_pins(self) -> None:
        """Write down what is pinned, whatever other work goes on: the node may end before that does."""
        if self._changed:
            self._changed = self._service.passes > 0
            self._node.keep_pins()

    def _do(self, act: Acts, *, dry_run: bool) -> dict[str, Any]:
        if not isinstance(act, Upgrade):
            return self._service.do(act, self._node.clock(), dry_run=dry_run)
        if not dry_run:
            self._node.restart.wish()
        return {"done": False}

    def look(self, act: List | Show) -> dict[str, Any]:
        """The report of an act that changes nothing; who may see it is for the caller to know.

        Raises PoolRefused: what is to be shown is not there.
        """
        return self._service.do(act, self._node.clock())

    def _note(self, peer: Peer, act: Acts, result: str) -> None:
        """Write down who did what: in the log, and in the audit log if there is one, whose disk nobody waits for."""
        what = {name: value for name, value in msgspec.to_builtins(act).items() if name != "keys"}
        verb = str(what.pop("type"))
        if what.pop("pinned", True) is False:
            verb = "unpin"
        _log.info("administered", act=verb, result=result, pid=peer.pid, uid=peer.uid)
        if self._audit is not None:
            noted = Act(verb=verb, what=what, result=result, uid=peer.uid, pid=peer.pid)
            self._node.loop.run_in_executor(None, _record, self._audit, noted)

    @property
    def busy(self) -> bool:
        return self._service.passes > 0

    def close(self) -> None:
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()

    def _work(self) -> None:
        """Go on with what was begun, a step in each round of the loop."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._closed or not self._service.passes:
            self._keep_pins()
            return
        passes = self._service.passes
        at_once = self._service.step(self._node.clock())
        if self._service.passes < passes:
            self._keep_pins()
        self._carry_out()
        self._timer = self._node.loop.call_later(0 if at_once else RETRY_SECONDS, self._work)

    def _carry_out(self) -> None:
        """Have memory, or give it back, as the brain asks for."""
        core, arena = self._node.core, self._node.arena
        while self._service.given_up:
            self._give_up(self._service.given_up.pop(0), 0)
        wanted, self._service.added = self._service.added, []
        added: list[int] = []
        try:
            for segment in wanted:
                arena.add(segment, core.slots.segments[segment].size)
                added.append(segment)
        except OSError as error:
            _log.warning("cannot make a segment", segment=wanted[len(added)], reason=error.strerror)
        for segment in reversed(wanted[len(added) :]):
            core.slots.never_had(segment)
        if wanted:
            self._node.resized()
            # Of none too: it is over when nothing is left to be touched.
            self._node.memory.touch_more(added)

    def _give_up(self, segment: int, start: int) -> None:
        """Give memory of ``segment`` back from byte ``start`` on, a part in each round of the loop."""
        if self._closed:
            return
        if start >= self._node.arena.sizes[segment]:
            self._service.freed(segment)
            self._node.resized()
            self._work()
            return
        try:
            self._node.arena.give_up(segment, start, GIVE_UP_BYTES)
        except OSError as error:
            _log.warning("cannot give a segment's memory back yet", segment=segment, reason=error.strerror)
            self._node.loop.call_later(GIVE_UP_RETRY_SECONDS, self._give_up, segment, start)
        else:
            self._node.loop.call_later(0, self._give_up, segment, start + GIVE_UP_BYTES)


def _record(log: AuditLog, act: Act) -> None:
    try:
        log.record(act)
    except ConfigError as error:
        _log.error("an administrator's act is not in the audit log", reason=str(error))
