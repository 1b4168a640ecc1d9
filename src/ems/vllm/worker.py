"""The connector inside vLLM's worker: starts copies and reports their ends, never waits for one.

vLLM calls all hooks on one thread; the copies run in the threads of :mod:`ems.vllm.loads` and :mod:`ems.vllm.saves`.
"""

from __future__ import annotations

import threading
from collections import Counter

import msgspec
import torch
from vllm.logger import init_logger

from ems.errors import ConfigError
from ems.pool.client.mapping import map_segments
from ems.transfers.device import DevicePair
from ems.vllm.adapters import has_read
from ems.vllm.configuration.settings import ConnectorSettings
from ems.vllm.layers import LayerOrder
from ems.vllm.loads import Loader, LoadJob
from ems.vllm.metadata import QUIET, StepMetadata, StepReport
from ems.vllm.model import BlockModel, LocalPlane, check_alone, check_hosts
from ems.vllm.node import make_client, serve
from ems.vllm.pages import PlaneRows, plane_rows
from ems.vllm.reporting.stats import EmsStats, Transferred
from ems.vllm.saves import SaveBatch, Saver

logger = init_logger("vllm.ems.worker")

IDLE_SECONDS = 0.01
"""How long a step without work waits for a load.

Otherwise the engine would make more such steps, which cost milliseconds each and keep the interpreter from the loading
thread.  A request that arrives meanwhile waits as long.
"""


