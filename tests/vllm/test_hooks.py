"""vLLM itself, with what EMS changes in it: deployed configurations, models whose configuration lacks ``head_dim``."""

from __future__ import annotations

import argparse
import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError
from vllm.config import ModelConfig
from vllm.config.kv_transfer import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore

from ems.vllm import hooks, plugin
from ems.vllm.hooks import follow_engine
from tests.kit.tiny_model import make_model

SIZES = {"prefill": {"dp_size": 1, "tp_size": 1}, "decode": {"dp_size": 1, "tp_size": 1}}
HAND_OFF = {
    "kv_connector": "MooncakeConnectorV1",
    "kv_role": "kv_producer",
    "kv_port": "20001",
    "kv_connector_extra_config": SIZES,
}
STORE = {
    "kv_connector": "AscendStoreConnector",
    "kv_role": "kv_producer",
    "kv_connector_extra_config": {"lookup_rpc_port": "0", "backend": "mooncake"},
}
DEPLOYED: list[dict[str, Any]] = [
    {"kv_connector": "EmsStoreConnector", "kv_role": "kv_producer"},
    {"kv_connector": "EmsStoreConnector", "kv_role": "kv_consumer"},
    {
        "kv_connector": "MooncakeConnectorStoreV1",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "use_layerwise": False,
            "mooncake_rpc_port": "0",
            "load_async": True,
            "register_buffer": True,
        },
    },
    STORE,
    {**HAND_OFF, "engine_id": "0", "kv_buffer_device": "npu", "kv_parallel_size": 1, "kv_rank": 0},
    {**HAND_OFF, "kv_connector_module_path": "vllm_ascend.distributed.mooncake_connector"},
    {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"connectors": [{**HAND_OFF, "engine_id": "0", "kv_rank": 0}, STORE]},
    },
]


@pytest.fixture(autouse=True)
def _plugin() -> None:
    plugin.register()


@pytest.mark.parametrize("fields", DEPLOYED, ids=map(str, range(len(DEPLOYED))))
def test_deployed_json_is_taken_as_it_stands(fields: dict[str, Any]) -> None:
    from_json = TypeAdapter(KVTransferConfig).validate_json(json.dumps(fields))
    from_python = KVTransferConfig(**fields)

    for config in (from_json, from_python):
        assert config.kv_connector == fields["kv_connector"]
        assert config.kv_role == fields["kv_role"]
        assert config.kv_buffer_device != "npu"
        assert config.kv_connector_module_path is None
        assert config.kv_load_failure_policy == "recompute"
    assert from_json.kv_port == (20001 if fields["kv_connector"] == "MooncakeConnectorV1" else 14579)


def test_children_of_the_multi_connector_can_be_made() -> None:
    config = KVTransferConfig(**DEPLOYED[-1])

    class Engine:
        kv_transfer_config = config

    made = MultiConnector._get_connector_classes_and_configs(Engine())

    assert [kind.__name__ for kind, _ in made] == ["MooncakeConnectorV1", "AscendStoreConnector"]
    assert {child.kv_transfer_config.engine_id for _, child in made} == {config.engine_id}
    assert MultiConnector.all_children_support_hma(config)


def test_other_configurations_are_checked_as_ever() -> None:
    with pytest.raises(ValidationError, match="lookup_rpc_port"):
        KVTransferConfig(kv_connector="NixlConnector", kv_role="kv_both", lookup_rpc_port="0")
    with pytest.raises(ValidationError, match="kv_prot"):
        KVTransferConfig(kv_connector="MooncakeConnectorV1", kv_role="kv_both", kv_prot=1)
    assert KVTransferConfig(kv_connector="NixlConnector", kv_role="kv_both").kv_load_failure_policy == "fail"
    assert KVTransferConfig().kv_connector is None


