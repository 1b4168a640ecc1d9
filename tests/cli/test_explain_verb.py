"""``ems explain`` on a node whose pages are known: what of a prompt is there, what is missing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ems.cli import run
from ems.pool.client.answers import Namespace
from ems.pool.client.pool_client import PoolClient
from ems.pool.keys import NO_PARENT, KeyChain
from tests.kit.node import NodeProcess

IDENTITY = "default/model/layout"
FACTS = {"kind": "vllm", "tenant": "default", "model": "model", "chunk_tokens": "4", "page_shards": "1", "window": "0"}

pytestmark = pytest.mark.process


@pytest.fixture
def socket() -> Iterator[Path]:
    """That of a node with the blocks of ten tokens, the last of which is not full."""
    with NodeProcess("--size", "1MB", "--segment-size", "256KB") as node:
        node.wait_touched()
        client = PoolClient(node.socket, "test")
        chain = KeyChain(IDENTITY, 4)
        tokens = list(range(10))
        full = chain.extend(tokens)
        tail = chain.tail(full, tokens[8:])
        space = Namespace(f"{IDENTITY}/0.0", 4096)
        client.describe(space.name, FACTS)
        client.commit(client.reserve(space, NO_PARENT, [*chain, tail.key], tails=[*chain.tails(0, full), tail]))
        yield node.socket
        client.close()


def explained(socket: Path, tokens: int, folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[Any, str]:
    file = folder / "ids.json"
    file.write_text(json.dumps(list(range(tokens))))
    words = ["explain", "--tokens", str(file), "--socket", str(socket)]
    assert run([*words, "-o", "json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["namespaces"]
    assert run(words) == 0
    return row, capsys.readouterr().out


@pytest.mark.parametrize("tokens", [3, 8, 9, 10])
def test_of_a_prompt_that_is_there_nothing_is_missing(
    tokens: int, socket: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row, text = explained(socket, tokens, tmp_path, capsys)
    assert (row["tokens"], row["reasons"]) == (tokens, {})
    assert "reason" not in row
    assert "missing" not in text


def test_what_is_missing_begins_where_the_pool_ends(
    socket: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row, text = explained(socket, 11, tmp_path, capsys)
    assert (row["tokens"], row["reason"]) == (10, "never_stored")
    assert "chunk 2, tokens 10 to 10" in text
