"""What can be asked of a node by its administrator, as it travels.

An act is data; :class:`ems.pool.administration.service.AdminService` does it.  What an act has in common with others
stands in the message around it: whether it only shows what it would do.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from ems.errors import PoolRefused
from ems.pool.keys import KEY_BYTES
from ems.pool.protocol.limits import MAX_KEY_BYTES, MAX_TEXT

Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
Keys = Annotated[bytes, msgspec.Meta(max_length=MAX_KEY_BYTES)]


class Act(msgspec.Struct, frozen=True, tag=str.lower, forbid_unknown_fields=True, omit_defaults=True):
    """Base of all acts.  What has its default is not sent."""


class List(Act, frozen=True):
    """Every namespace with its figures."""


class Show(Act, frozen=True):
    """All that is known of one thing: a namespace's name, 32 hex digits of a key, or (a part of) a request's id."""

    what: Text


class Pin(Act, frozen=True):
    """Keep pages (``keys`` of ``namespace``, 16 bytes each; without keys all of it) from leaving, or let them again.

    ``seconds`` is how long they stay pinned, 0 for as long as possible (a day).
    """

    namespace: Text
    keys: Keys = b""
    pinned: bool = True
    seconds: float = 0.0


class Clear(Act, frozen=True):
    """Take out the pages that all given criteria fit; ``everything`` says that none is meant on purpose.

    ``older_than`` are seconds since a page was stored or last loaded.  Tiers below memory are cleared too, unless
    ``memory_only``.
    """

    tenant: Text | None = None
    model: Text | None = None
    namespace: Text | None = None
    older_than: float | None = None
    everything: bool = False
    memory_only: bool = False


class Warm(Act, frozen=True):
    """Bring pages of ``namespace`` from a lower tier into memory: ``keys``, or all that the tier has."""

    namespace: Text
    keys: Keys = b""


class Refill(Act, frozen=True):
    """Bring from the tiers all that memory lacks of the namespaces that fit, what was used last first.

    At most ``limit`` bytes (0: any), and only as far as there is room without that a page has to leave.
    """

    tenant: Text | None = None
    model: Text | None = None
    namespace: Text | None = None
    limit: int = 0


class Drain(Act, frozen=True):
    """Take no more pages in (``draining``), or take them again."""

    draining: bool = True


class Resize(Act, frozen=True):
    """Give the pool ``size`` bytes."""

    size: int


class CancelResize(Act, frozen=True, tag="resize cancel"):
    """Keep the segments that a change of size has not emptied yet."""


class Upgrade(Act, frozen=True):
    """Restart as the release that is installed by now; figures of the node tell how far that is."""


class Follow(Act, frozen=True):
    """How far the work ``job`` is, whose number an earlier report gave."""

    job: int


Acts = List | Show | Pin | Clear | Warm | Refill | Drain | Resize | CancelResize | Upgrade | Follow


def check_act(act: Acts) -> None:
    if isinstance(act, Show) and len(act.what) > MAX_TEXT:
        raise PoolRefused(f"{len(act.what)} characters are to be shown, expected at most {MAX_TEXT}")
    if isinstance(act, Pin | Warm) and len(act.keys) % KEY_BYTES:
        raise PoolRefused(f"{len(act.keys)} bytes of keys, expected a multiple of {KEY_BYTES}")
    if isinstance(act, Clear):
        criteria = (act.tenant, act.model, act.namespace, act.older_than)
        if act.everything == any(one is not None for one in criteria):
            raise PoolRefused(
                "clear was told both what to take out and to take out everything, or neither; name a tenant, a model, "
                "a namespace or an age, or say --all"
            )
        if act.older_than is not None and not act.older_than >= 0:
            raise PoolRefused(f"clear was given an age of {act.older_than} s, expected 0 or more")
    if isinstance(act, Refill):
        _check_refill(act)
    if isinstance(act, Resize) and act.size <= 0:
        raise PoolRefused(f"the pool was to have {act.size} bytes, expected a positive number")
    if isinstance(act, Pin) and not act.seconds >= 0:
        raise PoolRefused(f"a pin was to last {act.seconds} s, expected 0 (for a day) or more")


def _check_refill(act: Refill) -> None:
    if all(one is None for one in (act.tenant, act.model, act.namespace)):
        raise PoolRefused("warm was told nothing to bring up, name a namespace, a model or a tenant")
    if act.limit < 0:
        raise PoolRefused(f"warm was given a limit of {act.limit} bytes, expected 0 (none) or more")
