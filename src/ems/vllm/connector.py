"""``EmsStoreConnector``: the class that vLLM makes, once in its scheduler and once in each worker.

It only forwards: decisions are in :mod:`ems.vllm.requests`, copies in :mod:`ems.vllm.loads` and
:mod:`ems.vllm.saves`.  A pool is an accelerator, so nothing here fails a request: what cannot be loaded is computed.
"""

from __future__ import annotations

from functools import partial
from typing import Any
from weakref import WeakValueDictionary

from vllm.distributed.kv_events import KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.distributed.parallel_state import get_pp_group, get_tensor_model_parallel_rank
from vllm.logger import init_logger

from ems.errors import ConfigError
from ems.pool.client.pool_client import PoolClient
from ems.vllm import compat
from ems.vllm.adapters import Adapters, how_used, watch_loads
from ems.vllm.configuration.settings import read_settings, reads_by_layer
from ems.vllm.hooks import follow_engine, note_publisher
from ems.vllm.kv_events.events import BlockEvents, ChangeFeed, publishes_events
from ems.vllm.metadata import QUIET, StepMetadata, StepReport
from ems.vllm.model import describe, local_planes
from ems.vllm.reporting.stats import EmsPromMetrics, EmsStats
from ems.vllm.scheduler import SchedulerSide
from ems.vllm.worker import WorkerSide

logger = init_logger("vllm.ems")

_WORKERS: WeakValueDictionary[str, WorkerSide] = WeakValueDictionary()
"""The worker sides of engines that run in one process, by the engine's id."""


def _end_saves(engine_id: str, seconds: float) -> None:
    worker = _WORKERS.get(engine_id)
    if worker is not None:
        worker.finish_saves(seconds)


def _adapters(vllm_config: Any) -> Adapters | None:
    """The engine's adapters, if it has any and this release shows what it reads; this process notes it from now on."""
    lora = getattr(vllm_config, "lora_config", None)
    return Adapters(how_used(lora)) if lora is not None and watch_loads() else None


def _nothing(*_given: object, **_named: object) -> None:
    """There is nothing to be done."""


