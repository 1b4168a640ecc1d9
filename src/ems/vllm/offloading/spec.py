"""What vLLM's ``OffloadingConnector`` makes of ``"spec_name": "EmsOffloadingSpec"``: a manager or a worker over a pool.

vLLM tells a spec neither the engine's configuration nor which connector makes it nor how its layers' tensors are
shaped, and all of these are needed: what the model is gives the bytes of a page their meaning, engines that run their
kernels otherwise share pages cut by heads and tokens, and only the connector hears of a request's tokens and can report
a load that failed.  They are taken from the frames of the calls that lead here.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.distributed.parallel_state import get_pp_group, get_tensor_model_parallel_rank
from vllm.logger import init_logger
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingManager, OffloadingSpec, OffloadingWorker
from vllm.v1.kv_offload.config import OffloadingConfig

from ems.errors import ConfigError
from ems.pool.client.mapping import map_segments
from ems.transfers.device import DevicePair
from ems.vllm import compat
from ems.vllm.configuration.settings import read_settings
from ems.vllm.hooks import follow_engine
from ems.vllm.model import check_alone, check_hosts, describe, local_planes
from ems.vllm.node import make_client, serve
from ems.vllm.offloading.manager import EmsOffloadingManager
from ems.vllm.offloading.worker import EmsOffloadingWorker
from ems.vllm.pages import plane_rows

logger = init_logger("vllm.ems.offloading")

_OF_VLLM = (
    "spec_name", "spec_module_path", "block_size", "blocks_per_chunk", "offload_prompt_only", "canonical_layout",
    "self_describing_kv_events", "sync_load_budget_bytes",
)  # fmt: skip
"""Settings that vLLM reads itself."""
_UNUSED = (
    "discard_partial_chunks", "explain", "load_async", "num_min_load_blocks", "num_min_reuse_tokens",
    "save_decode_cache", "use_layerwise",
)  # fmt: skip
"""Settings of ``EmsStoreConnector`` for what ``OffloadingConnector`` decides by itself, or does not do."""


def _caller(kind: type, *names: str) -> dict[str, Any]:
    """The local variables of the nearest call of a method of ``kind`` that has these ``names``."""
    frame = sys._getframe()  # noqa: SLF001 - there is no other way to them, see above
    while frame.f_back is not None:
        frame = frame.f_back
        known = frame.f_locals
        if isinstance(known.get("self"), kind) and known.keys() >= {*names}:
            return dict(known)
    raise ConfigError("EmsOffloadingSpec is for vLLM's OffloadingConnector, name that as kv_connector")


class EmsOffloadingSpec(OffloadingSpec):
    """Chunks of an engine's KV cache in the pool of its host."""

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        caller = _caller(OffloadingConnector, "vllm_config", "kv_cache_config")
        self._connector, self._engine, self._kv_caches = (
            caller[name] for name in ("self", "vllm_config", "kv_cache_config")
        )
        transfer = self._engine.kv_transfer_config
        check_loads(config.extra_config)
        own = {name: value for name, value in config.extra_config.items() if name not in _OF_VLLM}
        settings, warnings = read_settings(transfer.kv_role, own)
        for warning in filter(None, (*warnings, unused(own))):
            logger.warning("EMS: %s", warning)
        if self._engine.lora_config is not None:
            raise ConfigError("EmsOffloadingSpec does not serve LoRA adapters, use the connector EmsStoreConnector")
        # vLLM's default fails the request; a cache that lost a page must not.
        if transfer.kv_load_failure_policy != "recompute":
            logger.info("EMS sets kv_load_failure_policy to recompute")
            transfer.kv_load_failure_policy = "recompute"
        if {"block_size", "blocks_per_chunk"} & config.extra_config.keys():
            tokens = config.cache.blocks_per_chunk * math.lcm(*(group.tokens_per_block for group in config.groups))
            settings = msgspec.structs.replace(settings, chunk_tokens=tokens)
        self._settings = settings
        self._groups = [group.group_id for group in config.groups]
        self._model = describe(self._engine, self._kv_caches, settings, offloaded=self._groups)
        self.blocks_per_chunk = self._model.page_blocks
        self._worker: EmsOffloadingWorker | None = None

    def get_manager(self) -> OffloadingManager:
        drafts = any(self._kv_caches.kv_cache_groups[group].is_eagle_group for group in self._groups)
        manager = EmsOffloadingManager(self._settings, self._model, self._groups, drops_last=drafts)
        self._connector.on_new_request = _both(manager.arrived, self._connector.on_new_request)
        allocate = self._connector.update_state_after_alloc
        self._connector.update_state_after_alloc = _both(allocate, manager.allocated)
        self._connector.bind_gpu_block_pool = _both(self._connector.bind_gpu_block_pool, manager.bind)
        self._connector.weights_declared = manager.weights_declared
        self._connector.paused = self._connector.adapter_loaded = _both()
        follow_engine()
        return manager

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        check_alone(self._worker)
        check_hosts(compat.hosts_of_ranks())
        layers = _caller(OffloadingConnectorWorker, "kv_caches", "kv_cache_config")["kv_caches"]
        rank, stage = get_tensor_model_parallel_rank(), get_pp_group().rank_in_group
        local = local_planes(self._model, self._engine, self._kv_caches, rank, stage)
        planes = plane_rows(local, layers, self._model.num_blocks, self.blocks_per_chunk)
        devices = DevicePair([tensor for plane in planes for tensor in plane.rows.tensors])
        client = make_client(self._settings, "vllm-offloading", devices)
        serve(self._settings, client, planes, self._model.chunk_tokens, logger)
        # Here, because drivers register no memory while the engine captures its graphs, which it does next.
        map_segments(client, logger)
        worker = self._worker = EmsOffloadingWorker(
            client, devices, planes, self._groups, self.blocks_per_chunk, self._settings.call_timeout
        )
        report_failures(self._connector, worker)
        return worker


def _both(*calls: Any) -> Any:
    def call(*given: Any, **named: Any) -> None:
        for one in calls:
            one(*given, **named)

    return call


def unused(extra: Mapping[str, Any]) -> str | None:
    """What is to be said of settings that mean nothing here."""
    named = ", ".join(key for key in _UNUSED if key in extra)
    return f"EmsOffloadingSpec does not use {named}; EmsStoreConnector does" if named else None


def check_loads(extra: Mapping[str, Any]) -> None:
    """Refuse loads within a step, which vLLM makes from 0.33 on if asked to: no failure of theirs could be reported.

    Raises ConfigError: they were asked for.
    """
    if extra.get("sync_load_budget_bytes"):
        raise ConfigError("sync_load_budget_bytes is set, but EmsOffloadingSpec loads between steps; leave it out")


def report_failures(connector: Any, worker: EmsOffloadingWorker) -> None:
    """Let ``connector`` say which requests' loads failed: of models with several groups vLLM takes no other word."""

    def get_transfer_results(finished_req_ids: set[str]) -> KVConnectorTransferResults:
        loads = dict(connector.connector_worker._load_jobs)  # noqa: SLF001 - forgotten with what is finished
        sent, received = connector.get_finished(finished_req_ids)
        return KVConnectorTransferResults(sent, received, {loads[number] for number in worker.take_failed_loads()})

    connector.get_transfer_results = get_transfer_results
