"""A prefill server, a decode server and the router in front of them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.e2e.engines import Node, wait_for
from tests.kit.engine import VllmServer, free_port

CHAT = {
    "messages": [{"role": "user", "content": "Hello, how are you? Tell me about caches, and take your time with it."}],
    "max_tokens": 24,
    "temperature": 0,
}

SIZES = {"prefill": {"dp_size": 1, "tp_size": 1}, "decode": {"dp_size": 1, "tp_size": 1}}


class Fleet:
    """One prefill server, one decode server, the router's address."""

    def __init__(self, node: Node, prefill: VllmServer, decode: VllmServer, url: str) -> None:
        self.node = node
        self.prefill = prefill
        self.decode = decode
        self.url = url


@contextmanager
def running_router(prefill: VllmServer, decode: VllmServer, log: Path) -> Iterator[str]:
    port = free_port()
    command = [sys.executable, "-m", "ems.cli", "proxy", "--port", str(port)]
    command += ["--prefiller-hosts", "127.0.0.1", "--prefiller-ports", str(prefill.port)]
    command += ["--decoder-hosts", "127.0.0.1", "--decoder-ports", str(decode.port)]
    with log.open("wb") as errors:
        router = subprocess.Popen(command, stderr=errors)
    try:
        wait_for(
            lambda: b"Initialized 1 prefill clients and 1 decode clients." in log.read_bytes(), "the router starts"
        )
        yield f"http://127.0.0.1:{port}"
    finally:
        router.terminate()
        router.wait(20)


def external_hits(server: VllmServer) -> float:
    return server.metrics().get("vllm:external_prefix_cache_hits_total", 0.0)


def hand_off(role: str) -> dict[str, object]:
    """The same on both sides: port, identity, and keys that only mean something to other hardware and releases."""
    return {
        "kv_connector": "MooncakeConnectorV1",
        "kv_role": role,
        "kv_port": "20001",
        "kv_buffer_device": "npu",
        "kv_parallel_size": 1,
        "kv_connector_extra_config": {"use_ascend_direct": True, **SIZES},
    }