class IdleSide:
    """Either side of a connector that serves without the pool, because the user prefers that to an engine that refuses.

    Every hook answers as one does that never finds, loads or stores anything.
    """

    saving = in_layers = has_results = False
    bind = on_new_request = allocated = received = paused = reset = weights_declared = adapter_loaded = _nothing
    register = begin = end = start_loads = wait_for_layer = computed_layer = computed = _nothing
    call_off = finish_saves = take_report = take_stats = close = _nothing

    def match(self, _request: Any, _local: int) -> tuple[int | None, bool]:
        return 0, False

    def build_metadata(self, _output: Any) -> StepMetadata:
        return QUIET

    def finished(self, _request: Any, _block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        return False, None

    def take_events(self) -> list[Any]:
        return []

    def results(self) -> tuple[set[str], set[str]]:
        return set(), set()

    def take_invalid_blocks(self) -> set[int]:
        return set()


class EmsStoreConnector(KVConnectorBase_V1, SupportsHMA):
    """The pool of this host behind one engine."""

    _cache_hit_source = compat.HOST_HIT
    """What was loaded came from this host's memory."""

    _scheduler: SchedulerSide | IdleSide
    _worker: WorkerSide | IdleSide
    _side: SchedulerSide | WorkerSide | IdleSide
    """The one of these that is here; hooks are called in each step, so nothing is asked on the way to it."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        extra = transfer.kv_connector_extra_config
        try:
            settings, warnings = read_settings(transfer.kv_role, extra)
            model = describe(vllm_config, kv_cache_config, settings)
            compat.check_failures(model.groups, any(plane.window for plane in model.planes))
        except ConfigError as error:
            if extra.get("on_error") != "serve_without":
                raise
            if role is KVConnectorRole.SCHEDULER:
                logger.warning("EMS cannot be used, serving without it: %s", error)
            self._side = self._scheduler = self._worker = IdleSide()
            return
        if role is KVConnectorRole.SCHEDULER:
            for warning in filter(None, (compat.untested_release(), *warnings)):
                logger.warning("EMS: %s", warning)
            if transfer.kv_load_failure_policy != "recompute":
                # vLLM's default fails the request; a cache that lost a page must not.
                logger.info("EMS sets kv_load_failure_policy to recompute")
                transfer.kv_load_failure_policy = "recompute"
            parallel = vllm_config.parallel_config
            may_load_in_step = compat.may_load_in_step(vllm_config)
            if settings.load_async is False and not may_load_in_step:
                logger.warning(
                    "EMS: load_async is false, but with Model Runner V2, asynchronous scheduling or pipeline "
                    "parallelism vLLM computes wrong tokens behind a load that fails within a step, so loads are made "
                    "between steps"
                )
            workers = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
            step_tokens = vllm_config.scheduler_config.max_num_batched_tokens
            events = None
            if publishes_events(vllm_config):
                client = PoolClient(settings.socket, "vllm-events", credentials=settings.credentials)
                feed = ChangeFeed(client, model.namespaces, logger)
                tokens = partial(compat.hash_tokens, kv_cache_config, model.block_size)
                specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
                events = BlockEvents(model, specs, tokens, feed)
                note_publisher(partial(setattr, events, "publisher"))
            self._side = self._scheduler = SchedulerSide(
                settings,
                model,
                workers,
                step_tokens=step_tokens,
                may_load_in_step=may_load_in_step,
                in_lockstep=parallel.data_parallel_size > 1 and vllm_config.model_config.is_moe,
                events=events,
                adapters=_adapters(vllm_config),
            )
            follow_engine()
            self._scheduler.end_saves = partial(_end_saves, transfer.engine_id)
        else:
            planes = local_planes(
                model, vllm_config, kv_cache_config, get_tensor_model_parallel_rank(), get_pp_group().rank_in_group
            )
            _adapters(vllm_config)
            worker = WorkerSide(settings, model, planes, hosts=compat.hosts_of_ranks())
            self._side = self._worker = _WORKERS[transfer.engine_id] = worker

    @property
    def requires_kv_delivery(self) -> bool:
        """A save that is dropped is a later miss, nothing more."""
        return False

    # supports_divergent_local_hybrid_hits stays False: vLLM would ask behind the blocks of full attention that it has,
    # where a pool that reaches no further has nothing to add, and not load the state that only the pool has there.

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """A graph of the whole model has no hooks between layers, so it would read blocks before they are loaded."""
        return reads_by_layer(extra_config)

    # Scheduler side

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._scheduler.bind(gpu_block_pool)

    def has_pending_push_work(self) -> bool:
        """While this is true vLLM makes steps, and in them workers report their saves."""
        return self._scheduler.saving

    def on_new_request(self, request: Any) -> None:
        self._scheduler.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._scheduler.match(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._scheduler.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return self._scheduler.build_metadata(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        received = connector_output.finished_recving or ()
        invalid = connector_output.invalid_block_ids
        report = getattr(connector_output, "kv_connector_worker_meta", None)
        if received or invalid or report is not None:
            self._scheduler.received(received, compat.failed_receives(connector_output), invalid, report)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler.finished(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler.finished(request, block_ids)

    def reset_cache(self) -> bool:
        self._scheduler.reset()
        return True

    def weights_declared(self, version: str) -> None:
        self._scheduler.weights_declared(version)

    def adapter_loaded(self, lora: Any) -> None:
        self._scheduler.adapter_loaded(lora)

    def paused(self, *, paused: bool) -> None:
        self._scheduler.paused(paused=paused)

    def take_events(self) -> list[KVCacheEvent]:
        return self._scheduler.take_events()

    # Both sides

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        return self._side.take_stats()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        return EmsStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[type, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        return EmsPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # Worker side

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._worker.register(kv_caches)

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        if isinstance(kv_connector_metadata, StepMetadata):  # releases before told which requests are preempted
            self._worker.call_off(kv_connector_metadata)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, StepMetadata)
        self._worker.begin(connector_metadata)

    def clear_connector_metadata(self) -> None:
        super().clear_connector_metadata()
        self._worker.end()

    def has_connector_metadata(self) -> bool:
        """VLLM calls the hooks of each layer only if this is true."""
        return self._worker.in_layers

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._worker.start_loads()

    def wait_for_layer_load(self, layer_name: str) -> None:
        self._worker.wait_for_layer(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        self._worker.computed_layer(layer_name)

    def wait_for_save(self) -> None:
        """Saves begin now and hold their blocks; the step does not wait for them."""
        self._worker.computed()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return None, self._worker.results()[0]

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        if not self._worker.has_results:
            return compat.KVConnectorTransferResults()
        received, failed = self._worker.results()
        return compat.KVConnectorTransferResults(finished_recving=received, failed_recving=failed)

    def build_connector_worker_meta(self) -> StepReport | None:
        return self._worker.take_report()

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.take_invalid_blocks()

    def shutdown(self) -> None:
        self._side.close()


# Other names that people have in their files, with the same keys.  They are classes of their own, because vLLM finds a
# connector's metrics by the name of its class.


class AscendStoreConnector(EmsStoreConnector):
    """The pool of this host behind one engine."""


class MooncakeConnectorStoreV1(EmsStoreConnector):
    """The same under its oldest name."""
