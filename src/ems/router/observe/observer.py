"""What is made of requests' records: numbers, lines, spans, answers to "why"."""

from __future__ import annotations

import time

from ems.http.access_log import AccessLog
from ems.router.observe.decisions import Decisions
from ems.router.observe.log_line import line_of
from ems.router.observe.record import Record
from ems.router.observe.series import AllSeries
from ems.router.observe.settings import Format, ObserveConfig
from ems.router.observe.spans import Spans


class Observer:
    """One for a router, or for a worker of several that write to one place (``shared``)."""

    def __init__(self, config: ObserveConfig, *, shared: bool = False) -> None:
        self.series = AllSeries()
        self.decisions = Decisions(config.decisions)
        self.active: set[Record] = set()
        """Requests that have not ended."""
        self.access_log = (
            None if config.access_log is Format.OFF else AccessLog(config.access_log_output, shared=shared)
        )
        self._format = config.access_log
        self.spans = None if config.otlp_traces_endpoint is None else Spans(config.otlp_traces_endpoint)

    def close(self) -> None:
        if self.access_log is not None:
            self.access_log.close()
        if self.spans is not None:
            self.spans.close()

    def started(self, record: Record) -> None:
        self.active.add(record)

    def finished(self, record: Record, now: float) -> None:
        """Take a request that has ended, by whatever way; its record does not change any more."""
        record.ended = now
        record.settle()
        self.active.discard(record)
        self.series.finished(record)
        self.decisions.add(record)
        if self.access_log is not None:
            self.access_log.add(line_of(record, self._format, time.time()))
        if record.span is not None and self.spans is not None:
            self.spans.finish(record)
