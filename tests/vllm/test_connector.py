"""The class that vLLM makes: what it does with a configuration that is wrong."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from ems.errors import ConfigError
from ems.vllm.connector import EmsStoreConnector, IdleSide
from ems.vllm.metadata import StepMetadata


class WaitsInLayers(IdleSide):
    """A worker side in a step whose layers wait for loads."""

    in_layers = True


def make(role: KVConnectorRole, **extra: object) -> EmsStoreConnector:
    transfer = SimpleNamespace(kv_role="kv_both", kv_connector_extra_config=extra, kv_load_failure_policy="recompute")
    config: Any = SimpleNamespace(kv_transfer_config=transfer)
    return EmsStoreConnector(config, role, None)


@pytest.mark.parametrize(
    ("said", "piecewise"), [(True, True), ("true", True), (False, False), (None, False), ("?", False)]
)
def test_layers_that_are_waited_for_need_graphs_in_pieces(said: object, piecewise: bool) -> None:
    assert EmsStoreConnector.requires_piecewise_for_cudagraph({"use_layerwise": said}) is piecewise


def test_layers_have_hooks_only_where_there_is_something_to_do_in_them() -> None:
    worker = make(KVConnectorRole.WORKER, pool_size="many", on_error="serve_without")
    worker.bind_connector_metadata(StepMetadata())
    assert not worker.has_connector_metadata()
    worker._worker = WaitsInLayers()
    assert worker.has_connector_metadata()


@pytest.mark.parametrize("role", list(KVConnectorRole))
def test_wrong_settings_end_the_engine(role: KVConnectorRole) -> None:
    with pytest.raises(ConfigError, match="pool_size is 'many'"):
        make(role, pool_size="many")


def test_wrong_settings_do_not_where_the_user_prefers_to_serve(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "vllm.ems")
    scheduler = make(KVConnectorRole.SCHEDULER, pool_size="many", on_error="serve_without")
    worker = make(KVConnectorRole.WORKER, pool_size="many", on_error="serve_without")

    assert scheduler.get_num_new_matched_tokens(SimpleNamespace(request_id="r"), 0) == (0, False)
    assert scheduler.build_connector_meta(SimpleNamespace()) == StepMetadata()
    assert not worker.get_block_ids_with_load_errors()
    said = [line for line in caplog.messages if line.startswith("EMS cannot be used")]
    assert len(said) == 1
    assert "pool_size is 'many', expected" in said[0]
    for connector in (scheduler, worker):
        connector.shutdown()
