"""One completion request on the hot path: carries bytes between a client and the instances that dispatch names.

Decides nothing itself: :class:`~ems.router.dispatch.Dispatch` is told what happened and says what is next.  What always
holds: pieces go out as they come in, none is held back or joined; the head of an answer waits for its first piece, so
that up to there another instance can still take over; when the task ends, for whatever reason, the connections to the
instances are closed and the loads released.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from msgspec import Raw

from ems.router import headers
from ems.router.config import RouterConfig
from ems.router.dispatch import Dispatch, GiveUp, PassOn, Step, Try
from ems.router.fleet import Fleet, Instance, Role
from ems.router.metrics import Counters
from ems.router.prober import Prober
from ems.router.reply import Receive, Refusal, Reply, Scope, error_events
from ems.router.request import CompletionRequest, decode_body, handoff_of, parse, prefill_body
from ems.router.upstream import Answer, Upstream, UpstreamBroken

_ANSWER_LIMIT = 64 << 20  # of a prefill, whose one token may come with the prompt's log-probabilities

log = logging.getLogger("ems.router")


@dataclass(frozen=True, slots=True)
class Parts:
    """What all exchanges and pages of a router share."""

    config: RouterConfig
    fleet: Fleet
    counters: Counters
    upstream: Upstream
    prober: Prober


class ClientLeft(Exception):
    """The client closed its connection before its request was complete; nobody is there to be told."""


async def receive_body(scope: Scope, receive: Receive, *, limit: int, timeout: float) -> bytes:
    """Return a request's whole body.

    :raises Refusal: larger than ``limit`` bytes (413), not complete after ``timeout`` seconds (408).
    :raises ClientLeft: the client is gone.
    """
    length = headers.find(scope["headers"], b"content-length")
    if length is not None and int(length) > limit:
        raise _too_large(limit)
    pieces = []
    size = 0
    try:
        async with asyncio.timeout(timeout):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientLeft
                pieces.append(message.get("body", b""))
                size += len(pieces[-1])
                if size > limit:
                    raise _too_large(limit)
                if not message.get("more_body", False):
                    return pieces[0] if len(pieces) == 1 else b"".join(pieces)
    except TimeoutError:
        raise Refusal(408, "The request body did not arrive in time", code="body_timeout") from None


def _too_large(limit: int) -> Refusal:
    return Refusal(413, f"The request body is larger than {limit} bytes", code="body_too_large")


class Exchange:
    """The course of one completion request, from its head to the last byte of its answer."""

    def __init__(self, parts: Parts, scope: Scope, receive: Receive, reply: Reply) -> None:
        self._parts = parts
        self._scope = scope
        self._receive = receive
        self._reply = reply
        query = scope["query_string"]
        self._target = scope["path"] + ("?" + query.decode("latin-1") if query else "")
        self._loop = asyncio.get_running_loop()
        self._prefill_until = 0.0
        self._request: CompletionRequest
        self._dispatch: Dispatch
        self._idle = asyncio.timeout(None)
        """Ends the request when nothing moved for too long, which a timer looks at from the first try to decode on."""
        self._timer: asyncio.TimerHandle | None = None
        self._moved = 0.0
        self._client_left = False
        self._handoff: Raw | None = None
        self._stream_end: bytes | None = None
        """The last piece of an event stream that has begun and can take an error event; None in other answers."""

    async def run(self) -> None:
        """Serve the request.

        :raises Refusal: the router has to answer it, and nothing was sent.
        :raises ClientLeft: nobody waits for the answer.
        """
        config, fleet, counters = self._parts.config, self._parts.fleet, self._parts.counters
        body = await receive_body(self._scope, self._receive, limit=config.max_body_bytes, timeout=config.body_timeout)
        self._request = parse(body)
        self._dispatch = Dispatch(
            fleet, counters, self._request, max_retries=config.max_retries, retry_delay=config.retry_delay
        )
        task = asyncio.current_task()
        assert task is not None
        listener = self._loop.create_task(self._listen(task))
        try:
            async with self._idle:
                now = self._loop.time()
                self._prefill_until = now + config.prefill_timeout
                step: Step | None = self._dispatch.start(now)
                try:
                    while step is not None:
                        step = await self._take(step)
                finally:
                    if self._timer is not None:
                        self._timer.cancel()
        except TimeoutError:
            listener.cancel()  # nobody is to end what is said now
            await self._fell_silent()
        except asyncio.CancelledError:
            if not self._client_left:  # by the server, whose time for draining is over
                await self._shut_down()
                raise
            task.uncancel()
            raise ClientLeft from None
        finally:
            listener.cancel()
            self._dispatch.close()

    async def _listen(self, task: asyncio.Task[object]) -> None:
        """Cancel ``task`` when the client leaves; the request's body has been received before."""
        while (await self._receive())["type"] != "http.disconnect":
            pass  # what comes after the body, if anything, means nothing
        self._client_left = True
        task.cancel()

    def _look(self) -> None:
        """The timer is not set anew for each piece of a stream, which only leaves a time stamp."""
        due = self._moved + self._parts.config.idle_timeout
        if due <= self._loop.time():
            self._idle.reschedule(due)
        else:
            self._timer = self._loop.call_at(due, self._look)

    async def _take(self, step: Step) -> Step | None:
        if isinstance(step, Try):
            if step.delay:
                await asyncio.sleep(step.delay)
            return await (self._prefill if step.instance.role is Role.PREFILL else self._decode)(step.instance)
        assert isinstance(step, GiveUp)
        later = {"retry-after": str(step.retry_after)}
        raise Refusal(503, "No decode server is available; try again later", code="no_decode_server", headers=later)

    async def _prefill(self, instance: Instance) -> Step | None:
        dispatch = self._dispatch
        try:
            async with asyncio.timeout_at(self._prefill_until):
                fields, body = self._fields(to_prefill=True), prefill_body(self._request)
                answer = await self._parts.upstream.page(
                    "POST", instance.address, self._target, fields, body, limit=_ANSWER_LIMIT
                )
            if 200 <= answer.status < 300:
                self._handoff = handoff_of(answer.body)
        except TimeoutError:
            self._failed(instance, "the time for prefill is over")
            return dispatch.prefill_timed_out(self._loop.time())
        except (UpstreamBroken, ValueError) as error:
            self._failed(instance, str(error))
            return dispatch.prefill_broke(self._loop.time())
        step = dispatch.prefill_answered(answer.status, self._loop.time())
        if isinstance(step, PassOn):
            returned = headers.returned(answer.headers, self._reply.request_id).headers
            kept = [pair for pair in returned if pair[0].lower() != b"content-length"]
            await self._reply.head(answer.status, [*kept, (b"content-length", b"%d" % len(answer.body))])
            await self._reply.piece(answer.body, more=False)
            return None
        if not 200 <= answer.status < 300:
            self._failed(instance, f"it answers {answer.status}")
        return step

    async def _decode(self, instance: Instance) -> Step | None:
        self._moved = self._loop.time()
        if self._timer is None:
            self._look()
        try:
            fields, body = self._fields(to_prefill=False), decode_body(self._request, self._handoff)
            answer = await self._parts.upstream.send("POST", instance.address, self._target, fields, body)
            try:
                piece = await answer.read()
            except BaseException:
                answer.close()
                raise
        except UpstreamBroken as error:
            self._failed(instance, str(error))
            return self._dispatch.decode_broke(self._loop.time())
        try:
            self._dispatch.decode_started(answer.status, self._loop.time())
            if answer.status >= 500:
                self._failed(instance, f"it answers {answer.status}")
            await self._relay(instance, answer, piece)
        finally:
            answer.close()
        return None

    async def _relay(self, instance: Instance, answer: Answer, piece: bytes) -> None:
        head = headers.returned(answer.headers, self._reply.request_id)
        takes_events = head.is_event_stream and not head.is_encoded
        await self._reply.head(answer.status, head.headers)
        while not answer.ended and piece:
            await self._reply.piece(piece, more=True)
            if takes_events:
                self._stream_end = piece
            self._moved = self._loop.time()
            try:
                piece = await answer.read()
            except UpstreamBroken as error:
                self._failed(instance, f"it broke off amid an answer: {error}")
                self._dispatch.decode_cut(self._loop.time())
                await self._break_off("The decode server broke off; send the request again", "upstream_broken")
                return
        await self._reply.piece(piece, more=False)

    async def _break_off(self, message: str, code: str) -> None:
        """End an answer that has begun and cannot be completed: by an event, or by leaving it visibly incomplete."""
        self._parts.counters.breaks += 1
        if self._stream_end is not None:
            await self._reply.piece(error_events(message, code=code, after=self._stream_end), more=False)

    async def _fell_silent(self) -> None:
        if self._reply.sending:  # amid sending it is the client that takes nothing
            raise ClientLeft
        self._dispatch.decode_cut(self._loop.time())
        log.warning("Request %s: no byte from the decode instance in time", self._reply.request_id.decode("latin-1"))
        if self._reply.status is None:
            raise Refusal(504, "The decode server did not answer in time", code="decode_timeout")
        await self._break_off("The decode server fell silent; send the request again", "decode_timeout")

    async def _shut_down(self) -> None:
        """Tell the client that the router ends, if it takes anything at all."""
        if self._reply.sending:
            return
        message = "The router shuts down; send the request again"
        if self._reply.status is None:
            await self._reply.refuse(Refusal(503, message, code="shutting_down", headers={"retry-after": "1"}))
        else:
            await self._break_off(message, "shutting_down")

    def _fields(self, *, to_prefill: bool) -> headers.Fields:
        return headers.sent(self._scope["headers"], self._reply.request_id, to_prefill=to_prefill)

    def _failed(self, instance: Instance, reason: str) -> None:
        request = self._reply.request_id.decode("latin-1")
        log.warning("Request %s failed on the %s instance %s: %s", request, instance.role, instance.address, reason)
        self._parts.prober.wake()
