"""What both transports of ``MooncakeConnectorV1`` share: the translated configuration and the lines in the log."""

from __future__ import annotations

import copy
import time
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.utils.network_utils import get_ip

from ems.vllm.peer.transport_settings import read_transport

logger = init_logger("vllm.ems.peer_to_peer")


class HandOffLog(KVConnectorBase_V1):
    """Tells the log of each hand-off; stands before the transport's connector among the base classes."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._began: dict[str, float] = {}

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens > 0:
            self._began[request.request_id] = time.monotonic()
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def update_connector_output(self, connector_output: Any) -> None:
        for request_id in connector_output.finished_recving or ():
            began = self._began.pop(request_id, None)
            if began is not None:
                took = (time.monotonic() - began) * 1000
                logger.info("KV cache transfer for request %s took %.2f ms", request_id, took)
        super().update_connector_output(connector_output)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self._ended(request, (block_ids,), super().request_finished(request, block_ids))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._ended(request, block_ids, super().request_finished_all_groups(request, block_ids))

    def _ended(
        self, request: Any, block_ids: tuple[list[int], ...], outcome: tuple[bool, dict[str, Any] | None]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._began.pop(request.request_id, None)
        if outcome[0]:
            blocks = sum(map(len, block_ids))
            logger.info("Delaying free of %d blocks for request %s", blocks, request.request_id)
        return outcome


def translated(vllm_config: Any, role: KVConnectorRole, keys: tuple[str, ...]) -> Any:
    """A copy of the engine's configuration with the KV transfer in the form of a transport with these ``keys``.

    Raises ConfigError: a value is wrong, or the sizes do not fit this engine or each other.
    """
    parallel, given = vllm_config.parallel_config, vllm_config.kv_transfer_config
    own = {
        "tp_size": parallel.tensor_parallel_size,
        "dp_size": parallel.data_parallel_size,
        "pp_size": parallel.pipeline_parallel_size,
    }
    extra, said = read_transport(given.kv_role, given.kv_connector_extra_config, own, keys)
    if role is KVConnectorRole.SCHEDULER:
        for sentence in said:
            logger.warning("EMS: %s", sentence)
    transfer = copy.copy(given)
    # Deployed files give both sides one engine_id, and a restarted engine gets it again; a transport tells its peers
    # apart by it, and must not take a new one for the old.
    transfer.engine_id = f"{given.engine_id}-{given.kv_role}-{_instance(vllm_config)}"
    transfer.kv_connector_extra_config = extra
    if transfer.kv_buffer_device == "npu":
        transfer.kv_buffer_device = current_platform.device_type
    fitted = copy.copy(vllm_config)
    fitted.kv_transfer_config = transfer
    return fitted


def _instance(vllm_config: Any) -> str:
    """An id of this start of the engine, equal in all its processes on all machines."""
    parallel = vllm_config.parallel_config
    if getattr(parallel, "nnodes", 1) > 1:
        return f"{parallel.master_addr}:{parallel.master_port}"
    return str(vllm_config.instance_id)


def own_address() -> str:
    address = get_ip()
    return "127.0.0.1" if address == "0.0.0.0" else str(address)
