"""How a client is let in: reaches a node, greets it, proves who it is where that is asked for.

What always holds: a client with an access key talks to no node but one that knows that key, or one that this user or
root runs.
"""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path

from ems.errors import EmsError, PoolTimeout, PoolUnavailable, ProtocolError, Unauthorised
from ems.pool.client.frames import receive_frame
from ems.pool.protocol import coding, framing, greeting, messages, refusals
from ems.pool.tenants import scram
from ems.pool.tenants.credentials import Credentials

_ROOT = 0
_FEATURES = [greeting.TELLS_REASONS, greeting.TELLS_TIERS, greeting.SERVES_TENANTS]
"""What this client understands of what nodes tell."""
_UCRED = struct.Struct("3i")


def peer_of(sock: socket.socket) -> tuple[int, int]:
    """Process and user that listen on the other side, as the kernel says; the process is 0 if it cannot be seen."""
    pid, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return pid, uid


class Introduction:
    """Who this client is, and the node on ``path`` that it wants to talk to."""

    def __init__(self, path: Path, name: str, credentials: Credentials, *, administers: bool) -> None:
        self.path = path
        self._name = name
        self._credentials = credentials
        self._features = [*_FEATURES, *([greeting.ADMINISTERS] if administers else [])]

    def reach(self, now: float, deadline: float) -> tuple[socket.socket, messages.Welcome, str]:
        """A socket to the node, its welcome, and the tenant that it is for; empty on an open node.

        Raises:
            PoolUnavailable: no node answers.
            PoolTimeout: it did not greet before ``deadline``.
            PoolRefused: it does not want this client, or is not to be trusted.
        """
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(max(deadline - now, 0.001))
            sock.connect(str(self.path))
            answer = self._introduce(sock, deadline)
        except TimeoutError as error:
            sock.close()
            raise PoolTimeout(f"the pool node on {self.path} did not greet in time") from error
        except EmsError:
            sock.close()
            raise
        except OSError as error:
            sock.close()
            raise PoolUnavailable(
                f"no pool node answers on {self.path} ({error.strerror or error}), start one with 'ems node' or name "
                "another socket"
            ) from error
        except BaseException:
            sock.close()
            raise
        return sock, answer, self._credentials.name if answer.signature else ""

    def _introduce(self, sock: socket.socket, deadline: float) -> messages.Welcome:
        """Greet, and prove who this client is where that is asked for; the node's welcome."""
        given = self._credentials
        nonce = os.urandom(greeting.NONCE_BYTES) if given.name else b""
        hello = messages.Hello(
            greeting.OLDEST_VERSION, greeting.NEWEST_VERSION, self._name, os.getpid(), self._features, given.name, nonce
        )
        sent = coding.body(hello)
        sock.sendall(framing.frame(sent))
        body = receive_frame(sock, deadline)
        answer = coding.decode_answer(body)
        if isinstance(answer, messages.Challenge):
            proof = scram.prove(given.access_key, answer.salt, answer.iterations, scram.transcript(sent, body))
            sock.sendall(coding.encode(messages.Prove(proof.proof)))
            answer = coding.decode_answer(receive_frame(sock, deadline))
            if isinstance(answer, messages.Welcome) and not scram.same(answer.signature, proof.signature):
                raise Unauthorised(f"the node on {self.path} does not know this access key, it may be an impostor")
        elif given.name and isinstance(answer, messages.Welcome):
            self._refuse_strangers(sock)
        if isinstance(answer, messages.Refused):
            refusals.raise_refusal(answer)
        if not isinstance(answer, messages.Welcome):
            raise ProtocolError(f"the node answered the greeting with {type(answer).__name__}")
        return answer

    def _refuse_strangers(self, sock: socket.socket) -> None:
        """A node that asks for no proof gives none: it is trusted only where this user, or root, runs it."""
        _, uid = peer_of(sock)
        if uid not in (os.geteuid(), _ROOT):
            raise Unauthorised(
                f"the node on {self.path} belongs to user {uid} and proves nothing, expected one that knows this "
                "access key or one of this user"
            )
