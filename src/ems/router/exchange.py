"""One completion request on the hot path: carries bytes between a client and the instances that dispatch names.

Decides nothing itself: :class:`~ems.router.dispatch.Dispatch` is told what happened and says what is next.  What always
holds: when the task ends, for whatever reason, the connections to the instances are closed and the loads released.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from collections.abc import Awaitable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from ems.engines.handoff import ROOM_BITS, Bootstrap, HandoffKind, params_of
from ems.engines.recompute import CannotContinue, Generated
from ems.engines.tokenize import token_ids_of, tokenize_body
from ems.http import headers
from ems.http.client import Page, Upstream, UpstreamBroken, UpstreamLate, request_of
from ems.http.message import Refusal, Request, find
from ems.http.reply import Reply
from ems.pool.http.prefetch_hints import LEAST_TOKENS
from ems.router.admission.gate import Asked, Ticket
from ems.router.admission.limits import Limited
from ems.router.admission.service import Admission
from ems.router.choosing.chooser import Chooser
from ems.router.choosing.prompt import Prompt
from ems.router.choosing.tokenizers import Tokenizers
from ems.router.config import RouterConfig
from ems.router.dispatch import Dispatch, PassOn, Policy, Step, Try
from ems.router.fleet import Fleet, Instance, Role
from ems.router.handoff import decode_body, prefill_body
from ems.router.kthena.router_file import Schedulers
from ems.router.metrics import Counters, Tokenized
from ems.router.observe.observer import Observer
from ems.router.observe.record import UNRESOLVED, Hop, Record, Tokenization
from ems.router.prober import Prober
from ems.router.relay import Relay
from ems.router.request import CompletionRequest

if TYPE_CHECKING:
    from ems.pool.http.prefetch_client import PrefetchClient

_TRACE: Final = frozenset((b"traceparent", b"tracestate"))

CONTINUED: Final = frozenset(("/v1/completions", "/v1/chat/completions"))
"""Endpoints whose answers another engine can go on with."""

READS_ONLY: Final = frozenset(("/v1/embeddings", "/tokenize"))
"""Endpoints that generate no tokens."""

TOKENS_LIMIT: Final = 4 << 20
"""Bytes of an answer with token ids: half a million of them."""

ANSWER_LIMIT: Final = 64 << 20
"""Bytes of a prefill's answer, which may have the log-probabilities of its prompt."""

SESSION_BYTES: Final = 256
"""Of a session's name; what comes behind does not tell sessions apart."""

log = logging.getLogger("ems.router")


@dataclass(frozen=True, slots=True)
class Parts:
    """What all exchanges and pages of a router share."""

    config: RouterConfig
    fleet: Fleet
    chooser: Chooser
    counters: Counters
    upstream: Upstream
    prober: Prober
    admission: Admission
    observer: Observer
    schedulers: Schedulers
    server: str = ""
    """The model server whose instances serve the request; empty where there are none."""
    route: str = ""
    """The route by which the request came to it."""
    handoff: HandoffKind = HandoffKind.NIXL
    limited: tuple[Limited, ...] = ()
    """Limits of the route."""
    tokenizers: Tokenizers = field(default_factory=Tokenizers)
    prefetch: PrefetchClient | None = None
    """PrefetchHints pool nodes of prompts, if there are any."""


class ClientLeft(Exception):
    """The client closed its connection before its answer was complete; nobody is there to be told."""


