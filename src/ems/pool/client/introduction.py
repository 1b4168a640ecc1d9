"""How a client is let in: reaches a node, greets it, proves who it is where that is asked for.

What always holds: a client talks to no node but one that this user or root runs, or one that proves to know the
client's access key; of anybody else nothing is believed, mapped or asked.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path

from ems.errors import EmsError, PoolTimeout, PoolUnavailable, ProtocolError, Unauthorised
from ems.pool.client.retry import ConnectionEnded
from ems.pool.layout import INSTANCE_BYTES
from ems.pool.processes import foreign_owner, is_foreign, peer_of, stranger
from ems.pool.protocol import coding, limits, messages
from ems.pool.tenants import scram
from ems.pool.tenants.scram import Credentials

_READ_SIZE = 64 << 10
"""Bytes read at a time; a larger buffer costs a system call more to be made."""
_TIMEVAL = struct.Struct("@ll")


def receive_frames(sock: socket.socket, deadline: float) -> Iterator[bytes]:
    """The bodies of the frames that come, one by one; what came behind the last one that was taken is lost."""
    reader = coding.FrameReader()
    while True:
        sock.settimeout(max(deadline - time.monotonic(), 0.001))
        data = sock.recv(_READ_SIZE)
        if not data:
            raise ConnectionResetError("the node closed the connection")
        reader.feed(data)
        yield from reader.frames()


class Introduction:
    """Who this client is, and the node on ``path`` that it wants to talk to."""

    def __init__(self, path: Path, name: str, credentials: Credentials, *, administers: bool) -> None:
        self.path = path
        self._name = name
        self._credentials = credentials
        self._instance = os.urandom(INSTANCE_BYTES)
        self._administers = administers

    def reach(self, now: float, deadline: float) -> tuple[socket.socket, messages.Welcome, str]:
        """A socket to the node, its welcome, and the tenant that it is for; empty on an open node.

        Unauthorised also where the node is somebody else's and does not prove that it knows this client's key.
        """
        owner = foreign_owner(self.path)
        self._refuse(owner, may_prove=bool(self._credentials.name))
        with contextlib.ExitStack() as stack:
            sock = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            try:
                left = max(deadline - now, 0.001)
                # A connect with a time-out of Python's fails at once where many others wait to be accepted.
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEVAL.pack(int(left), int(left % 1 * 1e6)))
                sock.connect(str(self.path))
                sock.settimeout(left)
                listener = peer_of(sock)[1]
                owner = listener if is_foreign(listener) else owner
                self._refuse(owner, may_prove=bool(self._credentials.name))
                answer = self._introduce(sock, deadline, owner)
            except (TimeoutError, BlockingIOError) as error:
                raise PoolTimeout(f"the pool node on {self.path} did not greet in time") from error
            except EmsError:
                raise
            except OSError as error:
                kind = ConnectionEnded if isinstance(error, ConnectionResetError | BrokenPipeError) else PoolUnavailable
                raise kind(
                    f"no pool node answers on {self.path} ({error.strerror or error}), start one with 'ems node' or "
                    "name another socket"
                ) from error
            stack.pop_all()
        return sock, answer, self._credentials.name if answer.signature else ""

    def _introduce(self, sock: socket.socket, deadline: float, owner: int | None) -> messages.Welcome:
        """Greet a node, of the user ``owner`` if that is somebody else, and prove who this client is if asked to."""
        given = self._credentials
        nonce = os.urandom(limits.NONCE_BYTES) if given.name else b""
        versions = (coding.OLDEST_VERSION, coding.NEWEST_VERSION)
        hello = messages.Hello(*versions, self._name, os.getpid(), self._administers, given.name, nonce, self._instance)
        sent = coding.body(hello)
        sock.sendall(coding.frame(sent))
        body = next(receive_frames(sock, deadline))
        answer = coding.decode_answer(body)
        if isinstance(answer, messages.Challenge):
            self._refuse_a_go_between(sock, answer)
            proof = scram.prove(given.access_key, answer.salt, answer.iterations, scram.transcript(sent, body))
            sock.sendall(coding.encode(messages.Prove(proof.proof)))
            answer = coding.decode_answer(next(receive_frames(sock, deadline)))
            if isinstance(answer, messages.Welcome) and not hmac.compare_digest(answer.signature, proof.signature):
                raise Unauthorised(f"the node on {self.path} does not know this access key, it may be an impostor")
        elif isinstance(answer, messages.Welcome):
            self._refuse(owner, may_prove=False)
        if isinstance(answer, messages.Refused):
            coding.raise_refusal(answer)
        if not isinstance(answer, messages.Welcome):
            raise ProtocolError(f"the node answered the greeting with {type(answer).__name__}")
        return answer

    def _refuse(self, owner: int | None, *, may_prove: bool) -> None:
        if owner is not None and not may_prove:
            raise stranger(self.path, owner)

    def _refuse_a_go_between(self, sock: socket.socket, challenge: messages.Challenge) -> None:
        """A stranger may pass on what the node says, and would be let in by the proof.

        He cannot put in his own user: the proof is of the challenge as it came, which is not the node's then.
        """
        listener = peer_of(sock)[1]
        if is_foreign(listener) and listener != challenge.user:
            raise Unauthorised(
                f"user {listener} listens on {self.path}, but the node runs as user {challenge.user}: it may be an "
                "impostor"
            )
