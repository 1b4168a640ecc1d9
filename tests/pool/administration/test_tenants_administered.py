"""An administrator's view of a node with tenants, which a tenant does not have."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from ems.cli import run
from ems.errors import PoolRefused
from ems.pool.client.answers import Namespace
from ems.pool.client.pool_client import PoolClient
from ems.pool.keys import KeyChain
from ems.pool.node.audit import NAME
from ems.pool.protocol.acts import List
from ems.pool.tenants.scram import Credentials
from tests.kit.node import NodeProcess
from tests.kit.waiting import until
from tests.pool.tenants.people import ANN, BOB, registry_of, save

pytestmark = pytest.mark.process

PAGE = 4096
IDENTITY = "default/model/0123"
SPACE = Namespace(f"{IDENTITY}/0.0", PAGE)
FACTS = {"kind": "vllm", "model": "model", "plane": "0.0", "chunk_tokens": "16", "page_shards": "1", "window": "0"}
IDS = list(range(64))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save(tmp_path / "tenants.json", registry_of(ANN, BOB))
    return tmp_path


@pytest.fixture
def node(folder: Path) -> Iterator[NodeProcess]:
    flags = ("--size", "1MB", "--segment-size", "256KB", "--tenants", str(folder / "tenants.json"))
    with NodeProcess(*flags) as running:
        running.wait_touched()
        yield running
        assert "Traceback" not in running.log, running.log


def stored(node: NodeProcess, who: Credentials, blocks: int) -> PoolClient:
    client = node.client("test", who)
    client.describe(SPACE.name, {**FACTS, "tenant": "default"})
    keys = KeyChain(IDENTITY, 16)
    keys.extend(IDS)
    client.commit(client.reserve(SPACE, bytes(16), keys[0:blocks]))
    return client


def test_an_administrator_sees_and_clears_what_is_whose(
    node: NodeProcess, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EMS_SOCKET", str(node.socket))
    with contextlib.closing(stored(node, ANN, 3)) as ann, contextlib.closing(stored(node, BOB, 1)) as bob:
        with pytest.raises(PoolRefused):
            ann.administer(List())
        assert run(["list", "--by", "tenant", "-o", "json"]) == 0
        rows = json.loads(capsys.readouterr().out)["items"]
        assert {row["tenant"]: row["pages"] for row in rows} == {"ann": 3, "bob": 1}

        file = folder / "ids"
        file.write_text(json.dumps(IDS))
        assert run(["explain", "--tokens", str(file), "-o", "json"]) == 0
        rows = json.loads(capsys.readouterr().out)["namespaces"]
        told = {row["tenant"]: row for row in rows}
        assert (told["ann"]["leading"], told["bob"]["leading"]) == (3, 1)
        assert told["bob"]["reason"] == "other_tenant"
        assert "//ann/" in told["bob"]["detail"]

        assert run(["clear", "--tenant", "ann", "-o", "json"]) == 0
        assert json.loads(capsys.readouterr().out)["removed"] == 3
        keys = KeyChain(IDENTITY, 16)
        keys.extend(IDS)
        assert ann.lookup(SPACE, keys.packed(0, 1)).count == 0
        assert bob.lookup(SPACE, keys.packed(0, 1)).count == 1
    audit = folder / NAME
    until(lambda: audit.is_file() and "clear" in audit.read_text(), "it is written down")
    (line,) = [json.loads(line) for line in audit.read_text().splitlines() if "clear" in line]
    assert (line["verb"], line["what"], line["result"]) == ("clear", {"tenant": "ann"}, "done")
