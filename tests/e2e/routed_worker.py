"""vLLM's router, and a worker for it without an engine: it answers everything and publishes what it is told to have."""

from __future__ import annotations

import itertools
import json
import platform
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

import pytest
from vllm.distributed.kv_events import BlockStored, KVEventBatch, ZmqEventPublisher

from tests.e2e.engines import BLOCK, Prompt
from tests.kit.process import ServerProcess, free_port

SAYS = "the other worker"
needs_router = pytest.mark.skipif(platform.machine() != "x86_64", reason="vllm-router is published for x86-64 only")


@contextmanager
def vllm_router(events: Mapping[str, str], log: Path) -> Iterator[str]:
    """The address of a router over workers, which publish their ``events`` there."""
    port = free_port()
    command = [str(Path(sys.executable).with_name("vllm-router")), "--policy", "kv_aware"]
    command += ["--kv-event-block-size", str(BLOCK), "--kv-event-model", "tiny"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
    command += ["--worker-urls", *events]
    for worker, endpoint in events.items():
        command += ["--kv-event-source", f"{worker}={endpoint}"]
    with ServerProcess(command, name="vllm-router", port=port, log=log) as router:
        yield router.url


class Handler(BaseHTTPRequestHandler):
    says = SAYS

    def do_GET(self) -> None:
        self._answer({})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        choice = {"index": 0, "text": self.says, "finish_reason": "length", "logprobs": None}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        common = {"id": "1", "object": "text_completion", "created": 0, "model": "tiny"}
        self._answer({**common, "choices": [choice], "usage": usage})

    def _answer(self, what: dict[str, Any]) -> None:
        body = json.dumps(what).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


class RoutedWorker:
    """Serves while it is entered; answers with what it ``says``."""

    def __init__(self, says: str = SAYS) -> None:
        self.says = says
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Own", (Handler,), {"says": says}))
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        port = free_port()
        self.events = f"tcp://127.0.0.1:{port}"
        self._publisher = ZmqEventPublisher(0, f"tcp://*:{port}")
        self._numbers = itertools.count(1)

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._publisher.shutdown()

    def announce(
        self, prompt: Prompt, medium: str, blocks: int | None = None, place: Mapping[str, str] | None = None
    ) -> None:
        """Tell that this worker has the first ``blocks`` of ``prompt``, or all that are full; ``place`` says where."""
        count = len(prompt) // BLOCK if blocks is None else blocks
        stored = BlockStored(
            block_hashes=[next(self._numbers).to_bytes(32, "big") for _ in range(count)],
            parent_block_hash=None,
            token_ids=prompt[: count * BLOCK],
            block_size=BLOCK,
            lora_id=None,
            medium=medium,
            lora_name=None,
            **(place or {}),
        )
        self._publisher.publish(KVEventBatch(ts=time.time(), events=[stored]))
