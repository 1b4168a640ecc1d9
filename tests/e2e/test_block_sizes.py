"""Engines with blocks of different sizes on one pool: each loads what the other stored."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tests.e2e.engines import OPTIONS, complete_all, connector, random_prompt, running, running_node
from tests.kit.engine import VllmServer
from tests.kit.prepared import PreparedServer

pytestmark = pytest.mark.e2e

LENGTHS = (40, 300, 777, 1100)


def external_hits(server: VllmServer) -> float:
    return server.metrics().get("vllm:external_prefix_cache_hits_total", 0.0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_blocks_of_32_and_of_128_tokens_share_pages(model: Path, logs: Path, dtype: str) -> None:
    """The kernels of a CPU order the tokens of a block differently for each of these types."""
    with running_node("--size", "512MB") as node:
        small, large = (
            PreparedServer(
                model,
                log=logs / f"{dtype}-{size}.log",
                kv_transfer_config=connector("kv_both"),
                options=msgspec.structs.replace(
                    OPTIONS, block_size=size, dtype=dtype, gpu_blocks=12_800 // size, prefix_caching=False
                ),
                environment=node.environment,
            )
            for size in (32, 128)
        )
        with running(small, large):
            for number, (writer, reader) in enumerate([(small, large), (large, small)]):
                prompts = [random_prompt(7000 + 10 * number + length, length) for length in LENGTHS]
                texts = complete_all(writer.url, prompts)
                node.wait_stored()
                before = external_hits(reader)
                assert complete_all(reader.url, prompts) == texts
                hits = external_hits(reader) - before
                assert sum(LENGTHS) - len(LENGTHS) <= hits <= sum(LENGTHS)
                # They part in the middle of a chunk, and of a block of either size.
                parted = [prompt[: len(prompt) - 33] + random_prompt(90, 70) for prompt in prompts[1:]]
                before = external_hits(reader)
                found = complete_all(reader.url, parted)
                assert external_hits(reader) - before == sum(len(prompt) - 33 for prompt in prompts[1:])
                assert found == complete_all(writer.url, parted)
