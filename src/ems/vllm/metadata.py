"""What the scheduler side tells the worker side in each step, and what it hears back."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from ems.vllm.reporting.stats import Transferred
from ems.vllm.requests import Load, Save


@dataclass
class StepMetadata(KVConnectorMetadata):
    """One step's work for the worker."""

    loads: list[Load] = field(default_factory=list)
    """Loads to begin."""
    saves: list[Save] = field(default_factory=list)
    """Blocks that are whole once this step's forward is over."""
    call_off: bool = False
    """Blocks that saves read may be written by others in this very step: all saves end before it begins."""
    idle: bool = False
    """Nothing is computed in this step."""

    def __reduce__(self) -> str | tuple[object, ...]:
        """Short, because it is sent to each worker in each step."""
        if self is QUIET:
            return "QUIET"
        return StepMetadata, (self.loads, self.saves, self.call_off, self.idle)


QUIET = StepMetadata()
"""The step in which this connector has nothing to do, as most of an engine that decodes; nobody changes it."""


@dataclass
class StepReport(KVConnectorWorkerMetadata):
    """What workers report of one step, added up over them."""

    in_step: dict[str, int] = field(default_factory=dict)
    """Requests whose loads were part of the step and are over, with the number of workers that say so."""
    transfers: list[Transferred] = field(default_factory=list)
    """Loads and saves that ended."""
    errors: dict[str, int] = field(default_factory=dict)
    """What made loads and saves fail: names of classes, and how often."""
    saved: dict[int, int] = field(default_factory=dict)
    """Saves that read their blocks no more, by number, with the number of workers that say so."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> StepReport:
        assert isinstance(other, StepReport)
        return StepReport(
            Counter(self.in_step) + Counter(other.in_step),
            [*self.transfers, *other.transfers],
            Counter(self.errors) + Counter(other.errors),
            Counter(self.saved) + Counter(other.saved),
        )
