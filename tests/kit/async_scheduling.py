"""vLLM's API server with asynchronous scheduling on a CPU, where the release switches it off ("not required on CPU").

``python -m tests.kit.async_scheduling`` takes the flags of the API server.  vLLM's own default stays in force: steps
overlap wherever the rest of the configuration allows it, and ``--no-async-scheduling`` forbids it.  Scheduler, executor
and model runner are vLLM's.  Replaced are the streams and events through which the runner waits for its device: on a
CPU everything is done when a call returns.
"""

from __future__ import annotations

import functools
import runpy
from contextlib import nullcontext
from typing import Any

import torch
import vllm
from vllm.platforms.cpu import CpuPlatform

from tests.kit.engine import API_SERVER


class _Done:
    """A stream or an event of a device that has always done everything."""

    def __init__(self, *_options: object, **_more: object) -> None: ...

    def record(self) -> None: ...

    def synchronize(self) -> None: ...

    def wait_stream(self, _other: object) -> None: ...


def allow() -> None:
    """Let engines of this process overlap their steps on a CPU; harmless when repeated, and with an accelerator."""
    update = CpuPlatform.check_and_update_config
    if torch.cuda.is_available() or hasattr(update, "__wrapped__"):
        return

    @functools.wraps(update)
    def check_and_update_config(vllm_config: Any) -> None:
        scheduler = vllm_config.scheduler_config
        decided = scheduler.async_scheduling
        update(vllm_config)
        scheduler.async_scheduling = decided

    CpuPlatform.check_and_update_config = staticmethod(check_and_update_config)
    torch.cuda.Event = torch.cuda.Stream = _Done
    torch.cuda.current_stream = _Done
    torch.cuda.stream = nullcontext
    if vllm.__version__.startswith("0.23."):
        from vllm.v1.worker import cpu_model_runner

        # Its own stand-ins are no streams that another could wait for.
        cpu_model_runner._torch_cuda_wrapper = nullcontext
        torch.Event = _Done


# Also in the processes that vLLM starts: they import this module again, or inherit what was done here.
allow()

if __name__ == "__main__":
    runpy.run_module(API_SERVER, run_name="__main__")