class WorkerSide:
    """Hooks that vLLM's model runner calls."""

    def __init__(
        self, settings: ConnectorSettings, model: BlockModel, planes: list[LocalPlane], *, hosts: int = 1
    ) -> None:
        self._settings = settings
        self._hosts = hosts
        self._model = model
        self._planes = planes
        self._rows: list[PlaneRows] = []
        self._devices = DevicePair()
        self._client = make_client(settings, "vllm-worker", self._devices)
        self._loader: Loader | None = None
        self._saver: Saver | None = None
        self._order = LayerOrder(())
        self._batch: SaveBatch | None = None
        self._step: StepMetadata | None = None
        self._loads_started = False
        self.in_layers = False
        """Whether the layers of the step under way have to wait for loads, or are stored one by one."""
        self._in_step_jobs: list[LoadJob] = []
        self._warmed = 0
        self._invalid: set[int] = set()
        self._failed: set[str] = set()
        self._report: Counter[str] = Counter()
        self._saved: list[int] = []
        """Saves that are over, to be reported."""
        self._transfers: list[Transferred] = []
        self._errors: Counter[str] = Counter()
        self._leading = any(plane.leading and not plane.portion.replica for plane in planes)

    # Set-up

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """VLLM's ``register_kv_caches``.

        Raises ConfigError: the tensors are not what the engine's configuration says, the ranks run on several hosts, or
        another engine has registered.
        """
        check_alone(self._loader)
        try:
            check_hosts(self._hosts)
            self._rows = plane_rows(self._planes, kv_caches, self._model.num_blocks, self._model.page_blocks)
        except ConfigError as error:
            if self._settings.on_error != "serve_without":
                raise
            logger.warning("EMS cannot be used, serving without it: %s", error)
            # Loads of such a rank fail.
            self._loader = Loader(self._client, (), self._devices.load, logger, self._settings.call_timeout)
            return
        self._order = LayerOrder(self._rows)
        self._devices.serve([tensor for rows in self._rows for tensor in rows.rows.tensors])
        serve(self._settings, self._client, self._rows, self._model.chunk_tokens, logger)
        timeout, by_layer = self._settings.call_timeout, self._settings.layerwise
        self._loader = Loader(self._client, self._rows, self._devices.load, logger, timeout, by_layer=by_layer)
        if self._settings.saves:
            save, blocks = self._devices.save, self._model.num_blocks
            self._saver = Saver(
                self._client, self._rows, save, logger, timeout, by_layer=by_layer, engine_blocks=blocks
            )
        if self._devices.load.at_once:
            self._warm_once()
        else:
            # Drivers register no memory while the engine captures its graphs, which it does next.
            self._warmed = self._client.epoch
            map_segments(self._client, logger)

    def _warm_once(self) -> None:
        """Start to map the node's segments, once for each connection, so that no request waits for it."""
        epoch = self._client.epoch
        if epoch not in (0, self._warmed):
            self._warmed = epoch
            threading.Thread(target=map_segments, args=(self._client, logger), name="ems-warm", daemon=True).start()

    # Steps

    def call_off(self, step: StepMetadata) -> None:
        """VLLM's ``handle_preemptions``, before it clears or copies blocks: no save reads what went back any more.

        Its Model Runner V2 has begun to clear them by then.
        """
        if step.call_off and self._saver is not None:
            self._saver.call_off()

    def begin(self, step: StepMetadata) -> None:
        """The step's metadata arrived, before its forward pass."""
        if self._batch is not None:
            # All stages but the last of a pipeline are not told that a step with drafts was computed.
            self.computed()
        if self._saver is not None:
            self._saver.step_begins()
        self._step = step
        self._in_step_jobs = []
        self._loads_started = step is QUIET
        self.in_layers = False
        if step is QUIET:
            return
        self._warm_once()
        if self._saver is None:
            self._saved += [save.number for save in step.saves]
        else:
            self.call_off(step)
            if step.saves:
                self._batch = self._saver.start(step.saves, after_output=True)
                self.in_layers = self._batch.by_layer
        if self._devices.load.at_once:
            # Nothing of an earlier step still runs on this device, so loads need not wait for the launch.
            self.start_loads()

    def start_loads(self) -> None:
        """VLLM's ``start_load_kv``; waits for what the forward pass may write into, or for all that it reads."""
        if self._step is None or self._loads_started or self._loader is None:
            return
        self._loads_started = True
        mark = self._devices.load.mark() if self._step.loads else None
        urgent: list[LoadJob] = []
        for load in self._step.loads:
            if not self._rows or (load.adapter is not None and not has_read(load.adapter, before=True)):
                load = msgspec.structs.replace(load, broken=True)  # noqa: PLW2901 - the same load, to fail
            if not load.in_step:
                self._loader.start(load, mark)
            elif self._settings.layerwise:
                rest, last = load.split(self._model.planes, self._model.page_blocks)
                urgent.append(self._loader.start(last, mark, in_step=True))
                self._in_step_jobs.append(self._loader.start(rest, mark, in_step=True))
                self.in_layers = True
            else:
                urgent.append(self._loader.start(load, mark, in_step=True))
        self._wait(urgent)
        self._in_step_jobs += urgent

    def _wait(self, jobs: list[LoadJob], layer: str | None = None) -> None:
        for job in jobs:
            assert self._loader is not None
            self._loader.wait(job, layer)

    def wait_for_layer(self, name: str) -> None:
        """VLLM's ``wait_for_layer_load``."""
        if self._in_step_jobs and name in self._order:
            self._wait(self._in_step_jobs, name)

    def computed_layer(self, name: str) -> None:
        """VLLM's ``save_kv_layer``: the layer's state of this step is there once the engine's work until now is."""
        if self._batch is not None and self._batch.by_layer and name in self._order:
            self._batch.progress.done(name, self._devices.save.mark())

    def computed(self) -> None:
        """VLLM's ``wait_for_save``: the forward pass was launched; its blocks may be copied behind it."""
        self._wait(self._in_step_jobs)
        batch, self._batch = self._batch, None
        if batch is not None:
            if not all(job.sound for job in self._in_step_jobs):
                # What the step computed behind blocks that hold nothing is wrong.
                batch.call_off()
            for job in batch.jobs:
                adapter = job.save.adapter
                if adapter is not None and not has_read(adapter, before=False):
                    logger.warning_once("EMS does not store what a LoRA adapter computes: its files changed")
                    job.cancelled = True
            batch.progress.finish(self._devices.save.mark())

    def end(self) -> None:
        """The step is over.  Some releases of vLLM call nothing else in a step without work."""
        if self._batch is not None:
            self.computed()
        self._step = None
        self.in_layers = False

    # Results

    @property
    def has_results(self) -> bool:
        """Whether :meth:`results` may have something to say; False in most steps."""
        return bool(
            self._in_step_jobs
            or self._saved
            or (self._step is not None and self._step.idle)
            or (self._loader is not None and self._loader.news)
            or (self._saver is not None and self._saver.news)
        )

    def results(self) -> tuple[set[str], set[str]]:
        """Requests whose loads ended, those whose failed.

        VLLM asks before :meth:`computed` where it has drafts to compute: loads that are part of the step end first.
        """
        self._wait(self._in_step_jobs)
        # After a call that reached another node than before.
        self._warm_once()
        received: set[str] = set()
        wait = IDLE_SECONDS if self._step is not None and self._step.idle else 0.0
        for result in self._loader.results(wait) if self._loader is not None else ():
            failed = result.failed_blocks
            if not self._model.fails_whole:
                self._invalid |= failed
            elif not result.sound:
                self._failed.add(result.request_id)
            if result.in_step:
                self._report[result.request_id] += 1
            else:
                received.add(result.request_id)
            told = "KV cache transfer for request %s took %.2f ms (%d blocks, %d failed)"
            logger.info(told, result.request_id, result.seconds * 1000, result.loaded, len(failed))
            self._transfers.append(
                Transferred(True, self._leading, result.loaded, len(failed), result.bytes, result.seconds)
            )
            self._errors.update(filter(None, [result.error]))
        if self._saver is not None:
            for saved in self._saver.results():
                if saved.error:
                    self._errors[saved.error] += 1
                else:
                    self._transfers.append(
                        Transferred(False, saved.blocks > 0, saved.blocks, 0, saved.bytes, saved.seconds)
                    )
            self._saved += self._saver.take_over()
        failed_whole = self._failed & received
        self._failed -= failed_whole
        return received, failed_whole

    def take_stats(self) -> EmsStats | None:
        """Figures of what :meth:`results` saw end; VLLM asks for them before :meth:`take_report`, in each step."""
        return EmsStats.of_worker(self._transfers) if self._transfers else None

    def take_invalid_blocks(self) -> set[int]:
        """Blocks of loads reported by :meth:`results` that hold nothing."""
        invalid, self._invalid = self._invalid, set()
        return invalid

    def take_report(self) -> StepReport | None:
        """The report to the scheduler side, beside :meth:`results`."""
        if not (self._report or self._saved or self._transfers or self._errors):
            return None
        in_step, saved = dict.fromkeys(self._report, 1), dict.fromkeys(self._saved, 1)
        report = StepReport(in_step, self._transfers, dict(self._errors), saved)
        self._report, self._saved, self._transfers, self._errors = Counter(), [], [], Counter()
        return report

    def finish_saves(self, seconds: float) -> None:
        """A scheduler in this process gives blocks away between two steps: see :meth:`Saver.finish`."""
        if self._saver is not None:
            self._saver.finish(seconds)

    def close(self) -> None:
        """Finish what is queued, within a bounded time."""
        for thread in (self._loader, self._saver):
            if thread is not None:
                thread.close()
        self._client.close()
