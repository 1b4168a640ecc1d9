"""Errors that cross the wire: a code and a sentence, the same error on the other side."""

from __future__ import annotations

from ems.errors import (
    EmsError,
    NoSpace,
    PoolRefused,
    PoolRestarting,
    ProtocolError,
    QuotaExceeded,
    StaleReference,
    Unauthorised,
    VersionMismatch,
)
from ems.pool.protocol.messages import Refused

REFUSALS: dict[str, type[EmsError]] = {
    "protocol": ProtocolError,
    "version": VersionMismatch,
    "unauthorised": Unauthorised,
    "quota": QuotaExceeded,
    "no-space": NoSpace,
    "stale": StaleReference,
    "restarting": PoolRestarting,
    "refused": PoolRefused,
}
"""Code on the wire and the error that it stands for, most special first."""


def refusal(error: EmsError) -> Refused:
    for code, kind in REFUSALS.items():
        if isinstance(error, kind):
            return Refused(code, str(error))
    return Refused("refused", str(error))


def raise_refusal(message: Refused) -> None:
    raise REFUSALS.get(message.code, PoolRefused)(message.reason)
