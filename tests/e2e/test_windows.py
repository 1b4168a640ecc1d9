"""A model whose every layer sees a window only: what lies before it is dropped, and nothing is computed without."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tests.e2e.engines import OPTIONS, Node, Reference, complete, connector, random_prompt, running, running_node
from tests.e2e.pages import stored_pages
from tests.kit.prepared import PreparedServer
from tests.kit.tiny_model import SHAPES, make_model

pytestmark = pytest.mark.e2e

SHAPE = msgspec.structs.replace(SHAPES["hybrid"], full_every=100)
BLOCKS = 24
FAILED = re.compile(r"KV cache transfer for request .*, [1-9][0-9]* failed\)")


@pytest.fixture
def node() -> Iterator[Node]:
    with running_node("--size", "256MB") as running_one:
        yield running_one


def test_a_load_that_fails_in_part_is_computed_from_the_beginning(logs: Path, node: Node) -> None:
    model = make_model(logs / "windows", SHAPE)
    plain = PreparedServer(model, log=logs / "windows-plain.log", options=OPTIONS)
    server = PreparedServer(
        model,
        log=logs / "windows.log",
        options=OPTIONS,
        kv_transfer_config=connector("kv_both"),
        environment=node.environment,
    )
    with running(plain, server):
        reference = Reference(plain.url)
        for number in range(5):
            prompt = random_prompt(900 + number, BLOCKS * OPTIONS.block_size + 5)
            before = set(stored_pages(node.directory))
            assert complete(server.url, prompt) == reference.text(prompt)
            node.wait_stored()
            pages = [page for page in stored_pages(node.directory) if page not in before]
            # Five blocks of two pages each are loaded; the two behind them are the answer's.
            pages[-3 - 2 * number].overwrite()

            assert complete(server.url, prompt) == reference.text(prompt)

            assert len(FAILED.findall(server.log.read_text())) == number + 1
