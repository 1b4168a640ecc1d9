"""What a worker hears from the others and tells them, over its end of a socket that its parent has the other end of.

What always holds: what changed is told within :data:`TELL_SECONDS`, and all of it each second; a question has an end; a
worker whose parent is gone stops as if it had been told to.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import zlib
from collections.abc import Callable
from typing import Final

from ems.http.address import Address
from ems.router.fleet import Role
from ems.router.workers import messages
from ems.router.workers.messages import Answer, Ask, Change, Message, State
from ems.router.workers.parent import Post
from ems.router.workers.shares import Shares

TELL_SECONDS: Final = 0.01
"""Seconds in which changes are gathered; an engine's step takes longer."""

ASK_SECONDS: Final = 2.0
"""Seconds for the others to answer."""

log = logging.getLogger("ems.router")


class Link:
    """One for a worker."""

    def __init__(self, post: Post, session_lifetime: float, stop: Callable[[], None]) -> None:
        self.shares = Shares(session_lifetime, self._wake)
        self.answers: dict[str, Callable[[str], bytes]] = {}
        """What answers the others' questions."""
        self.change: Callable[..., str]
        """What changes this worker's fleet, and says what that did."""
        self.number = post.number
        self._socket = post.socket
        self._changes = post.changes
        self._stop = stop
        self._loop = asyncio.get_running_loop()
        self._telling: asyncio.TimerHandle | None = None
        self._asked = secrets.randbits(32)
        """Answers to one that had this number before are for none of its questions."""
        self._waiting: dict[int, tuple[set[int], dict[int, bytes], asyncio.Event]] = {}
        """By question: who has not answered yet, the answers, and whether there is nobody left to wait for."""
        self._buffer = memoryview(bytearray(messages.LARGEST))

    def open(self) -> None:
        """Hear the others, from the changes on that were before."""
        for change in self._changes.values():
            self.change(change.role, change.addresses, listed=change.listed, level=logging.DEBUG)
        self._loop.add_reader(self._socket, self._receive)
        self._tell_all()

    def serves(self, words: str) -> None:
        """Say that this worker takes requests; ``words`` are for whoever started the router."""
        self._send(messages.PARENT, words)

    async def ask(self, what: str, argument: str = "") -> list[bytes]:
        """Return what the others answer."""
        self._asked += 1
        answers = await self._answers(messages.OTHERS, set(self.shares.others), Ask(self._asked, what, argument))
        return [zlib.decompress(one) for one in answers.values()]

    async def change_all(self, role: Role, addresses: list[Address], *, listed: bool) -> tuple[str, list[int]]:
        """Change the fleets of all workers; return what that did here, and who may not have done it yet."""
        self._asked += 1
        all_of_them = {self.number, *self.shares.others}
        change = Change(self._asked, role, addresses, listed)
        answers = await self._answers(messages.EVERYONE, all_of_them, change)
        return answers.get(self.number, b"").decode(), sorted(all_of_them - answers.keys())

    async def _answers(self, end: int, whom: set[int], question: Ask | Change) -> dict[int, bytes]:
        answers: dict[int, bytes] = {}
        waiting = self._waiting[question.number] = whom, answers, asyncio.Event()
        self._send(end, question)
        try:
            if whom:
                async with asyncio.timeout(ASK_SECONDS):
                    await waiting[2].wait()
        except TimeoutError:
            pass
        finally:
            del self._waiting[question.number]
        return answers

    def _receive(self) -> None:
        try:
            while size := self._socket.recv_into(self._buffer):
                self._take(self._buffer[0], self._buffer[1:size])
        except BlockingIOError:
            return
        except ConnectionError:
            pass
        self._loop.remove_reader(self._socket)
        self._stop()

    def _take(self, sender: int, body: memoryview) -> None:
        if not body:
            self.shares.forget(sender)
            for number in list(self._waiting):
                self._answered(number, sender)
            return
        message = messages.decode(body)
        if isinstance(message, State):
            if self.shares.take(sender, message, self._loop.time()):
                self._tell(full=True)
        elif isinstance(message, Answer):
            self._answered(message.number, sender, message.body)
        elif isinstance(message, Ask):
            page = self.answers[message.what](message.argument)
            self._send(sender, Answer(message.number, zlib.compress(page, 1)))
        else:
            done = self.change(message.role, message.addresses, listed=message.listed)
            self._send(sender, Answer(message.number, done.encode()))

    def _answered(self, number: int, sender: int, body: bytes | None = None) -> None:
        if number not in self._waiting:
            return
        whom, answers, done = self._waiting[number]
        whom.discard(sender)
        if body is not None:
            answers[sender] = body
        if not whom:
            done.set()

    def _wake(self) -> None:
        if self._telling is None:
            self._telling = self._loop.call_later(TELL_SECONDS, self._tell_changes)

    def _tell_changes(self) -> None:
        self._telling = None
        self._tell()
        if self.shares.fleet.changed:
            self._wake()

    def _tell_all(self) -> None:
        self._tell(full=True)
        self._loop.call_later(1.0, self._tell_all)

    def _tell(self, *, full: bool = False) -> None:
        state = self.shares.state(full=full)
        while state is not None:
            self._send(messages.OTHERS, state)
            state = self.shares.state()

    def _send(self, end: int, message: Message | str) -> None:
        body = message.encode() if isinstance(message, str) else messages.encode(message)
        if len(body) >= messages.LARGEST:
            log.warning("What is to be told other workers is lost: %d bytes, at most %d", len(body), messages.LARGEST)
            return
        with contextlib.suppress(OSError):  # the parent is behind or gone; what counts is told again
            self._socket.send(bytes((end,)) + body)
