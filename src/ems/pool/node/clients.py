"""The clients of one node: their connections, whom each belongs to, and what becomes of them.

What always holds: nobody stays whose key counts no more; what a client held is taken back when its connection ends, in
steps; a connection that is one too many ends by itself, with the reason, and costs nobody else theirs.
"""

from __future__ import annotations

import errno
import os
import resource
import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import structlog

from ems.config import format_size
from ems.errors import PoolRefused, ProtocolError, StaleReference
from ems.pool.node.client_limits import MAX_BUFFERED, ClientLimits, room_for_clients
from ems.pool.node.connection import Connection
from ems.pool.node.rounds import Farewell
from ems.pool.protocol import limits, messages
from ems.pool.tenants.gate import Principal, refusal
from ems.version import __version__

if TYPE_CHECKING:
    from ems.pool.node.listener import Listener
    from ems.pool.node.pool_node import Node
    from ems.pool.protocol.acts import Acts
    from ems.pool.tenants.request_filter import TenantRequestFilter

ACCEPTED_AT_ONCE = 32
"""Connections that are accepted before those are heard that came before: they may be about to greet."""
RETRY_SECONDS = 1.0
"""Pause after a connection could not be accepted."""
GRACE_SECONDS = 0.02
"""A killed process closes its sockets a moment before it is gone; look again after this long."""

_log = structlog.get_logger("ems.node")


