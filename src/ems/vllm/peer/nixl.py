"""A hand-off from peer to peer over vLLM's NIXL connector, configured the way of ``MooncakeConnectorV1``.

The decode reads the prefill's blocks.  It finds the prefill by the address in ``kv_transfer_params``, so an engine
whose port is taken listens on another one.  On a CPU the transport's thread leaves the cores to those that compute.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from nixl import _api as nixl_api
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlConnector
from vllm.platforms import current_platform

from ems.errors import ConfigError
from ems.vllm.peer.hand_off import HandOffLog, logger, own_address, translated

KEYS = (
    "backends", "num_threads", "kv_lease_duration", "kv_recompute_threshold", "bidirectional_kv_xfer",
    "decoder_kv_blocks_ttl", "engine_ttl", "enforce_handshake_compat",
)  # fmt: skip
"""What vLLM's NIXL connector understands in ``kv_connector_extra_config``."""

LOOK_MICROSECONDS = 1000
"""On a CPU, the rest of the transport's thread between two looks for what a peer wants."""


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
        on_cpu = role is KVConnectorRole.WORKER and current_platform.device_type == "cpu"
        with resting_agents() if on_cpu else nullcontext():
            super().__init__(translated(vllm_config, role, KEYS), role, kv_cache_config)
        if role is KVConnectorRole.SCHEDULER:
            self._place = ListeningPlace(*_wanted_place(vllm_config))
            self.connector_scheduler.side_channel_host = self._place.host
            self.connector_scheduler.side_channel_port = self._place.port
        elif on_cpu:
            # The transport's threads keep the core that vLLM reserves for them, the thread that computes goes back.
            os.sched_setaffinity(0, cores)

    def shutdown(self) -> None:
        super().shutdown()
        if self.connector_scheduler is not None:
            self._place.close()


@contextmanager
def resting_agents() -> Iterator[None]:
    """Threads of NIXL agents that are made inside sleep between two looks.

    NIXL has a setting for this, and its Python interface leaves it at 0.  Then each agent keeps a core busy, and
    several agents on one core block it for seconds.
    """
    bindings = nixl_api.nixlBind
    make = bindings.nixlAgent

    def made(name: str, config: Any) -> Any:
        config.pthrDelay = LOOK_MICROSECONDS
        return make(name, config)

    bindings.nixlAgent = made
    try:
        yield
    finally:
        bindings.nixlAgent = make


def _wanted_place(vllm_config: Any) -> tuple[str, int]:
    """Where peers are to ask for this engine's memory: this machine's address, ``kv_port`` plus the data-parallel rank.

    NIXL's own variables go first.
    """
    host = os.environ.get("VLLM_NIXL_SIDE_CHANNEL_HOST") or own_address()
    base = int(os.environ.get("VLLM_NIXL_SIDE_CHANNEL_PORT") or vllm_config.kv_transfer_config.kv_port)
    return host, base + vllm_config.parallel_config.data_parallel_index


class ListeningPlace:
    """A port of this machine that the transport may listen on: the wanted one, or a free one where that is taken.

    vLLM listens a moment later, and would wait for ever if it could not.  So the port is marked as ours among the
    engines of this machine, by a name that the kernel gives to one process and frees when that ends.
    """

    def __init__(self, host: str, wanted: int) -> None:
        if not 0 < wanted < 65536:
            raise ConfigError(f"kv_port (plus the data-parallel rank) is {wanted}, expected 1 to 65535")
        self.host = host
        self._mark = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._mark.bind(f"\0ems-side-channel/{host}/{wanted}")
            self.port = _bind(host, wanted)
        except OSError:
            self._mark.close()
            self.port = self._another()
            logger.info("port %d (kv_port) is taken on this machine, %d is used instead", wanted, self.port)

    def _another(self) -> int:
        try:
            return _bind(self.host, 0)
        except OSError as error:
            raise ConfigError(
                f"this machine cannot listen on its address {self.host!r} ({error.strerror}); "
                "set VLLM_NIXL_SIDE_CHANNEL_HOST to one of its addresses that the other side reaches"
            ) from error

    def close(self) -> None:
        self._mark.close()


def _bind(host: str, port: int) -> int:
    """The port that a listener at ``host`` would get; 0 asks for a free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))
        return int(probe.getsockname()[1])
