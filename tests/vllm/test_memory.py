"""What an idle engine holds of a node that is gone."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.engines import running_node, wait_for
from tests.vllm.engine_memory import Engine, chain_of, present


def mapped(directory: Path) -> int:
    """How many of the folder's segments this process maps, deleted or not."""
    return sum(f"{directory}/segment-" in line for line in Path("/proc/self/maps").read_text().splitlines())


def test_an_idle_engine_lets_go_of_the_memory_of_a_dead_node() -> None:
    """Otherwise a node that starts again on a host whose memory was used well finds no room."""
    with running_node("--size", "8MB") as node:
        wait_for(lambda: node.stats()["bytes_touched"] == 8 << 20, "the memory is touched")
        engine = Engine(node, "one")
        try:
            chain = chain_of(2)
            engine.save(chain, [0, 1])
            wait_for(lambda: present(engine, chain) == 2, "the pages are stored")
            assert mapped(node.directory) > 0
            node.kill()
            wait_for(lambda: mapped(node.directory) == 0, "the engine lets go")
        finally:
            engine.close()
