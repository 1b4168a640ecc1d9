"""What the scheduler side tells the worker side in each step."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from ems.vllm.requests import Load, Save


@dataclass
class StepMetadata(KVConnectorMetadata):
    """One step's work for the worker."""

    loads: list[Load] = field(default_factory=list)
    """Loads to begin."""

    saves: list[Save] = field(default_factory=list)
    """Blocks that are whole once this step's forward is over."""

    preempted: set[str] = field(default_factory=set)
    """Requests whose blocks may be written by others in this very step: their saves end before it begins."""

    awaited: set[str] = field(default_factory=set)
    """Requests that ended and whose blocks the engine keeps until their saves are reported done."""