class Clients:
    """Who is connected to ``node``."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self.connections: dict[int, Connection] = {}
        self.principals: dict[int, Principal] = {}
        """Whom the connections of a node with tenants belong to; empty on an open node."""
        self.limits = ClientLimits()
        self.next_client_id = 1
        self.refused = 0
        """Connections that were ended because of what their clients did."""
        self.listener: Listener | None = None

    def listen(self, listener: Listener) -> None:
        self.listener = listener
        self._node.loop.add_reader(listener.sock, self._accept)

    def close(self, *, stays: bool) -> None:
        """End all connections, and remove the socket unless the node ``stays`` as another release."""
        if self.listener is not None:
            self._node.loop.remove_reader(self.listener.sock)
            self.listener.close(stays=stays)
        for connection in list(self.connections.values()):
            connection.close(None)

    def _accept(self) -> None:
        assert self.listener is not None
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                sock, _ = self.listener.sock.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                _log.warning("cannot accept a connection", reason=error.strerror)
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    # Nothing frees a descriptor in this very moment: look again later instead of spinning.
                    self._node.loop.remove_reader(self.listener.sock)
                    self._node.loop.call_later(RETRY_SECONDS, self._listen_again)
                return
            self.take_in(sock)

    def take_in(self, sock: socket.socket) -> Connection:
        sock.setblocking(False)
        client_id = self.next_client_id
        self.next_client_id += 1
        connection = self.connections[client_id] = Connection(self._node, sock, client_id, self._node.clock())
        self._node.loop.add_reader(sock, connection.on_readable)
        gives_way = self.limits.came(client_id, connection.party, self.room())
        if gives_way is not None:
            seconds = f"{limits.GREETING_SECONDS:.0f} s"
            error = PoolRefused(f"too many connections have not greeted, say Hello at once and not within {seconds}")
            self.connections[gives_way].refuse(error)
        return connection

    def room(self) -> int:
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        threads = sum(level.config.readers + level.most_writers for level in self._node.tier_manager.states)
        return room_for_clients(descriptors, len(self._node.arena.sizes), threads)

    def keeps(self, client_id: int, size: int) -> None:
        """So many bytes are kept for the client ``client_id`` from now on; ends whoever has too many."""
        ends = self.limits.keeps(client_id, size)
        if ends is not None:
            said = (
                f"the clients of this node left {format_size(MAX_BUFFERED)} unfinished, under way or unread together, "
                f"{format_size(ends[1])} of it on this connection; send requests whole and fewer at once, read answers"
            )
            self.connections[ends[0]].refuse(PoolRefused(said))

    def _listen_again(self) -> None:
        if self.listener is not None and self.listener.sock.fileno() >= 0:
            self._node.loop.add_reader(self.listener.sock, self._accept)

    def forget(self, client_id: int, reason: str | None) -> None:
        connection = self.connections.pop(client_id)
        self.principals.pop(client_id, None)
        self.limits.gone(client_id)
        if reason is not None:
            self.refused += 1
            _log.warning("connection ended", client=connection.client, pid=connection.pid, reason=reason)
        self._node.rounds.turns.drop(connection)
        farewell = Farewell(connection.party, self._farewell(client_id))
        farewell.turn()
        if farewell.busy:
            self._node.rounds.add(farewell)

    def _farewell(self, client_id: int) -> Iterator[int]:
        """Take back what the client ``client_id`` held."""
        writer = self._node.core.writer(client_id)
        for work in self._node.core.leave(client_id, self._node.clock(), alive=self._node.may_write(writer)):
            self._node.answered()
            yield work
        if self._node.core.deferred.awaits(writer):
            self._node.loop.call_later(GRACE_SECONDS, self._node.look_whether_dead, writer)

    def welcome(self, client_id: int, principal: Principal, version: int, signature: bytes) -> messages.Welcome:
        """The answer to a good greeting.  Raises PoolRefused: there are too many connections."""
        party = self._party(client_id, principal)
        self.limits.greeted(client_id, party, self.room())
        self.connections[client_id].party = party
        self._node.core.writers[client_id] = self._node.writer_at(client_id)
        if not self._node.tenancy.gate.open:
            self.principals[client_id] = principal
        return messages.Welcome(
            version,
            self._node.node_id.hex(),
            __version__,
            self._node.config.autostarted,
            # A tenant has some of the segments only, and learns of them page by page.
            0 if principal.tenant else len(self._node.arena.sizes),
            self._node.config.verify,
            self._node.trusted_from,
            signature,
        )

    def _party(self, client_id: int, principal: Principal) -> str:
        connection = self.connections[client_id]
        if principal.tenant:
            return f"tenant {principal.tenant}"
        looks_after = principal.administers and connection.administers
        return "administrators" if looks_after else f"user {connection.uid}"

    def end_unwelcome(self) -> None:
        """End the connections of keys that were revoked or are over."""
        wall = self._node.wall()
        for client_id in [
            client_id
            for client_id, principal in self.principals.items()
            if not self._node.tenancy.gate.admits(principal, wall)
        ]:
            self.connections[client_id].refuse(refusal())

    def party(self, client_id: int) -> str:
        """Whose the client is: a tenant's, or on an open node a user's; nobody's when it has left."""
        connection = self.connections.get(client_id)
        return "" if connection is None else connection.party

    def request_filter(self, client_id: int, request: messages.Request) -> TenantRequestFilter | None:
        """As :meth:`Tenancy.request_filter`; None for anybody on an open node, too."""
        principal = self.principals.get(client_id)
        return None if principal is None else self._node.tenancy.request_filter(principal, request)

    @property
    def open(self) -> bool:
        return self._node.tenancy.gate.open

    @property
    def restarting(self) -> bool:
        return self._node.restart.waits

    def segment_size(self, segment: int) -> int:
        """The size of a segment whose file a client asks for.

        Raises ProtocolError: there is none.  StaleReference: it has no memory now.
        """
        sizes = self._node.arena.sizes
        if not 0 <= segment < len(sizes):
            raise ProtocolError(f"segment {segment} does not exist, expected 0 to {len(sizes) - 1}")
        if segment in self._node.memory.lost:
            raise StaleReference(f"segment {segment} has no memory, look again")
        return sizes[segment]

    def figures(self, *, own: bool) -> dict[str, Any]:
        """The figures of the node; with ``own`` those only that say what node it is."""
        return self._node.own_figures() if own else self._node.figures()

    def administer(self, client_id: int, act: Acts, *, dry_run: bool) -> dict[str, Any]:
        """Do ``act`` for the administrator ``client_id``; fails as :meth:`AdminRunner.do` does."""
        return self._node.admin.do(self.connections[client_id].peer, act, dry_run=dry_run)

    def who(self, client_id: int) -> dict[str, object]:
        """What is known of the owner of a lease: its process, what it calls itself, its tenant."""
        connection = self.connections.get(client_id)
        if connection is None:
            return {"client": "the tiers below memory" if client_id < 0 else "gone", "pid": os.getpid(), "tenant": ""}
        tenant = self.principals[client_id].tenant if client_id in self.principals else ""
        return {"client": connection.client, "pid": connection.pid, "tenant": tenant}