class Exchange:
    """The course of one completion request, from its parsed body to the last byte of its answer."""

    def __init__(
        self, parts: Parts, request: Request, completion: CompletionRequest, reply: Reply, record: Record
    ) -> None:
        self._parts = parts
        self._record = record
        self._forwarding = parts.admission.forwarding
        self._ticket: Ticket | None = None
        self._client = request
        self._reply = reply
        self._loop = asyncio.get_running_loop()
        self._prefill_until = 0.0
        self._deadline = math.inf
        self._asked = self._request = completion
        session = find(request.headers, parts.config.session_header) or b""
        self._session = session[:SESSION_BYTES]
        self._dispatch: Dispatch
        self._relay: Relay | None = None
        self._generated: Generated | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._bootstrap: Bootstrap | None = None
        self._tokens: Sequence[int] = ()
        """Of the prompt, where pools are told of it."""

    async def run(self) -> None:
        """Serve the request.

        :raises Refusal: the router has to answer it, and nothing was sent.
        :raises ClientLeft: nobody waits for the answer.
        """
        try:
            self._ticket = await self._enter()
            await self._serve()
        except Refusal as refusal:
            if self._reply.status is None:
                raise
            assert self._relay is not None  # what began and could not be gone on with
            self._break_off(self._relay, refusal.message, refusal.code)
        except asyncio.CancelledError:
            if self._reply.client_left:
                task = asyncio.current_task()
                assert task is not None
                task.uncancel()
                raise ClientLeft from None
            self._shut_down()  # by the server, whose time for draining is over
        finally:
            if self._ticket is not None:
                self._leave(self._ticket)
            self._relay = None  # it knows this exchange: let go of both without the garbage collector

    async def _enter(self) -> Ticket:
        record, request, gate = self._record, self._request, self._parts.admission.gate
        record.upstream_model = request.model
        record.backend_type = UNRESOLVED
        record.server = record.backend = self._parts.server
        record.route = self._parts.route
        if self._parts.observer.spans is not None:
            added = self._parts.observer.spans.start(record, self._client.headers)
            lines = self._forwarding.added + b"".join(b"%b: %b\r\n" % pair for pair in added)
            self._forwarding = headers.Forwarding(self._forwarding.withheld | _TRACE, lines)
        began = self._loop.time()
        try:
            ticket = await gate.enter(
                record.principal,
                Asked(
                    record.model,
                    request.prompt_tokens,
                    request.output_tokens,
                    request.priority,
                    self._session.decode("latin-1"),
                    self._parts.limited,
                ),
            )
        finally:
            record.queued = self._loop.time() - began
        record.queued = ticket.queued
        record.entered = self._loop.time()
        return ticket

    def _prompt(self) -> Prompt:
        chooser = self._parts.chooser
        return self._request.prompt(self._session, chooser.block_tokens, chooser.adapters)

    def _leave(self, ticket: Ticket) -> None:
        """Give back the place; what a client got of an answer counts, though it left before the end."""
        relay = self._relay
        if relay is None or (self._reply.status or 500) >= 400:
            ticket.failed()
        else:
            self._record.output_tokens = relay.meter.tokens()
            ticket.done(self._record.output_tokens)

    async def _serve(self) -> None:
        config = self._parts.config
        if config.request_timeout is not None:
            self._deadline = self._loop.time() + config.request_timeout
        if config.tokenize_within:
            await self._tokenize()
        if self._parts.prefetch is not None and self._client.path not in READS_ONLY:
            self._tokens = self._request.token_ids()
        self._dispatch = Dispatch(
            self._parts.fleet,
            self._parts.chooser,
            self._parts.counters,
            self._request,
            self._prompt(),
            Policy(
                config.max_retries,
                config.retry_delay,
                config.prefill_above,
                self._parts.server,
                self._client.path not in READS_ONLY,
                self._parts.schedulers.of(self._record.model),
                self._parts.handoff is HandoffKind.SGLANG and self._client.path not in READS_ONLY,
                bool(self._tokens),
            ),
        )
        try:
            now = self._loop.time()
            self._prefill_until = min(now + config.prefill_timeout, self._deadline)
            step: Step | None = self._dispatch.start(now)
            while step is not None:
                step = await self._take(step)
        finally:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            self._dispatch.close()

    async def _tokenize(self) -> None:
        """Have an engine say the token ids of a prompt of text; without them it is known by what was sent where.

        :raises Refusal: the time for the request is over.
        """
        parts, request, began = self._parts, self._request, self._loop.time()
        usable = [one for role in Role for one in parts.fleet.usable(role, parts.server)]
        told = parts.prefetch is not None and request.prompt_tokens >= LEAST_TOKENS
        if not told and not parts.chooser.would_match(usable, request.prompt_tokens):
            return
        body = tokenize_body(self._client.path, request.fields)
        instance = None if body is None else parts.tokenizers.begin(usable, len(body), began)
        if instance is None or body is None:
            return
        within = min(parts.config.tokenize_within, self._deadline - began)
        fields = self._fields(to_prefill=True)
        outcome: Tokenized | None = None
        reason: object = "its answer has no token ids"
        try:
            async with asyncio.timeout(within):
                answer = await parts.upstream.page(
                    "POST", instance.address, b"/tokenize", fields, body, limit=TOKENS_LIMIT
                )
            outcome = Tokenized.FAILED
            with suppress(ValueError):
                request.tokenized(token_ids_of(answer.body))
                outcome = Tokenized.DONE
        except TimeoutError:
            if within < parts.config.tokenize_within:
                raise _too_late() from None
            outcome, reason = Tokenized.LATE, f"not within {within:g} s"
        except UpstreamBroken as error:
            outcome, reason = Tokenized.BROKEN, error
        finally:
            now = self._loop.time()
            rests = outcome in (Tokenized.LATE, Tokenized.BROKEN)
            parts.tokenizers.end(instance, len(body), now, rests=rests)
        parts.counters.tokenized[outcome] += 1
        parts.counters.tokenize_time.observe(now - began)
        self._record.tokenization = Tokenization(instance, outcome, now - began)
        self._record.input_tokens = request.prompt_tokens
        if outcome is not Tokenized.DONE:
            log.debug(
                "Request %s: %s does not say the token ids: %s", self._record.request_id, instance.address, reason
            )

    async def _take(self, step: Step) -> Step | None:
        if isinstance(step, Try) and step.delay:
            await asyncio.sleep(min(step.delay, max(self._deadline - self._loop.time(), 0.0)))
        now = self._loop.time()
        if now >= self._deadline:
            raise _too_late()
        if isinstance(step, Try):
            hop, beside = Hop(step.instance, step.considered, now, self._tell(step)), step.prefill
            if beside is not None:
                prefill = Hop(beside.instance, beside.considered, now, self._tell(beside))
                self._record.hops += (prefill, hop)
                return await self._both(prefill, hop)
            self._record.hops.append(hop)
            if step.instance.role is Role.PREFILL:
                return await self._prefill(hop, self._ask(step.instance))
            return await self._decode(step.instance)
        if isinstance(step, PassOn):  # of a request to go on with an answer
            raise Refusal(503, "The answer cannot be continued; send the request again", code="recomputed")
        message, later = f"No {step.role} server is available; try again later", {"retry-after": str(step.retry_after)}
        raise Refusal(503, message, code=f"no_{step.role}_server", headers=later)

    def _tell(self, step: Try) -> Sequence[Instance]:
        """Have pools fetch the prompt; return of which hosts."""
        prefetch, model = self._parts.prefetch, self._request.model
        return [one for one in step.ahead if prefetch is not None and prefetch.hint(one.address, model, self._tokens)]

    async def _both(self, prefill: Hop, decode: Hop) -> Step | None:
        """Ask engines that meet by themselves; what fails first, before the answer begins, ends the attempt of both.

        :raises Refusal: the prefill failed, and a part of the answer is with the client.
        """
        address = prefill.instance.address
        self._bootstrap = Bootstrap(address.host, prefill.instance.bootstrap_port, secrets.randbits(ROOM_BITS))
        asking = asyncio.create_task(self._ask(prefill.instance))
        decoding = asyncio.create_task(self._decode(decode.instance))
        try:
            await asyncio.wait((asking, decoding), return_when=asyncio.FIRST_COMPLETED)
            relay = self._relay
            if decoding.done() or self._reply.ended or relay is None:
                return await decoding
            step = await self._prefill(prefill, asking)
            if step is not None and relay.begun:
                message = "The prefill server failed amid the answer; send the request again"
                raise Refusal(502, message, code="upstream_broken")
            if step is not None or self._reply.ended:
                return step
            return await decoding
        finally:
            if not decoding.done() and self._relay is not None and self._relay.source is not None:
                self._relay.source.abort()  # from here on nothing of it reaches the client
            asking.cancel()
            decoding.cancel()
            await asyncio.gather(asking, decoding, return_exceptions=True)

    def _ask(self, instance: Instance) -> Coroutine[Any, Any, Page]:
        return self._parts.upstream.page(
            "POST",
            instance.address,
            self._client.target,
            self._fields(to_prefill=True),
            prefill_body(self._request, self._parts.handoff, self._bootstrap),
            limit=ANSWER_LIMIT,
            within=self._prefill_until - self._loop.time(),
        )

    async def _prefill(self, hop: Hop, answering: Awaitable[Page]) -> Step | None:
        dispatch, instance = self._dispatch, hop.instance
        try:
            answer = await answering
            passes = 200 <= answer.status < 300 and self._parts.handoff.passes_params
            params = params_of(answer.body) if passes else None
        except UpstreamLate:
            if self._prefill_until >= self._deadline:  # timers may be a fraction of a millisecond early
                raise _too_late() from None
            self._failed(instance, "the time for prefill is over")
            return dispatch.prefill_timed_out(self._loop.time())
        except (UpstreamBroken, ValueError) as error:
            self._failed(instance, str(error))
            return dispatch.prefill_broke(self._loop.time())
        step = dispatch.prefill_answered(answer.status, self._loop.time(), params)
        hop.answered(answer.status, self._loop.time())
        if isinstance(step, PassOn) and self._reply.status is None:
            returned = headers.returned(answer.headers, self._reply.request_id).headers
            kept = [pair for pair in returned if pair[0].lower() != b"content-length"]
            self._reply.head(answer.status, [*kept, (b"content-length", b"%d" % len(answer.body))], sized=True)
            self._reply.piece(answer.body)
            self._reply.end()
            return None
        if not 200 <= answer.status < 300:
            self._failed(instance, f"it answers {answer.status}")
        return step

    async def _decode(self, instance: Instance) -> Step | None:
        if self._dispatch.params is not None and self._generated is None and self._client.path in CONTINUED:
            self._generated = Generated(chat=self._client.path.endswith("/chat/completions"))
        previous = self._relay
        relay = self._relay = Relay(self._reply, self._dispatch.refuses, self._begins, self._loop, self._generated)
        if previous is not None:
            relay.meter = previous.meter
        if self._generated is not None:
            self._generated.begin()
        if self._timer is None:
            self._look()
        fields = self._fields(to_prefill=False)
        body = decode_body(self._request, self._dispatch.handoff, self._bootstrap)
        request = request_of("POST", instance.address, self._client.target, fields, body)
        try:
            await self._parts.upstream.send(instance.address, request, relay)
        except TimeoutError:
            if not relay.recomputes:
                self._fell_silent(relay)
        except UpstreamBroken as error:
            if relay.recomputes:
                return self._go_on(relay)
            now = self._loop.time()
            if not relay.begun:
                self._failed(instance, str(error))
                return self._dispatch.decode_broke(now, answers=relay.refused, worked=relay.may_have_worked)
            self._failed(instance, f"it broke off amid an answer: {error}")
            self._dispatch.decode_cut(now)
            self._break_off(relay, "The decode server broke off; send the request again", "upstream_broken")
        finally:  # the connection may serve others from here on
            relay.source = None
            self._reply.comes_from(None)
        return self._go_on(relay) if relay.recomputes else None

    def _begins(self, status: int) -> None:
        now = self._loop.time()
        hop = self._record.hops[-1]
        hop.answered(status, now)
        if self._reply.status is None:
            self._record.first_byte = now
        self._dispatch.decode_started(status, now)
        if status >= 500:
            self._failed(hop.instance, f"it answers {status}")

    def _go_on(self, relay: Relay) -> Step:
        """Have an answer that an instance gave up continued by others.

        :raises Refusal: it cannot be.
        """
        generated = relay.generated
        assert generated is not None
        try:
            fields = generated.next_fields(self._asked.fields)
        except CannotContinue as error:
            message = f"The decode server gave the answer up, and it cannot be continued: {error}"
            raise Refusal(503, message, code="recomputed", headers={"retry-after": "1"}) from None
        self._request = CompletionRequest.of(fields)
        now = self._loop.time()
        self._prefill_until = min(now + self._parts.config.prefill_timeout, self._deadline)
        return self._dispatch.recompute(self._request, self._prompt(), now)

    def _look(self) -> None:
        """End what has not moved for too long; the timer is not set anew for each piece, which leaves a time stamp."""
        relay = self._relay
        assert relay is not None
        now = self._loop.time()
        idle = self._parts.config.idle_timeout
        due = min(relay.moved + idle, self._deadline)
        if due <= now and relay.source is not None:
            relay.source.fail(TimeoutError())
        else:
            self._timer = self._loop.call_at(due if due > now else now + min(idle, 1.0), self._look)

    def _fell_silent(self, relay: Relay) -> None:
        if self._reply.blocked:  # it is the client that takes nothing
            raise ClientLeft
        if self._loop.time() >= self._deadline:
            if not relay.begun:
                raise _too_late()
            self._parts.counters.breaks += 1
            relay.break_off("The time for this request is over", "request_timeout")
            return
        self._dispatch.decode_cut(self._loop.time())
        log.warning("Request %s: no byte from the decode instance in time", self._reply.request_id.decode("latin-1"))
        if not relay.begun:
            raise Refusal(504, "The decode server did not answer in time", code="decode_timeout")
        self._break_off(relay, "The decode server fell silent; send the request again", "decode_timeout")

    def _break_off(self, relay: Relay, message: str, code: str) -> None:
        self._parts.counters.breaks += 1
        self._record.fails("proxy" if code == "upstream_broken" else code, message)
        self._record.broken = True
        relay.break_off(message, code)

    def _shut_down(self) -> None:
        """Tell the client that the router ends."""
        message = "The router shuts down; send the request again"
        if self._reply.status is None:
            raise Refusal(503, message, code="shutting_down", headers={"retry-after": "1"})
        if self._relay is not None:
            self._break_off(self._relay, message, "shutting_down")

    def _fields(self, *, to_prefill: bool) -> bytes:
        fields, request_id = self._client.headers, self._reply.request_id
        return headers.sent(fields, request_id, read_here=to_prefill, forwarding=self._forwarding)

    def _failed(self, instance: Instance, reason: str) -> None:
        request = self._reply.request_id.decode("latin-1")
        log.warning("Request %s failed on the %s instance %s: %s", request, instance.role, instance.address, reason)
        self._parts.prober.wake()


def _too_late() -> Refusal:
    return Refusal(504, "The time for this request is over", code="request_timeout")
