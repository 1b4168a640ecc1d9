"""The connector inside vLLM's worker: starts copies and reports their ends, never waits for one.

vLLM calls all hooks on one thread; the copies run in the threads of :mod:`ems.vllm.transfers`.
"""

from __future__ import annotations

import threading

import torch
from vllm.logger import init_logger

from ems.cc_v1.tensors import BlockRows, CpuDevice, Device, device_of
from ems.errors import ConfigError, EmsError
from ems.pool.client import PoolClient
from ems.pool.launcher import ensure_node
from ems.pool.touch import warm, yield_to_others
from ems.vllm.metadata import StepMetadata
from ems.vllm.model import BlockModel
from ems.vllm.settings import ConnectorSettings
from ems.vllm.transfers import Loader, SaveBatch, Saver

logger = init_logger("vllm.ems.worker")


class WorkerSide:
    """Hooks that vLLM's model runner calls."""

    def __init__(self, settings: ConnectorSettings, model: BlockModel) -> None:
        self._settings = settings
        self._model = model
        self._client = PoolClient(settings.socket, "vllm-worker", self._let_go)
        self._loader: Loader | None = None
        self._saver: Saver | None = None
        # One for each direction, so that loads do not queue behind saves; memory is pinned through the first.
        self._load_device: Device = CpuDevice()
        self._save_device: Device = CpuDevice()
        self._batch: SaveBatch | None = None
        self._step: StepMetadata | None = None
        self._loads_started = False
        self._warmed = 0
        self._awaited: set[str] = set()
        self._invalid: set[int] = set()

    # Set-up

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """VLLM's ``register_kv_caches``.

        Raises:
            ConfigError: the tensors are not what the engine's configuration says.
        """
        missing = [name for name in self._model.layers if name not in kv_caches]
        if missing:
            raise ConfigError(f"the engine registered no KV cache for layer {missing[0]}, expected all of its group")
        first = kv_caches[self._model.layers[0]]
        rows = BlockRows([kv_caches[name] for name in self._model.layers], list(self._model.layers))
        expected = self._model.namespace.page_size
        if rows.page_bytes != expected or rows.num_blocks != self._model.num_blocks:
            shape = tuple(first.shape)
            raise ConfigError(
                f"the engine registered {rows.num_blocks} blocks of {rows.page_bytes} bytes (first tensor {shape}), "
                f"but its configuration says {self._model.num_blocks} blocks of {expected} bytes"
            )
        self._load_device, self._save_device = device_of(first), device_of(first)
        self._start_node()
        namespace, timeout = self._model.namespace, self._settings.call_timeout
        self._loader = Loader(self._client, namespace, rows, self._load_device, logger, timeout)
        if self._settings.saves:
            self._saver = Saver(self._client, namespace, rows, self._save_device, logger, timeout)
        self._warm_once()

    def _start_node(self) -> None:
        try:
            if self._settings.autostart and ensure_node(self._settings.node_config()):
                logger.info("EMS started a pool node on this host, its socket is %s", self._settings.socket)
            self._client.open(self._model.namespace)
        except EmsError as error:
            logger.warning("EMS pool cannot be used, serving on without it: %s", error)
            return
        logger.info(
            "EMS serves namespace %s: %d tokens a block, %d bytes a page",
            self._model.namespace.name,
            self._model.block_size,
            self._model.namespace.page_size,
        )

    def _warm_once(self) -> None:
        """Begin to map the node's segments, once a connection, so that no request pays for it."""
        epoch = self._client.epoch
        if epoch not in (0, self._warmed):
            self._warmed = epoch
            threading.Thread(target=self._warm, name="ems-warm", daemon=True).start()

    def _warm(self) -> None:
        try:
            self._client.connect()
            segments = self._client.segments(self._client.epoch)
            yield_to_others()
            for number in range(self._client.segment_count):
                mapped = segments.segment(number)
                warm(mapped)
                self._load_device.pin(mapped)
        except (EmsError, OSError, RuntimeError) as error:
            logger.debug("EMS segments are mapped later: %s", error)

    def _let_go(self, mapped: memoryview) -> None:
        """A segment is about to be unmapped."""
        self._load_device.synchronise()
        self._save_device.synchronise()
        self._load_device.unpin(mapped)

    # Steps

    def preempted(self, step: StepMetadata) -> None:
        """Some requests' blocks go to others once this returns (vLLM's ``handle_preemptions``)."""
        if self._saver is not None:
            for request_id in step.preempted:
                self._saver.cancel(request_id)

    def begin(self, step: StepMetadata) -> None:
        """The step's metadata arrived; its forward pass has not begun."""
        self._warm_once()
        self._step = step
        self._loads_started = False
        self._awaited |= step.awaited
        if self._saver is not None and step.saves:
            self._batch = self._saver.start(step.saves)
        if isinstance(self._load_device, CpuDevice):
            # Nothing of an earlier step still runs on this device, so loads need not wait for the launch.
            self.start_loads()

    def start_loads(self) -> None:
        """VLLM's ``start_load_kv``."""
        if self._step is None or self._loads_started or self._loader is None:
            return
        self._loads_started = True
        mark = self._load_device.mark() if self._step.loads else None
        for load in self._step.loads:
            self._loader.start(load, mark)

    def computed(self) -> None:
        """VLLM's ``wait_for_save``: the forward pass was launched; its blocks may be copied behind it."""
        batch, self._batch = self._batch, None
        if batch is not None:
            batch.computed(self._save_device.mark())

    def end(self) -> None:
        """The step is over."""
        self._step = None

    # Results

    def results(self) -> tuple[set[str], set[str]]:
        """Requests whose saves are done and that the engine waits for, requests whose loads ended."""
        received = set()
        for result in self._loader.results() if self._loader is not None else ():
            received.add(result.request_id)
            self._invalid |= result.failed_blocks
            logger.info(
                "KV cache transfer for request %s took %.2f ms (%d blocks, %d failed)",
                result.request_id,
                result.seconds * 1000,
                result.loaded,
                len(result.failed_blocks),
            )
        saver = self._saver
        sent = {request_id for request_id in self._awaited if saver is None or not saver.busy(request_id)}
        self._awaited -= sent
        return sent, received

    def take_invalid_blocks(self) -> set[int]:
        """Blocks of loads reported by :meth:`results` that hold nothing."""
        invalid, self._invalid = self._invalid, set()
        return invalid

    def close(self) -> None:
        """The engine stops: finish what is queued, bounded."""
        for thread in (self._loader, self._saver):
            if thread is not None:
                thread.close()
        self._client.close()
