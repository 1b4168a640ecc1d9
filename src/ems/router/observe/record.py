"""The facts of one completion request, written down as they happen.  Times are seconds on the event loop's clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from ems.router.admission.keys import ANYBODY, Principal
from ems.router.choosing.chooser import Score
from ems.router.fleet import Instance, Role
from ems.router.metrics import Tokenized

NEVER: Final = 0.0

NO_BACKEND: Final = "none"
MODEL_SERVER: Final = "model_server"
UNRESOLVED: Final = "unresolved"

DONE: Final = "successful_request"
FAILED: Final = "request_failed"


@dataclass(slots=True, eq=False)
class Hop:
    """One attempt at one instance."""

    instance: Instance
    considered: Sequence[Score]
    """What else might have been chosen; the instance's own score is among them."""
    sent: float
    told: Sequence[Instance] = ()
    """Of whose hosts the pools were told of the prompt."""
    status: int = 0
    """What it answered; 0 when it did not."""
    answered_at: float = NEVER

    def answered(self, status: int, now: float) -> None:
        """It answered: a prefill as a whole, a decode with its first byte."""
        self.status = status
        self.answered_at = now

    @property
    def chosen(self) -> Score | None:
        for score in self.considered:
            if score.instance is self.instance:
                return score
        return None


class Tokenization(NamedTuple):
    """An engine was asked for a prompt's token ids."""

    instance: Instance
    outcome: Tokenized
    seconds: float


@dataclass(slots=True, eq=False)
class Record:
    """One request.  Whoever serves it sets what it knows; nothing reads it before the end but the debug page."""

    request_id: str
    method: str
    path: str
    arrived: float
    model: str = ""
    principal: Principal = ANYBODY
    user: str = ""
    input_tokens: int = 0
    """Estimated, or counted by an engine that was asked for token ids."""
    output_tokens: int = 0
    prefix_tokens: int = 0
    """Tokens of the prompt that the chosen instances are thought to have."""
    affinity: bool | None = None
    """Whether a session came to the instance that it had before; None when there was none."""
    route: str = ""
    server: str = ""
    backend_type: str = NO_BACKEND
    backend: str = ""
    upstream_model: str = ""
    prefill: str = ""
    """The name of the instance that computed the prompt; empty when none was asked."""
    decode: str = ""
    attempts: int = 0
    answered_status: int = 0
    """What the decode instance answered."""
    status: int = 0
    """What the client was answered."""
    error_type: str = ""
    error_message: str = ""
    broken: bool = False
    """Whether the answer broke off after it had begun, by an engine or by the client."""
    entered: float = NEVER
    """When it was let in."""
    queued: float = 0.0
    """Seconds in the queue."""
    prefill_sent: float = NEVER
    prefill_done: float = NEVER
    decode_sent: float = NEVER
    first_byte: float = NEVER
    ended: float = NEVER
    tokenization: Tokenization | None = None
    hops: list[Hop] = field(default_factory=list)
    span: object = None

    def fails(self, kind: str, message: str) -> None:
        self.error_type = kind
        self.error_message = message

    def settle(self) -> None:
        """Read out of the attempts what is said of the request as a whole."""
        self.attempts = len(self.hops)
        for hop in self.hops:
            if hop.instance.role is Role.PREFILL:
                self.prefill = hop.instance.name
                self.prefill_sent = hop.sent
                self.prefill_done = hop.answered_at if 200 <= hop.status < 300 else NEVER
            else:
                self.decode = hop.instance.name
                self.decode_sent = hop.sent
            self.answered_status = hop.status
        if self.hops:
            self.backend_type = MODEL_SERVER
            chosen = self.hops[0].chosen
            if chosen is not None:
                self.prefix_tokens = max(0, self.input_tokens - chosen.uncached)
                known = [score for score in self.hops[0].considered if score.sticky]
                self.affinity = chosen.sticky if known else None

    @property
    def sent(self) -> float:
        """When it was first sent to an instance; its end when it never was."""
        return self.prefill_sent or self.decode_sent or self.ended
