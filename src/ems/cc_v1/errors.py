"""The one exception of the SDK, and the codes by which its callers tell faults apart.

Engine integrations know :class:`EmsException` and :class:`EmsErrorCode` only; every error of the tree in
:mod:`ems.errors` reaches them as one of these codes, with the original as its cause.
"""

from __future__ import annotations

from enum import Enum

from ems.errors import (
    ConfigError,
    EmsError,
    NoSpace,
    PoolTimeout,
    PoolUnavailable,
    QuotaExceeded,
    StaleReference,
    Unauthorised,
    VersionMismatch,
)


class EmsErrorCode(Enum):
    """What a caller can do about it.  Names are part of the contract, values are not."""

    EMS_INVALID_ARGUMENT = 1
    """The caller's fault; the service is as well as before."""
    EMS_RECOVERD_ERROR = 2
    """May pass by itself: go on without the cache, try again once ``Ems.check_health()`` is true."""
    EMS_INTERNAL_ERROR = 3
    """A defect or a refusal that no other code names; the message says more."""
    EMS_NOT_INITIALISED = 4
    """``Ems.init`` has not succeeded in this process, or the object belongs to an earlier ``init``."""
    EMS_NOT_REGISTERED = 5
    """``register_kvcache`` has not been called yet."""
    EMS_TIMEOUT = 6
    """The option's time-out passed before anything was done."""
    EMS_UNAUTHORISED = 7
    """The node does not accept ``access_id`` and ``access_key``."""
    EMS_QUOTA_EXCEEDED = 8
    """The tenant's quota is too small for what was asked."""
    EMS_NO_SPACE = 9
    """The pool has no room: all of it is in use, or a page of this model fits in no segment of the node."""
    EMS_VERSION_MISMATCH = 10
    """SDK and node are of releases that do not understand each other."""


class EmsException(EmsError):
    """An operation of the SDK failed as a whole; :meth:`status_code` says what kind of fault it was."""

    def __init__(self, message: str, code: EmsErrorCode = EmsErrorCode.EMS_INTERNAL_ERROR) -> None:
        super().__init__(message)
        self._code = code

    def status_code(self) -> EmsErrorCode:
        return self._code

    @property
    def transient(self) -> bool:  # type: ignore[override]  # other errors know it by their class, this one by its code
        """Whether the same call may succeed later without anybody changing anything."""
        return self._code in (EmsErrorCode.EMS_RECOVERD_ERROR, EmsErrorCode.EMS_TIMEOUT)


_CODES: tuple[tuple[type[EmsError], EmsErrorCode], ...] = (
    (PoolTimeout, EmsErrorCode.EMS_TIMEOUT),
    (PoolUnavailable, EmsErrorCode.EMS_RECOVERD_ERROR),
    (StaleReference, EmsErrorCode.EMS_RECOVERD_ERROR),
    (Unauthorised, EmsErrorCode.EMS_UNAUTHORISED),
    (VersionMismatch, EmsErrorCode.EMS_VERSION_MISMATCH),
    (QuotaExceeded, EmsErrorCode.EMS_QUOTA_EXCEEDED),
    (NoSpace, EmsErrorCode.EMS_NO_SPACE),
    (ConfigError, EmsErrorCode.EMS_INVALID_ARGUMENT),
)


def code_of(error: EmsError) -> EmsErrorCode:
    if isinstance(error, EmsException):
        return error.status_code()
    return next((code for kind, code in _CODES if isinstance(error, kind)), EmsErrorCode.EMS_INTERNAL_ERROR)


def invalid(message: str) -> EmsException:
    return EmsException(message, EmsErrorCode.EMS_INVALID_ARGUMENT)
