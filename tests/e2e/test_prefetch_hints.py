"""A node that is told a prompt's tokens makes the keys that an engine makes."""

from __future__ import annotations

import asyncio
from contextlib import closing
from pathlib import Path

import pytest

from ems.http.address import Address
from ems.pool.client.pool_client import PoolClient
from ems.pool.http.prefetch_client import PrefetchClient
from ems.pool.http.prefetch_hints import PoolNode
from ems.pool.protocol.acts import Clear
from ems.vllm.model import CHUNK_TOKENS
from tests.e2e.engines import OPTIONS, Reference, complete, connector, random_prompt, running, wait_for
from tests.kit.node import NodeProcess
from tests.kit.prepared import PreparedServer

pytestmark = pytest.mark.e2e
ENGINE = Address("127.0.0.1", 1)
PAGES = 2 * 4
"""Two of each: of two chunks, of the tail of the prompt, and of the tail that its answer has grown."""


async def hint(node: PoolNode, key: Path, prompt: list[int]) -> None:
    async with PrefetchClient({ENGINE: node}) as client:
        client.load_key(key)
        client.hint(ENGINE, "tiny", prompt)
        async with asyncio.timeout(60):
            while not client.counts:  # noqa: ASYNC110  what is waited for has no event
                await asyncio.sleep(0.01)
        assert client.counts == {"taken": 1}


def test_what_an_engine_stored_comes_up_for_its_tokens(
    model: Path, logs: Path, tmp_path: Path, reference: Reference
) -> None:
    key = tmp_path / "token"
    key.write_text("token")
    key.chmod(0o600)
    flags = ["--size", "32MB", "--http-port", "0", "--http-token-file", str(key), "--tier", f"dir:{tmp_path}/tier"]
    with NodeProcess(*flags) as node:
        environment = {"EMS_DIR": str(node.directory), "EMS_SOCKET": str(node.socket), "EMS_AUTOSTART": "0"}
        log, transfer = logs / "told.log", connector("kv_both")
        server = PreparedServer(model, log=log, kv_transfer_config=transfer, options=OPTIONS, environment=environment)
        with running(server):
            prompt = random_prompt(70, 2 * CHUNK_TOKENS + 9)
            text = complete(server.url, prompt)
            wait_for(lambda: node.figures()["tiers"][0]["pages_written"] == PAGES, "all pages are written")
            with closing(PoolClient(node.socket, "test", administers=True)) as administrator:
                administrator.administer(Clear(everything=True, memory_only=True))
            wait_for(lambda: node.figures()["bytes_used"] == 0, "nothing holds a slot any longer")
            lookups = node.figures()["counters"]["lookups"]
            http = Address.parse(node.log.rpartition("http=http://")[2].split()[0])
            asyncio.run(hint(PoolNode(http), key, prompt))
            wait_for(lambda: node.figures()["tiers"][0]["pages_fetched"] >= 2, "both chunks are in memory")
            assert node.figures()["counters"]["lookups"] == lookups
            assert complete(server.url, prompt) == text == reference.text(prompt)
