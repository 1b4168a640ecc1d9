"""What vLLM's ``OffloadingConnector`` makes of ``"spec_name": "EmsOffloadingSpec"``: a manager or a worker over a pool.

vLLM tells a spec neither the engine's configuration nor which connector makes it, and both are needed: what the model
is gives the bytes of a page their meaning, and only the connector can report a load that failed.  They are
taken from the frame of the connector that is being made.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingManager, OffloadingSpec, OffloadingWorker
from vllm.v1.kv_offload.config import OffloadingConfig

from ems.errors import ConfigError, EmsError
from ems.pool.client.answers import Namespace
from ems.pool.client.line import RESTART_SECONDS
from ems.pool.client.pool_client import PoolClient
from ems.pool.keys import fingerprint, namespace_name
from ems.pool.node.launcher import ensure_node
from ems.transfers.device import DevicePair
from ems.vllm.configuration.settings import ConnectorSettings, read_settings
from ems.vllm.memory import map_segments
from ems.vllm.model import check_run, engine_facts, model_name
from ems.vllm.offloading.manager import EmsOffloadingManager
from ems.vllm.offloading.mover import EmsOffloadingWorker, group_rows, page_sizes_of
from ems.vllm.offloading.search import Group

logger = init_logger("vllm.ems.offloading")

CHUNK_TOKENS = 256
"""Tokens a chunk where the user names neither ``block_size`` nor ``blocks_per_chunk``."""
LAYOUT_VERSION = 1
"""Grows when the meaning of a stored chunk changes."""
_OF_VLLM = frozenset(
    {
        "spec_name", "spec_module_path", "block_size", "blocks_per_chunk", "offload_prompt_only", "canonical_layout",
        "self_describing_kv_events",
    }
)  # fmt: skip
"""Settings that vLLM reads itself."""


class _Engine(NamedTuple):
    """The connector that makes this spec, and what it was given."""

    connector: Any
    vllm_config: Any
    kv_cache_config: Any


def _engine() -> _Engine:
    frame = sys._getframe()  # noqa: SLF001 - there is no other way to them, see above
    while frame.f_back is not None:
        frame = frame.f_back
        known = frame.f_locals
        if isinstance(known.get("self"), OffloadingConnector) and {"vllm_config", "kv_cache_config"} <= known.keys():
            return _Engine(known["self"], known["vllm_config"], known["kv_cache_config"])
    raise ConfigError("EmsOffloadingSpec is for vLLM's OffloadingConnector, name that as kv_connector")


class EmsOffloadingSpec(OffloadingSpec):
    """Chunks of an engine's KV cache in the pool of its host."""

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        self._connector, vllm_config, kv_cache_config = _engine()
        transfer = vllm_config.kv_transfer_config
        own = {name: value for name, value in config.extra_config.items() if name not in _OF_VLLM}
        self._settings, warnings = read_settings(transfer.kv_role, own)
        for warning in warnings:
            logger.warning("EMS: %s", warning)
        check_run(vllm_config)
        if vllm_config.lora_config is not None:
            raise ConfigError("EmsOffloadingSpec does not serve LoRA adapters, use the connector EmsStoreConnector")
        # vLLM's default fails the request; a cache that lost a page must not.
        transfer.kv_load_failure_policy = "recompute"
        specs = [kv_cache_config.kv_cache_groups[group.group_id].kv_cache_spec for group in config.groups]
        self.blocks_per_chunk = self._blocks_a_chunk(config, specs)
        self._groups = [
            Group(group.group_id, group.tokens_per_block * self.blocks_per_chunk, self._window(spec, group))
            for group, spec in zip(config.groups, specs, strict=True)
        ]
        self._identity = self._named(vllm_config, config, specs)

    def _blocks_a_chunk(self, config: OffloadingConfig, specs: list[Any]) -> int:
        if {"block_size", "blocks_per_chunk"} & config.extra_config.keys():
            return int(config.cache.blocks_per_chunk)
        if any(isinstance(spec, MambaSpec) for spec in specs):
            return 1  # vLLM stores a state only where a block ends that ends a chunk, too
        return max(CHUNK_TOKENS // max(int(group.tokens_per_block) for group in config.groups), 1)

    def _window(self, spec: Any, group: Any) -> int:
        """How many last chunks of a group a load needs; 0 for all of them."""
        if isinstance(spec, FullAttentionSpec):
            return 0
        if isinstance(spec, MambaSpec):
            return 1
        tokens = int(getattr(spec, "sliding_window", 0) or getattr(spec, "attention_chunk_size", 0))
        tokens += int(getattr(spec, "extra_retained_tokens", 0))
        return -(-tokens // (int(group.tokens_per_block) * self.blocks_per_chunk)) + 1

    def _named(self, vllm_config: Any, config: OffloadingConfig, specs: list[Any]) -> str:
        parallel = config.parallel
        facts = {
            "layout_version": LAYOUT_VERSION,
            **engine_facts(vllm_config, self._settings),
            "groups": [repr(spec) for spec in specs],
            "layers": [list(group.layer_names) for group in config.groups],
            "blocks_per_chunk": self.blocks_per_chunk,
            "tokens_per_hash": config.cache.tokens_per_hash,
            "hash": str(vllm_config.cache_config.prefix_caching_hash_algo),
            "layout": str(config.kv_cache_layout),
            "ranks": [parallel.world_size, parallel.tp_size, parallel.pp_size],
        }
        name = model_name(vllm_config)
        return namespace_name(self._settings.tenant, name, fingerprint(facts))

    def _namespaces(self, rank: int, page_sizes: list[int]) -> list[Namespace]:
        return [
            Namespace(f"{self._identity}/{group.number}.{rank}", size)
            for group, size in zip(self._groups, page_sizes, strict=True)
        ]

    def get_manager(self) -> OffloadingManager:
        ranks = range(self.config.parallel.world_size)
        # Whoever only looks needs no size of a page.
        namespaces = [self._namespaces(rank, [0] * len(self._groups)) for rank in ranks]
        return EmsOffloadingManager(self._settings, self._identity, self._groups, namespaces)

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        groups = group_rows(kv_caches, self.blocks_per_chunk)
        rank = self.config.parallel.rank
        namespaces = self._namespaces(rank, page_sizes_of(groups))
        devices = DevicePair([tensor for rows in groups for tensor in rows.tensors])
        client = PoolClient(
            self._settings.socket,
            "vllm-offloading",
            devices,
            credentials=self._settings.credentials,
            restart_seconds=RESTART_SECONDS,
        )
        start(self._settings, client, namespaces)
        worker = EmsOffloadingWorker(client, devices, rank, groups, namespaces, self._settings.call_timeout)
        report_failures(self._connector, worker)
        return worker


def report_failures(connector: Any, worker: EmsOffloadingWorker) -> None:
    """Let ``connector`` say which requests' loads failed: of models with several groups vLLM takes no other word."""

    def get_transfer_results(finished_req_ids: set[str]) -> KVConnectorTransferResults:
        loads = dict(connector.connector_worker._load_jobs)  # noqa: SLF001 - forgotten with what is finished
        sent, received = connector.get_finished(finished_req_ids)
        return KVConnectorTransferResults(sent, received, {loads[number] for number in worker.take_failed_loads()})

    connector.get_transfer_results = get_transfer_results


def start(settings: ConnectorSettings, client: PoolClient, namespaces: list[Namespace]) -> None:
    """Start a node if need be, and make the namespaces known; without a node the engine serves on."""
    try:
        if settings.autostart and ensure_node(settings.node_config()):
            logger.info("EMS started a pool node on this host, its socket is %s", settings.socket)
        for namespace in namespaces:
            client.open(namespace)
            logger.info("EMS serves namespace %s: pages of %d bytes", namespace.name, namespace.page_size)
        # Here, because drivers register no memory while the engine captures its graphs, which it does next.
        map_segments(client)
    except (EmsError, OSError) as error:
        logger.warning("EMS pool cannot be used, serving on without it: %s", error)
