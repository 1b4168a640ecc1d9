"""A side of a connector that serves without the pool, because the user prefers that to an engine that refuses.

Every hook answers as a connector does that never finds, loads or stores anything.
"""

from __future__ import annotations

from typing import Any

from ems.vllm.metadata import QUIET, StepMetadata


def _nothing(*_given: object, **_named: object) -> None:
    """There is nothing to be done."""


class IdleSide:
    """The scheduler side or the worker side of such a connector."""

    saving = in_layers = has_results = False
    bind = on_new_request = allocated = received = paused = reset = weights_declared = adapter_loaded = _nothing
    register = begin = end = start_loads = wait_for_layer = computed_layer = computed = _nothing
    finish_saves = take_report = take_stats = close = _nothing

    def match(self, _request: Any, _local: int) -> tuple[int | None, bool]:
        return 0, False

    def build_metadata(self, _output: Any) -> StepMetadata:
        return QUIET

    def finished(self, _request: Any, _block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        return False, None

    def take_events(self) -> list[Any]:
        return []

    def results(self) -> tuple[set[str], set[str]]:
        return set(), set()

    def take_invalid_blocks(self) -> set[int]:
        return set()
