"""The facts of one completion request, written down as they happen.  Times are seconds on the event loop's clock."""

from __future__ import annotations

from typing import Final

NEVER: Final = 0.0

NO_BACKEND: Final = "none"
MODEL_SERVER: Final = "model_server"
UNRESOLVED: Final = "unresolved"

DONE: Final = "successful_request"
FAILED: Final = "request_failed"


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
        "choice",
        "decode",
        "decode_sent",
        "ended",
        "entered",
        "error_message",
        "error_type",
        "first_byte",
        "gateway",
        "input_tokens",
        "method",
        "model",
        "output_tokens",
        "path",
        "prefill",
        "prefill_done",
        "prefill_sent",
        "prefix_tokens",
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
        self.choice: object = None
        """What the chooser said."""
        self.span: object = None

    @property
    def prefill_seconds(self) -> float | None:
        return self.prefill_done - self.prefill_sent if self.prefill_done else None

    @property
    def decode_seconds(self) -> float | None:
        return self.ended - self.decode_sent if self.decode_sent else None

    @property
    def handoff_seconds(self) -> float | None:
        """From the prefill's answer to the decode's first byte."""
        return self.first_byte - self.prefill_done if self.first_byte and self.prefill_done else None

    @property
    def first_token_seconds(self) -> float | None:
        return self.first_byte - self.arrived if self.first_byte else None

    @property
    def sent(self) -> float:
        """When it was first sent to an instance; its end when it never was."""
        return self.prefill_sent or self.decode_sent or self.ended
