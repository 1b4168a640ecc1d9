"""An engine whose connector can be taken out and put in again between two requests.

For :mod:`benchmarks.comparison.overhead`, run in place of vLLM's API server.  Two engines that were started alike
differ by a few percent for as long as they live, which is more than a connector costs; one engine with and without it
does not.  While the file exists that ``EMS_BENCH_WITHOUT`` names, scheduler and worker run as if no connector had been
configured.  What they keep is what they decided at their start.  What always holds: the connector is looked for when a
request comes in and before a step, so the file is to be made or removed while the engine has nothing to do.
"""

from __future__ import annotations

import functools
import os
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

WITHOUT = "EMS_BENCH_WITHOUT"
"""Environment variable: the file that takes the connector out."""

Hook = Callable[..., Any]


def install(without: Path) -> None:
    """Look for the file ``without`` wherever vLLM is about to use its connector."""
    Scheduler.add_request = _in_scheduler(Scheduler.add_request, without)
    Scheduler.schedule = _in_scheduler(Scheduler.schedule, without)
    GPUModelRunner.execute_model = _in_worker(GPUModelRunner.execute_model, without)


def _in_scheduler(hook: Hook, without: Path) -> Hook:
    @functools.wraps(hook)
    def switched(self: Any, *args: Any, **kwargs: Any) -> Any:
        connector = vars(self).setdefault("_configured_connector", self.connector)
        self.connector = None if without.exists() else connector
        return hook(self, *args, **kwargs)

    return switched


def _in_worker(hook: Hook, without: Path) -> Hook:
    @functools.wraps(hook)
    def switched(self: Any, *args: Any, **kwargs: Any) -> Any:
        connector = vars(self).setdefault("_configured_connector", kv_transfer_state._KV_CONNECTOR_AGENT)  # noqa: SLF001
        kv_transfer_state._KV_CONNECTOR_AGENT = None if without.exists() else connector  # noqa: SLF001
        return hook(self, *args, **kwargs)

    return switched


# Also in the processes that vLLM starts: they import this module again, or inherit what was done here.
install(Path(os.environ[WITHOUT]))

if __name__ == "__main__":
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
