"""Both sides of a connector that serves without the pool, because the user prefers that to an engine that refuses.

Every hook answers as a connector does that never finds, loads or stores anything.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from ems.vllm.metadata import QUIET, StepMetadata, StepReport


class IdleScheduler:
    """The scheduler side: no request is ever looked up."""

    block_pool: Any = None

    def on_new_request(self, request: Any) -> None:
        """Nothing is known of any request."""

    def match(self, _request: Any, _local: int) -> tuple[int | None, bool]:
        """Nothing is found."""
        return 0, False

    def allocated(self, request: Any, blocks: Any, external: int) -> None:
        """Nothing is loaded."""

    def build_metadata(self, _output: Any) -> StepMetadata:
        """Nothing is to be done in any step."""
        return QUIET

    def received(
        self, finished: Iterable[str], failed: Collection[str], invalid: set[int], report: object = None
    ) -> None:
        """Nothing was loaded."""

    def finished(self, _request: Any, _block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        """No block is kept."""
        return False, None

    def reset(self) -> None:
        """Nothing was stored."""

    def take_events(self) -> list[Any]:
        """Nothing happened."""
        return []

    def take_stats(self) -> None:
        """Nothing is counted."""

    def close(self) -> None:
        """Nothing is open."""


class IdleWorker:
    """The worker side: nothing is ever copied."""

    in_layers = False
    has_results = False

    def register(self, kv_caches: Mapping[str, Any]) -> None:
        """The engine's memory is not looked at."""

    def preempted(self, step: StepMetadata) -> None:
        """No block is read."""

    def begin(self, step: StepMetadata) -> None:
        """Nothing is begun."""

    def end(self) -> None:
        """Nothing was begun."""

    def start_loads(self) -> None:
        """Nothing is loaded."""

    def wait_for_layer(self, name: str) -> None:
        """Nothing is waited for."""

    def computed_layer(self, name: str) -> None:
        """Nothing is stored."""

    def computed(self) -> None:
        """Nothing is stored."""

    def results(self) -> tuple[set[str], set[str], set[str]]:
        """Nothing ended."""
        return set(), set(), set()

    def take_invalid_blocks(self) -> set[int]:
        """Nothing was loaded."""
        return set()

    def take_report(self) -> StepReport | None:
        """Nothing is to be said."""
        return None

    def take_stats(self) -> None:
        """Nothing is counted."""

    def close(self) -> None:
        """Nothing is open."""
