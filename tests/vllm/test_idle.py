"""An engine whose user lets it start without the pool: every hook is harmless, and no load is left without an end."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

from ems.errors import ConfigError
from ems.pool.keys import KEY_BYTES
from ems.pool.layout import REF_BYTES
from ems.vllm.configuration.settings import ConnectorSettings
from ems.vllm.connector import IdleSide
from ems.vllm.metadata import StepMetadata
from ems.vllm.model import BlockModel, LocalPlane
from ems.vllm.planes import Plane, Portion
from ems.vllm.requests import Load, LoadPart, Save
from ems.vllm.scheduler import SchedulerSide
from ems.vllm.worker import WorkerSide
from tests.e2e.engines import wait_for


def hooks_of(kind: type) -> set[str]:
    return {name for name, value in inspect.getmembers(kind, inspect.isfunction) if not name.startswith("_")}


def test_an_idle_side_has_every_hook_of_the_real_ones() -> None:
    assert hooks_of(IdleSide) == hooks_of(SchedulerSide) | hooks_of(WorkerSide)


def make_worker(tmp_path: Path, on_error: str, groups: int) -> WorkerSide:
    settings = ConnectorSettings(
        saves=True, socket=tmp_path / "node.sock", directory=tmp_path, autostart=False, on_error=on_error
    )
    planes = tuple(Plane(f"p{group}", group) for group in range(groups))
    model = BlockModel("m", 4, 8, groups, planes)
    return WorkerSide(settings, model, [LocalPlane(0, planes[0], ("layers.0",), Portion(), (2,))])


WRONG: dict[str, Any] = {"layers.0": torch.zeros(8, 4, 2, 16)}
"""Heads where tokens belong."""


def test_an_engine_refuses_tensors_that_it_cannot_serve(tmp_path: Path) -> None:
    worker = make_worker(tmp_path, "refuse", 1)
    with pytest.raises(ConfigError, match="2 heads"):
        worker.register(WRONG)
    worker.close()


@pytest.mark.parametrize("groups", [1, 2], ids=["one group", "two groups"])
def test_a_load_that_cannot_be_tried_has_failed(tmp_path: Path, groups: int) -> None:
    worker = make_worker(tmp_path, "serve_without", groups)
    worker.register(WRONG)
    load = Load("r", "node", [LoadPart(0, [3, 4], bytes(2 * KEY_BYTES), bytes(2 * REF_BYTES))])
    save = Save(7, "r", 0, bytes(16), [], [[]])
    worker.begin(StepMetadata(loads=[load], saves=[save]))
    worker.computed()
    loader = worker._loader
    assert loader is not None
    wait_for(lambda: loader.news, "the load ends")
    received, failed = worker.results()
    report = worker.take_report()

    assert received == {"r"}
    assert report is not None
    assert report.saved == {7: 1}
    assert failed == (set() if groups == 1 else {"r"})
    assert worker.take_invalid_blocks() == ({3, 4} if groups == 1 else set())
    worker.end()
    worker.begin(StepMetadata())
    assert worker.results() == (set(), set())
    worker.close()
