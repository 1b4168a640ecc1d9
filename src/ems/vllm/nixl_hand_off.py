"""A hand-off from peer to peer over vLLM's NIXL connector, configured the way of ``MooncakeConnectorV1``.

The decode reads the prefill's blocks.  It finds the prefill by the address in ``kv_transfer_params``, so an engine
whose port is taken listens on another one.
"""

from __future__ import annotations

import os
import socket
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlConnector
from vllm.platforms import current_platform

from ems.errors import ConfigError
from ems.vllm.hand_off import HandOffLog, logger, own_address, translated

KEYS = (
    "backends", "num_threads", "kv_lease_duration", "kv_recompute_threshold", "bidirectional_kv_xfer",
    "decoder_kv_blocks_ttl", "engine_ttl", "enforce_handshake_compat",
)  # fmt: skip
"""What vLLM's NIXL connector understands in ``kv_connector_extra_config``."""


class NixlHandOff(HandOffLog, NixlConnector):
    """vLLM's NIXL connector with the configuration of ``MooncakeConnectorV1``."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        parallel = vllm_config.parallel_config
        if parallel.decode_context_parallel_size > 1:
            raise ConfigError(
                f"--decode-context-parallel-size is {parallel.decode_context_parallel_size}, but MooncakeConnectorV1 "
                "serves only 1; start with 1 or write NixlConnector instead"
            )
        cores = os.sched_getaffinity(0)
        super().__init__(translated(vllm_config, role, KEYS), role, kv_cache_config)
        if role is KVConnectorRole.SCHEDULER:
            host, port = _listen_at(vllm_config)
            self.connector_scheduler.side_channel_host = host
            self.connector_scheduler.side_channel_port = port
        elif current_platform.device_type == "cpu":
            # The transport's threads keep the core that vLLM reserves for them, the thread that computes goes back.
            os.sched_setaffinity(0, cores)


def _listen_at(vllm_config: Any) -> tuple[str, int]:
    """Where peers ask for this engine's memory: ``kv_port`` plus the data-parallel rank, or a free port.

    NIXL's own variables go first.
    """
    host = os.environ.get("VLLM_NIXL_SIDE_CHANNEL_HOST") or own_address()
    base = int(os.environ.get("VLLM_NIXL_SIDE_CHANNEL_PORT") or vllm_config.kv_transfer_config.kv_port)
    wanted = base + vllm_config.parallel_config.data_parallel_index
    port = free_port(host, wanted)
    if port != wanted:
        logger.info("port %d (kv_port) is taken on this machine, %d is used instead", wanted, port)
    return host, port


def free_port(host: str, wanted: int) -> int:
    """``wanted``, or another port of ``host`` where somebody listens on that one.

    Raises:
        ConfigError: ``host`` is no address of this machine, or ``wanted`` no port.
    """
    if not 0 < wanted < 65536:
        raise ConfigError(f"kv_port (plus the data-parallel rank) is {wanted}, expected 1 to 65535")
    try:
        return _bind(host, wanted)
    except OSError:
        try:
            return _bind(host, 0)
        except OSError as error:
            raise ConfigError(
                f"this machine cannot listen on its address {host!r} ({error.strerror}); "
                "set VLLM_NIXL_SIDE_CHANNEL_HOST to one of its addresses that the other side reaches"
            ) from error


def _bind(host: str, port: int) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))
        return int(probe.getsockname()[1])