def test_what_is_left_out_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "vllm.ems")
    for _ in range(3):
        KVTransferConfig(kv_connector="EmsStoreConnector", kv_role="kv_both", lookup_rpc_port="0")

    assert caplog.messages == ["EMS: accepted, but without a meaning for EmsStoreConnector: lookup_rpc_port"]


def test_a_wrong_setting_is_an_error_in_usage() -> None:
    """Said by the command line at once, not by an engine after a minute."""
    wrong = {**STORE, "kv_role": "kv_consumer", "kv_connector_extra_config": {"consumer_is_to_load": False}}
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser(exit_on_error=False))

    with pytest.raises(argparse.ArgumentError) as error:
        parser.parse_args(["--kv-transfer-config", json.dumps(wrong)])

    assert "consumer_is_to_load is false for a kv_consumer that does not save either" in str(error.value)
    assert "validation error for KVTransferConfig" in str(error.value)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model", "test")


def rewrite(model: Path, **changes: object) -> None:
    path = model / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def test_a_model_without_head_dim_gets_what_follows_from_its_sizes(model: Path) -> None:
    rewrite(model, head_dim=None)

    config = ModelConfig(model=str(model), max_model_len=128)

    assert config.hf_config.head_dim == 64
    assert config.get_head_size() == 64


def test_a_head_dim_that_is_given_stays(model: Path) -> None:
    rewrite(model, head_dim=32)

    assert ModelConfig(model=str(model), max_model_len=128).hf_config.head_dim == 32


def test_sizes_that_say_nothing_of_a_head_leave_it_out(model: Path) -> None:
    rewrite(model, head_dim=None, kv_lora_rank=16)

    assert not hasattr(ModelConfig(model=str(model), max_model_len=128).hf_config, "head_dim")


class Told:
    """A connector of EMS: notes what it hears of the engine."""

    def __init__(self) -> None:
        self.heard: list[object] = []

    def weights_declared(self, version: str) -> None:
        self.heard.append(version)

    def paused(self, *, paused: bool) -> None:
        self.heard.append(paused)


NAMES_WEIGHTS = hasattr(EngineCore, "set_weight_version")
"""Not in vLLM 0.23."""


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "below the multi connector"])
def test_a_connector_hears_of_pauses_and_of_what_the_weights_are_called(beside: bool) -> None:
    follow_engine()
    follow_engine()
    ours = Told()
    connector: Any = SimpleNamespace(_connectors=[object(), ours]) if beside else ours
    engine: Any = SimpleNamespace(scheduler=SimpleNamespace(connector=connector))
    for state in (PauseState.PAUSED_NEW, PauseState.PAUSED_ALL, PauseState.UNPAUSED):
        Scheduler.set_pause_state(engine.scheduler, state)
    assert ours.heard == [True, True, False]
    assert engine.scheduler._pause_state is PauseState.UNPAUSED
    if NAMES_WEIGHTS:
        EngineCore.set_weight_version(engine, "run/1")
        assert ours.heard.pop() == engine._weight_version == "run/1"


def test_an_engine_without_a_connector_is_left_alone() -> None:
    follow_engine()
    scheduler: Any = SimpleNamespace(connector=None)
    Scheduler.set_pause_state(scheduler, PauseState.PAUSED_NEW)
    assert scheduler._pause_state is PauseState.PAUSED_NEW


def test_what_a_release_does_not_have_is_said_and_the_rest_is_heard(caplog: pytest.LogCaptureFixture) -> None:
    """vLLM 0.23 has no name for weights, and pauses all the same."""
    caplog.set_level(logging.INFO, "vllm.ems")

    class Engine:
        connector = Told()

        def pause(self, given: str) -> str:
            return given.upper()

    for method in ("declare", "pause"):
        hooks._tell(Engine, method, lambda connector, given: connector.heard.append(given))
    assert Engine().pause("now") == "NOW"
    assert Engine.connector.heard == ["now"]
    assert caplog.messages == ["EMS does not hear of declare, which this release of vLLM does not have"]
