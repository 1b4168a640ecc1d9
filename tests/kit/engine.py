"""Real vLLM servers for tests, demonstrations and benchmarks.

One server takes about one core and, for a small model, 2 GB of memory; it needs 20 to 40 seconds to start on a CPU.
How it is started, watched and stopped is in :mod:`tests.kit.process`.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec

from tests.kit.process import ProcessError, ServerProcess, free_port

SERVED_MODEL = "tiny"
API_SERVER = "vllm.entrypoints.openai.api_server"
"""The module rather than the `vllm` command: the CPU build has no metadata for the latter to look up."""
ASYNC_SERVER = "tests.kit.async_scheduling"
"""The same with steps that overlap on a CPU, too."""

ARGUMENTS = "ENGINE_ARGUMENTS"
"""Environment variable: further flags of every server.  Engines that share a GPU need ``--gpu-memory-utilization``."""

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB, the least it takes
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # several servers share the cores
    "OMP_NUM_THREADS": "1",
    "EMS_SHARE_CORES": "1",
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "60",  # a server that stood still for 5 s hangs up on what came meanwhile
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCHDYNAMO_DISABLE": "1",  # nothing here is worth compiling, and there may be no compiler
    "PYTHONWARNINGS": "ignore",
    # glibc gives the top of the heap back whenever much of it is free.  Whether something lies there that lives on is
    # chance, and an engine without it clears its memory anew in each step: up to a tenth of the time, while it lives.
    "MALLOC_TRIM_THRESHOLD_": str(16 << 30),
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
}

__all__ = ["SERVED_MODEL", "EngineOptions", "ProcessError", "VllmServer", "free_port"]


def on_accelerator() -> bool:
    """Whether engines run on an accelerator of this machine, not on its processors."""
    import torch  # takes seconds, and most who start a server do so from a process without it

    return bool(torch.accelerator.is_available())


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a server is run; each field is a flag of ``vllm serve``."""

    prefix_caching: bool = False
    block_size: int = 128
    gpu_blocks: int | None = None
    """Blocks of the engine's own cache (``--num-gpu-blocks-override``); None leaves it at about 1 GiB."""
    max_model_len: int = 8192
    max_num_batched_tokens: int = 4096
    max_num_seqs: int = 32
    dtype: str = "bfloat16"
    kv_load_failure_policy: str = "recompute"
    """Added to the connector's configuration where that does not say."""
    async_scheduling: bool = False
    """Steps overlap on a CPU, too; without this they do as vLLM's platform says, which on a CPU is never and on an
    accelerator always."""
    arguments: tuple[str, ...] = ()
    """Further flags, as on a command line."""


class VllmServer(ServerProcess):
    """One OpenAI-compatible vLLM server at ``address``; the model answers to the name ``tiny``.

    ``kv_transfer_config`` is what one would write after ``--kv-transfer-config``.  ``environment`` is added to that of
    this process (``EMS_SOCKET`` names the pool).  ``module`` is run with the flags of vLLM's API server, in its place.
    """

    def __init__(
        self,
        model: Path,
        *,
        log: Path,
        port: int | None = None,
        kv_transfer_config: Mapping[str, object] | None = None,
        options: EngineOptions | None = None,
        environment: Mapping[str, str] | None = None,
        module: str | None = None,
        address: str = "127.0.0.1",
    ) -> None:
        port = free_port() if port is None else port
        options = options or EngineOptions()
        module = module or (ASYNC_SERVER if options.async_scheduling and not on_accelerator() else API_SERVER)
        super().__init__(
            _command(module, model, f"{address}:{port}", kv_transfer_config, options),
            name="vLLM",
            port=port,
            log=log,
            environment={**ENVIRONMENT, **(environment or {})},
            address=address,
        )


def _command(
    module: str, model: Path, endpoint: str, kv_transfer_config: Mapping[str, object] | None, options: EngineOptions
) -> list[str]:
    host, port = endpoint.split(":")
    command = [sys.executable, "-m", module]
    flags: dict[str, object] = {
        "--model": model,
        "--served-model-name": SERVED_MODEL,
        "--host": host,
        "--port": port,
        "--dtype": options.dtype,
        "--block-size": options.block_size,
        "--max-model-len": options.max_model_len,
        "--max-num-batched-tokens": options.max_num_batched_tokens,
        "--max-num-seqs": options.max_num_seqs,
        "--seed": 0,
    }
    if options.gpu_blocks is not None:
        flags["--num-gpu-blocks-override"] = options.gpu_blocks
    if kv_transfer_config is not None:
        policy = {"kv_load_failure_policy": options.kv_load_failure_policy}
        flags["--kv-transfer-config"] = msgspec.json.encode({**policy, **kv_transfer_config}).decode()
    for flag, value in flags.items():
        command += [flag, str(value)]
    caching = "--enable-prefix-caching" if options.prefix_caching else "--no-enable-prefix-caching"
    further = shlex.split(os.environ.get(ARGUMENTS, ""))
    return [*command, "--enforce-eager", caching, *options.arguments, *further]
