"""All that can happen to a node, its tiers and its clients: kinds of steps, whose numbers say to whom and how.

A step that has nothing to act on does nothing, so that any part of a history is a history.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.faults import administering, carrying, damage, readers, tenancy, turns, writers
from tests.faults.world import World

Step = Callable[[World, int, int, int], None]
Steps = dict[str, tuple[Step, int]]
"""Kinds of steps with their weights."""

ANYWHERE: Steps = {
    "reserve": (writers.reserve, 8),
    "write": (writers.write, 4),
    "commit": (writers.commit, 7),
    "save": (writers.save, 14),
    "abort": (writers.abort, 2),
    "crowd": (writers.crowd, 1),
    "write late": (writers.write_late, 4),
    "stop writing": (writers.stop_writing, 2),
    "slow writer": (writers.slow_writer, 2),
    "lookup": (readers.lookup, 6),
    "copy": (readers.copy, 5),
    "verify": (readers.verify, 5),
    "finish": (readers.finish, 4),
    "load": (readers.load, 14),
    "announce": (readers.announce, 2),
    "leave": (turns.leave, 3),
    "die": (turns.die, 1),
    "tick": (turns.tick, 4),
    "jump": (turns.jump, 1),
    "crash": (turns.crash, 2),
    "arm": (turns.arm, 6),
    "stop": (turns.stop, 2),
    "restart": (turns.restart, 3),
    "fill memory": (turns.fill_memory, 1),
    "flip payload": (damage.flip_payload, 3),
    "flip header": (damage.flip_header, 2),
    "flip both": (damage.flip_both, 2),
    "flip description": (damage.flip_description, 1),
    "flip tails": (damage.flip_tails, 1),
    "clear": (administering.clear, 1),
    "drain": (administering.drain, 1),
    "resize": (administering.resize, 2),
    "pin": (administering.pin, 2),
    "unpin": (administering.unpin, 1),
    "look": (administering.look, 1),
}
TIERS: Steps = {
    "work": (carrying.work, 16),
    "down and up": (carrying.down_and_up, 16),
    "keep up": (carrying.keep_up, 12),
    "break a place": (carrying.break_place, 4),
    "mend a place": (carrying.mend_place, 4),
    "flip a blob": (carrying.flip_blob, 3),
    "another node": (carrying.other_node, 3),
    "fail while more waits": (carrying.fail_while_more_waits, 2),
    "prefetch": (carrying.prefetch, 4),
    "await pages": (carrying.await_pages, 8),
    "warm": (administering.warm, 3),
    "empty memory": (administering.empty, 5),
}
TENANTS: Steps = {
    "set a quota": (tenancy.set_quota, 3),
    "revoke a key": (tenancy.revoke, 1),
    "give a key": (tenancy.give_key, 3),
    "come back": (tenancy.come_back, 3),
    "overreach": (tenancy.overreach, 4),
}
STEPS: Steps = {**ANYWHERE, **TIERS, **TENANTS}
"""All kinds of steps."""


ENDS = frozenset({"crash", "arm", "stop", "restart"})
"""After which the node is another."""


def kinds_for(*, tiers: bool, tenants: bool, calm: bool) -> Steps:
    """The kinds that do anything in a history; in a ``calm`` one nodes seldom end."""
    kinds = {**ANYWHERE, **(TIERS if tiers else {}), **(TENANTS if tenants else {})}
    return {kind: (step, 1 if calm and kind in ENDS else weight) for kind, (step, weight) in kinds.items()}
