"""Keeps watch beside the engine: checks the node, tells the health gate, writes the summary line.

A thin shell around :class:`~ems.pool.client.health.HealthGate` and :class:`~ems.transfers.summary.Summary`: one daemon
thread, one lock, one clock.  After its close no revival begins; one that is under way ends by itself.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from ems.cc_v1.errors import EmsErrorCode, EmsException, code_of
from ems.errors import EmsError, PoolNotTried
from ems.pool.client.health import HealthGate, HealthRules
from ems.transfers.summary import Sample, Summary

_log = logging.getLogger("ems.cc_v1")
_NOT_THE_NODE = (EmsErrorCode.EMS_INVALID_ARGUMENT, EmsErrorCode.EMS_NOT_REGISTERED, EmsErrorCode.EMS_NOT_INITIALISED)


class GateClosed(EmsException):
    """An operation was not tried because the health gate is closed; that says nothing new about the node."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"compute instead, the pool is not used for now: {reason}", EmsErrorCode.EMS_RECOVERD_ERROR)


class Monitor:
    """Watches a node with ``check``, which raises an EmsError when the node is not well.

    It begins with :meth:`start`.  ``revive`` is called after a check that failed, once the gate knows.  Changes of
    status and the summary line go to ``logger``.
    """

    def __init__(
        self,
        rules: HealthRules,
        summary_seconds: float,
        check: Callable[[], object],
        revive: Callable[[], None],
        logger: logging.Logger = _log,
    ) -> None:
        self._check = check
        self._revive = revive
        self._logger = logger
        self._lock = threading.Lock()
        self._gate = HealthGate(rules, time.monotonic())
        self._summary = Summary(summary_seconds, time.monotonic())
        self._stop = threading.Event()
        self.reason = ""
        """What failed last."""

    def start(self) -> None:
        threading.Thread(target=self._run, name="ems-monitor", daemon=True).start()

    @property
    def healthy(self) -> bool:
        return self._gate.healthy

    def failed(self, error: EmsError) -> None:
        """An operation failed with ``error``; the caller's own faults do not count."""
        if code_of(error) not in _NOT_THE_NODE and not isinstance(error, GateClosed | PoolNotTried):
            self._failed(str(error), check=False)

    def add(self, sample: Sample) -> None:
        with self._lock:
            self._summary.add(sample)

    def close(self) -> None:
        """End the watch; a check that is running ends by itself."""
        self._stop.set()

    def _failed(self, reason: str, *, check: bool) -> None:
        if self._stop.is_set():
            return
        with self._lock:
            self.reason = reason  # first, for whoever sees the closed gate
            degraded = self._gate.failed(time.monotonic(), check=check)
        if degraded:
            self._logger.warning("EMS pool is not used for now: %s", reason)

    def _run(self) -> None:
        while not self._stop.wait(max(min(self._gate.next_check, self._summary.next_line) - time.monotonic(), 0)):
            if time.monotonic() >= self._gate.next_check:
                self._look()
            with self._lock:
                line = self._summary.line(time.monotonic())
            if line is not None:
                self._logger.info("EMS: %s", line)

    def _look(self) -> None:
        try:
            self._check()
        except EmsError as error:
            if self._stop.is_set():  # whoever closes the watch may be ending the node, too
                return
            self._failed(str(error), check=True)
            try:
                self._revive()
            except Exception:  # the root of what this thread does, see below
                self._logger.exception("EMS could not bring the pool back")
        except Exception as error:  # the root of what this thread does, see below
            # Root of this thread: a check that breaks is a check that fails, and whatever breaks the watch goes on, or
            # nobody would notice that the node is back.
            self._logger.exception("EMS health check broke")
            self._failed(repr(error), check=True)
        else:
            with self._lock:
                recovered = not self._stop.is_set() and self._gate.passed(time.monotonic())
            if recovered:
                self._logger.info("EMS pool is used again")
