"""A hand-off from peer to peer over vLLM's Mooncake connector, configured the way of ``MooncakeConnectorV1``.

vLLM's connector expects a router that names the transfer and the prefill beforehand.  Here the prefill does: it names
the transfer after its request and answers with all that the decode needs, as with the other transport.
"""

from __future__ import annotations

import os
from typing import Any

from vllm import envs
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector import MooncakeConnector

from ems.vllm.peer.hand_off import HandOffLog, own_address, translated

KEYS = ("mooncake_protocol", "device_name", "num_workers", "bootstrap_server_address")
"""What vLLM's Mooncake connector understands in ``kv_connector_extra_config``."""


class MooncakeHandOff(HandOffLog, MooncakeConnector):
    """vLLM's Mooncake connector with the configuration of ``MooncakeConnectorV1``."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        # Where a prefill tells its workers' addresses; vLLM takes the port from the environment alone.
        os.environ.setdefault("VLLM_MOONCAKE_BOOTSTRAP_PORT", str(vllm_config.kv_transfer_config.kv_port))
        super().__init__(translated(vllm_config, role, KEYS), role, kv_cache_config)

    def on_new_request(self, request: Any) -> None:
        params = request.kv_transfer_params
        if params and params.get("do_remote_decode"):
            params.setdefault("transfer_id", request.request_id)
        super().on_new_request(request)

    def _ended(
        self, request: Any, block_ids: tuple[list[int], ...], outcome: tuple[bool, dict[str, Any] | None]
    ) -> tuple[bool, dict[str, Any] | None]:
        keep, answer = super()._ended(request, block_ids, outcome)
        if not keep or answer is not None:
            return keep, answer
        extra = self._kv_transfer_config.kv_connector_extra_config
        named, port = extra.get("bootstrap_server_address"), envs.VLLM_MOONCAKE_BOOTSTRAP_PORT
        return keep, {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "transfer_id": request.kv_transfer_params["transfer_id"],
            "remote_engine_id": self.engine_id,
            "remote_bootstrap_addr": f"http://{named or f'{own_address()}:{port}'}",
        }
