"""What a tenant may ask of the node, in whose words, and what it is told.

A tenant's requests name namespaces by its own names and numbers; the node's brain knows all tenants' by others.  This
stands between the two.  What always holds: a request that is not listed here is refused; a number means something to
the tenant that it was given to only; figures are of the tenant's own pages and calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from ems.errors import PoolRefused, StaleReference
from ems.pool.core.changes import ChangeLog
from ems.pool.names import TENANT, own_name, qualified, refuse_marked, tenant_of
from ems.pool.protocol import messages
from ems.pool.protocol.messages import ChangeRun

MAX_NAMESPACES = 256
"""Most namespaces of one tenant, so that one cannot use up the node's."""

ALLOWED = messages.Storing | messages.Stats | messages.Explain
"""What tenants may ask; everything else is for administrators."""
_NUMBERED = messages.Lookup | messages.Reserve | messages.Corrupt | messages.Announce | messages.Prefetch
"""Requests that name a namespace by its number."""


class Tally(msgspec.Struct):
    """What one tenant's calls came to since the node started; the names are those of the node's own counters."""

    lookups: int = 0
    keys_looked_up: int = 0
    keys_hit: int = 0
    tails_hit: int = 0
    pages_committed: int = 0
    refused_no_space: int = 0
    refused_not_touched: int = 0
    refused_share: int = 0
    already_present: int = 0
    already_writing: int = 0

    def count(self, request: messages.Request, answer: messages.Answer | None) -> None:
        match request, answer:
            case messages.Lookup(tail=None), messages.Hits():
                self.lookups += 1
                self.keys_looked_up += len(request.keys) // 16
                self.keys_hit += answer.count
            case messages.Lookup(), messages.Hits():
                self.tails_hit += bool(answer.count)
            case messages.Reserve(), messages.Granted():
                self.already_present += answer.outcomes.count(1)
                self.already_writing += answer.outcomes.count(2)
                self.refused_no_space += answer.outcomes.count(3)
                self.refused_not_touched += answer.outcomes.count(4)
                self.refused_share += answer.outcomes.count(5)
            case messages.Commit(), messages.Done():
                self.pages_committed += answer.count
            case _:
                pass


class TenantRequestFilter:
    """One tenant's side of the node."""

    def __init__(self, tenant: str) -> None:
        self.tenant = tenant
        self.tally = Tally()
        self.numbers: list[int] = []
        """The node's number of each namespace, in the order in which the tenant opened them."""
        self._own: dict[int, int] = {}

    def inward(self, request: messages.Request) -> messages.Request:
        """The request in the node's words.

        Raises PoolRefused: it is not a tenant's to ask.  StaleReference: it names a namespace that this tenant has not
        opened.
        """
        if not isinstance(request, ALLOWED):
            raise PoolRefused(f"{type(request).__name__} is for the administrator of the node")
        if isinstance(request, messages.Describe):
            # Namespaces of one tenant and model are compared with each other: whose this is, the node says.
            facts = {**request.facts, TENANT: qualified(self.tenant, request.facts.get(TENANT, ""))}
            request = msgspec.structs.replace(request, facts=facts)
        if isinstance(request, messages.Open | messages.Describe | messages.Miss | messages.Explain):
            refuse_marked(request.name)
            return msgspec.structs.replace(request, name=qualified(self.tenant, request.name))
        if isinstance(request, messages.Changes):
            names = [qualified(self.tenant, name) for name in request.namespaces]
            return msgspec.structs.replace(request, namespaces=names)
        if isinstance(request, _NUMBERED):
            if not 0 <= request.namespace < len(self.numbers):
                raise StaleReference(f"namespace {request.namespace} is not open, open it again")
            return msgspec.structs.replace(request, namespace=self.numbers[request.namespace])
        return request

    def opens(self) -> None:
        """The tenant is about to make a namespace.  Raises PoolRefused: it has too many."""
        if len(self.numbers) >= MAX_NAMESPACES:
            raise PoolRefused(f"this tenant has {MAX_NAMESPACES} namespaces and may have no more")

    def outward(self, answer: messages.Answer | None) -> messages.Answer | None:
        if isinstance(answer, messages.Opened) and answer.namespace >= 0:
            own = self._own.setdefault(answer.namespace, len(self.numbers))
            if own == len(self.numbers):
                self.numbers.append(answer.namespace)
            return messages.Opened(own)
        if isinstance(answer, messages.Explained):
            winner = own_name(answer.winner) if tenant_of(answer.winner) == self.tenant else ""
            layouts = [
                msgspec.structs.replace(other, namespace=own_name(other.namespace))
                for other in answer.layouts
                if tenant_of(other.namespace) == self.tenant
            ]
            return msgspec.structs.replace(answer, winner=winner, layouts=layouts)
        return answer

    def figures(self, rows: list[dict[str, object]]) -> dict[str, object]:
        """The tenant's own figures; ``rows`` are those of its namespaces as the node calls them."""
        return {
            "tenant": self.tenant,
            "namespaces": [{**row, "name": own_name(str(row["name"]))} for row in rows],
            "counters": msgspec.to_builtins(self.tally),
        }


class TenantChanges(ChangeLog):
    """The logs of all tenants, to be used as one: nobody learns from its numbers, or what it lost, what others do."""

    def __init__(self) -> None:
        super().__init__()
        self._logs: dict[str, ChangeLog] = {}

    def recording(self) -> bool:
        return any(log.recording() for log in self._logs.values())

    def stored(self, namespace: str, keys: Iterable[bytes]) -> None:
        self._log(namespace).stored(namespace, keys)

    def removed(self, namespace: str, key: bytes) -> None:
        self._log(namespace).removed(namespace, key)

    def since(self, sequence: int, namespaces: Sequence[str], now: float) -> tuple[int, bool, list[ChangeRun]]:
        return self._log(namespaces[0] if namespaces else "").since(sequence, namespaces, now)

    def tick(self, now: float) -> None:
        for log in self._logs.values():
            log.tick(now)

    def _log(self, namespace: str) -> ChangeLog:
        return self._logs.setdefault(tenant_of(namespace), ChangeLog())
