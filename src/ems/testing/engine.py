"""Real vLLM servers for tests, demonstrations and benchmarks: started, waited for, asked, and stopped without a trace.

What always holds: a server has a session of its own, so that stopping it ends its engine and worker processes too,
also those whose parent died first; it dies with the thread that started it, however that ends (so start it from a
thread that lives as long as it is needed); its output goes to a file, of which the last lines are part of the error
when it does not come up.

One server takes about one core and, for a small model, 2 GB of memory; it needs 20 to 40 seconds to start on a CPU.
"""

from __future__ import annotations

import ctypes
import http.client
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec
import psutil
from prometheus_client.parser import text_string_to_metric_families

from ems.errors import EmsError

SERVED_MODEL = "tiny"

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)

_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB, the least it takes
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # several servers share the cores
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCHDYNAMO_DISABLE": "1",  # nothing here is worth compiling, and there may be no compiler
    "PYTHONWARNINGS": "ignore",
}


class EngineError(EmsError):
    """A server did not come up, went away, or gave no metrics."""


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
    arguments: tuple[str, ...] = ()
    """Further flags, as on a command line."""


def free_port() -> int:
    """Return a TCP port of 127.0.0.1 that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class VllmServer:
    """One OpenAI-compatible vLLM server on 127.0.0.1; the model answers to the name ``tiny``.

    ``kv_transfer_config`` is what one would write after ``--kv-transfer-config``.  ``environment`` is added to that of
    this process (``EMS_SOCKET`` names the pool).  Use it as a context manager, or call :meth:`start`,
    :meth:`wait_ready` and :meth:`stop`.
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
    ) -> None:
        self.port = free_port() if port is None else port
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        self._command = _command(model, self.port, kv_transfer_config, options or EngineOptions())
        self._environment = {**os.environ, **_ENVIRONMENT, **(environment or {})}
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the processes and return at once."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_die_with_parent,  # noqa: PLW1509 - one system call, no lock is taken between fork and exec
            )

    def wait_ready(self, timeout: float = 180.0, progress: Callable[[float], None] | None = None) -> None:
        """Return when ``/health`` answers; call ``progress`` with the seconds waited about four times a second.

        Raises:
            EngineError: the server ended, or did not answer within ``timeout`` seconds; its last lines are included.
        """
        started = time.monotonic()
        while not self.is_healthy():
            waited = time.monotonic() - started
            if progress is not None:
                progress(waited)
            status = self._pause(0.25)
            if status is not None:
                raise EngineError(f"vLLM ended with status {status} while starting\n{self._last_lines()}")
            if waited > timeout:
                raise EngineError(f"vLLM was not ready after {timeout:.0f} s\n{self._last_lines()}")

    def is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=2) as answer:  # noqa: S310 - a URL of our own
                return bool(answer.status == http.HTTPStatus.OK)
        except (urllib.error.URLError, OSError, http.client.HTTPException):
            return False

    def metrics(self) -> dict[str, float]:
        """Return each sample of ``/metrics``, added up over its labels; buckets and times of creation are left out.

        Raises:
            EngineError: the server does not answer.
        """
        return fetch_metrics(f"{self.url}/metrics")

    def processes(self) -> list[psutil.Process]:
        """Return the server's living processes: the front end, the engine, its workers."""
        return _session(self._process.pid) if self._process is not None else []

    def kill(self) -> None:
        """End all processes at once, as a crash would (SIGKILL)."""
        if self._process is None:
            return
        while processes := self.processes():
            for process in processes:
                _send(process, signal.SIGKILL)
            self._process.poll()
            psutil.wait_procs(processes, timeout=1)
        self._process.wait()

    def stop(self, grace: float = 20.0) -> None:
        """End all processes: ask first, and after ``grace`` seconds do not ask."""
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.terminate()
            self._pause(grace)
        # What is left has lost its front end and can only be ended.
        self.kill()

    def _pause(self, seconds: float) -> int | None:
        """Wait so long, or until the front end has ended; return its exit status then."""
        assert self._process is not None, "start() comes first"
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def _last_lines(self, count: int = 25) -> str:
        try:
            return "\n".join(self.log.read_text(errors="replace").splitlines()[-count:])
        except OSError:
            return ""

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.callback(self.stop)
            self.start()
            self.wait_ready()
            stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def fetch_metrics(url: str) -> dict[str, float]:
    """Return the samples of a Prometheus page, added up over labels, without buckets and times of creation.

    Raises:
        EngineError: the page cannot be had.
    """
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:  # noqa: S310 - a URL of our own
            page = answer.read().decode()
    except (urllib.error.URLError, OSError, http.client.HTTPException) as error:
        raise EngineError(f"{url} gives no metrics: {error}") from error
    totals: dict[str, float] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if not sample.name.endswith(("_bucket", "_created")):
                totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
    return totals


def _command(
    model: Path, port: int, kv_transfer_config: Mapping[str, object] | None, options: EngineOptions
) -> list[str]:
    # The module rather than the `vllm` command: the CPU build has no metadata for the latter to look up.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    flags: dict[str, object] = {
        "--model": model,
        "--served-model-name": SERVED_MODEL,
        "--host": "127.0.0.1",
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
    return [*command, "--enforce-eager", caching, *options.arguments]


def _die_with_parent() -> None:
    """Ask the kernel for SIGTERM when the parent's thread ends; runs in the child before it becomes the server."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _session(leader: int) -> list[psutil.Process]:
    members = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == leader and process.status() != psutil.STATUS_ZOMBIE:
                members.append(process)
        except (ProcessLookupError, PermissionError, psutil.NoSuchProcess):
            continue
    return members


def _send(process: psutil.Process, number: signal.Signals) -> None:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        pass
