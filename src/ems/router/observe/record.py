"""The facts of one completion request, written down as they happen.  Times are seconds on the event loop's clock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ems.router.admission.keys import ANYBODY
from ems.router.choosing.chooser import Score
from ems.router.fleet import Instance, Role

NEVER: Final = 0.0

NO_BACKEND: Final = "none"
MODEL_SERVER: Final = "model_server"
UNRESOLVED: Final = "unresolved"

DONE: Final = "successful_request"
FAILED: Final = "request_failed"


class Hop:
    """One attempt at one instance."""

    __slots__ = ("answered_at", "considered", "instance", "sent", "status")

    def __init__(self, instance: Instance, considered: Sequence[Score], now: float) -> None:
        self.instance = instance
        self.considered = considered
        """What else might have been chosen; the instance's own score is among them."""
        self.sent = now
        self.status = 0
        """What it answered; 0 when it did not."""
        self.answered_at = NEVER

    def answered(self, status: int, now: float) -> None:
        """It answered: a prefill as a whole, a decode with its first byte."""
        self.status = status
        self.answered_at = now

    @property
    def chosen(self) -> Score | None:
        return next((score for score in self.considered if score.instance is self.instance), None)


class Record:
    """One request.  Whoever serves it sets what it knows; nothing reads it before the end but the debug page."""

    __slots__ = (
        "affinity",
        "answered_status",
        "arrived",
        "attempts",
        "backend",
        "backend_type",
        "broken",
        "decode",
        "decode_sent",
        "ended",
        "entered",
        "error_message",
        "error_type",
        "first_byte",
        "gateway",
        "hops",
        "input_tokens",
        "method",
        "model",
        "output_tokens",
        "path",
        "prefill",
        "prefill_done",
        "prefill_sent",
        "prefix_tokens",
        "principal",
        "queued",
        "request_id",
        "route",
        "server",
        "span",
        "status",
        "upstream_model",
        "user",
    )

    def __init__(self, request_id: str, method: str, path: str, now: float) -> None:
        self.request_id = request_id
        self.method = method
        self.path = path
        self.arrived = now
        self.model = ""
        self.principal = ANYBODY
        self.user = ""
        self.input_tokens = 0
        """Estimated."""
        self.output_tokens = 0
        self.prefix_tokens = 0
        """Tokens of the prompt that the chosen instances are thought to have."""
        self.affinity: bool | None = None
        """Whether a session came to the instance that it had before; None when there was none."""
        self.route = ""
        self.server = ""
        self.gateway = ""
        self.backend_type = NO_BACKEND
        self.backend = ""
        self.upstream_model = ""
        self.prefill = ""
        """The address of the instance that computed the prompt; empty when none was asked."""
        self.decode = ""
        self.attempts = 0
        self.answered_status = 0
        """What the decode instance answered."""
        self.status = 0
        """What the client was answered."""
        self.error_type = ""
        self.error_message = ""
        self.broken = False
        """Whether the answer broke off after it had begun, by an engine or by the client."""
        self.entered = NEVER
        """When it was let in."""
        self.queued = 0.0
        """Seconds in the queue."""
        self.prefill_sent = NEVER
        self.prefill_done = NEVER
        self.decode_sent = NEVER
        self.first_byte = NEVER
        self.ended = NEVER
        self.hops: list[Hop] = []
        self.span: object = None

    def fails(self, kind: str, message: str) -> None:
        self.error_type = kind
        self.error_message = message

    def settle(self) -> None:
        """Read out of the attempts what is said of the request as a whole."""
        self.attempts = len(self.hops)
        for hop in self.hops:
            if hop.instance.role is Role.PREFILL:
                self.prefill = str(hop.instance.address)
                self.prefill_sent = hop.sent
                self.prefill_done = hop.answered_at if 200 <= hop.status < 300 else NEVER
            else:
                self.decode = str(hop.instance.address)
                self.decode_sent = hop.sent
            self.answered_status = hop.status
        if self.hops:
            self.backend_type = MODEL_SERVER
            chosen = self.hops[0].chosen
            if chosen is not None:
                self.prefix_tokens = max(0, self.input_tokens - chosen.uncached)
                known = any(score.sticky for score in self.hops[0].considered)
                self.affinity = chosen.sticky if known else None

    @property
    def sent(self) -> float:
        """When it was first sent to an instance; its end when it never was."""
        return self.prefill_sent or self.decode_sent or self.ended
