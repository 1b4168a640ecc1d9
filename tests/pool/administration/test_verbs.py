"""The verbs that administer a node, against real ones."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from ems.cli import run
from ems.pool.client.answers import Namespace
from ems.pool.client.pool_client import PoolClient
from ems.pool.keys import KeyChain
from ems.pool.reasons.words import Reason
from ems.testing.node import NodeProcess
from ems.testing.tiny_tokenizer import write_tokenizer
from tests.pool.brain import chain, key
from tests.pool.conftest import MakeClient, MakeNode
from tests.pool.wire import wire

pytestmark = pytest.mark.process

PAGE = 4096
IDENTITY = "tenant/model/0123"
SPACE = Namespace(f"{IDENTITY}/0.0", PAGE)
OLD = Namespace("tenant/model/9999/0.0", PAGE)
FACTS = {
    "kind": "vllm",
    "tenant": "tenant",
    "model": "model",
    "plane": "0.0",
    "block_size": "16",
    "page_shards": "1",
    "window": "0",
}

Ems = Callable[..., Any]


@pytest.fixture
def node(make_node: MakeNode) -> NodeProcess:
    node = make_node("--size", "1MB", "--segment-size", "256KB", "--high-watermark", "1.0")
    node.wait_touched()
    return node


@pytest.fixture
def client(node: NodeProcess, make_client: MakeClient) -> PoolClient:
    client = make_client(node)
    client.describe(SPACE.name, FACTS)
    return client


@pytest.fixture
def ems(node: NodeProcess, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Ems:
    """One command line; its output, read as JSON if it was asked for."""
    monkeypatch.setenv("EMS_SOCKET", str(node.socket))

    def call(*tokens: str, status: int = 0) -> Any:
        ended = run(tokens)
        said = capsys.readouterr()
        assert ended == status, said.err
        if status and not said.out:
            assert len(said.err.splitlines()) == 1 or "hint" in said.err, said.err
            return said.err
        return json.loads(said.out) if "json" in tokens else said.out

    return call


def store(client: PoolClient, space: Namespace, keys: Sequence[bytes]) -> None:
    client.commit(client.reserve(space, bytes(16), keys))


def test_list_adds_up_by_namespace_model_and_tenant(client: PoolClient, ems: Ems) -> None:
    store(client, SPACE, chain("x", 3))
    store(client, OLD, chain("y", 2))
    rows = ems("list", "-o", "json")["namespaces"]
    assert [(row["namespace"], row["pages"], row["bytes"]) for row in rows] == [
        (SPACE.name, 3, 3 * PAGE),
        (OLD.name, 2, 2 * PAGE),
    ]
    (total,) = ems("list", "--by", "model", "-o", "json")["models"]
    assert (total["model"], total["pages"]) == ("model", 5)
    assert "tenant" in ems("list", "--by", "tenant")
    assert SPACE.name in ems("list")


def test_clear_says_what_it_would_do_and_does_it(client: PoolClient, ems: Ems) -> None:
    store(client, SPACE, chain("x", 3))
    store(client, OLD, chain("y", 2))
    assert "would clear 3 pages" in ems("clear", "--namespace", SPACE.name, "--dry-run")
    assert client.lookup(SPACE, b"".join(chain("x", 3))).count == 3
    assert "cleared 3 of 3 pages" in ems("clear", "--namespace", SPACE.name)
    assert client.lookup(SPACE, b"".join(chain("x", 3))).count == 0
    assert client.lookup(OLD, b"".join(chain("y", 2))).count == 2
    assert ems("clear", "--older-than", "1h", "-o", "json")["matched"] == 0
    assert ems("clear", "--all", "-o", "json")["removed"] == 2
    (row,) = ems("show", chain("x", 1)[0].hex(), "-o", "json")["namespaces"]
    assert (row["state"], row["reason"]) == ("absent", "cleared")


def test_a_page_that_is_read_leaves_when_its_reader_is_done(client: PoolClient, ems: Ems) -> None:
    store(client, SPACE, chain("x", 2))
    hits = client.lookup(SPACE, b"".join(chain("x", 2)), lease=True)
    assert hits.lease is not None
    # Its reader lives in this process, so the verb is to wait in another thread.
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as beside:
        cleared = beside.submit(ems, "clear", "--all", "-o", "json")
        while client.lookup(SPACE, b"".join(chain("x", 2))).count:
            assert not cleared.done()
        assert client.segments(hits.lease.epoch).holds(hits.lease.refs[0], chain("x", 1)[0]), "its bytes stay"
        client.release(hits.lease)
        assert cleared.result(30)["removed"] == 2


def test_show_tells_of_namespaces_pages_and_requests(client: PoolClient, ems: Ems) -> None:
    store(client, SPACE, chain("x", 2))
    client.lookup(SPACE, b"".join(chain("x", 3)), lease=True, request="cmpl-4711-0")
    assert "block_size" in ems("show", SPACE.name)
    assert "present" in ems("show", chain("x", 2)[1].hex())
    shown = ems("show", "4711")
    assert "2 of 3 keys found" in shown
    assert "never_stored" in shown
    explained = ems("explain", "--request", "4711")
    assert re.sub(r"\d+s ago", "", explained) == re.sub(r"\d+s ago", "", shown), "but for the time between them"
    assert "nothing here is called" in ems("show", "no such thing", status=1)


def test_explain_finds_a_prompt_by_its_tokens(client: PoolClient, ems: Ems, tmp_path: Path) -> None:
    ids = list(range(1000, 1000 + 5 * 16 + 3))
    keys = KeyChain(IDENTITY, 16)
    keys.extend(ids)
    store(client, SPACE, keys[0:2])
    client.abort(client.reserve(SPACE, keys[1:2][0], keys[2:4]))
    client.commit(client.reserve(SPACE, keys[3:4][0], keys[4:5]))
    file = tmp_path / "tokens"
    file.write_text(json.dumps(ids))
    (row,) = ems("explain", "--tokens", str(file), "-o", "json")["namespaces"]
    assert (row["blocks"], row["leading"], row["present"], row["first_missing"]) == (5, 2, 3, 2)
    assert (row["reason"], row["reasons"]) == ("unfinished", {"unfinished": 2})
    file.write_text(" ".join(map(str, ids)))
    text = ems("explain", "--tokens", str(file), "--namespace", IDENTITY)
    assert "block 2, tokens 32 to 47" in text
    assert "unfinished" in text
    file.write_text("none")
    assert "something else than token ids" in ems("explain", "--tokens", str(file), status=2)
    assert "give one of" in ems("explain", status=2)
    assert "--model" in ems("explain", "--prompt", "text", status=2)


def test_explain_finds_a_prompt_by_its_text(client: PoolClient, ems: Ems, tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    write_tokenizer(tmp_path, 512, 0)
    text = "the words of a prompt that goes on for a while " * 8
    ids = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode(text).ids
    keys = KeyChain(IDENTITY, 16)
    blocks = keys.extend(ids)
    store(client, SPACE, keys[0:blocks])
    (row,) = ems("explain", "--prompt", text, "--model", str(tmp_path), "-o", "json")["namespaces"]
    assert (row["leading"], row["present"]) == (blocks, blocks)
    assert "reason" not in row
    assert "tokenizer.json" in ems("explain", "--prompt", text, "--model", str(tmp_path / "none"), status=2)


def test_pinned_pages_stay(client: PoolClient, ems: Ems) -> None:
    store(client, SPACE, chain("x", 2))
    assert "would pin 2 pages" in ems("pin", SPACE.name, "--dry-run")
    assert "pinned 2 pages; 2 pages of the namespace are pinned" in ems("pin", SPACE.name, "--lasting", "1h")
    assert ems("clear", "--all", "-o", "json")["matched"] == 0
    assert ems("list", "-o", "json")["namespaces"][0]["pinned"] == 2
    assert "unpinned 1 pages; 1 pages" in ems("unpin", SPACE.name, chain("x", 1)[0].hex())


def test_an_administrator_learns_that_another_tenant_has_it(client: PoolClient, ems: Ems, tmp_path: Path) -> None:
    theirs = "rival/model/0123"
    client.describe(f"{theirs}/0.0", {**FACTS, "tenant": "rival"})
    keys = KeyChain(theirs, 16)
    keys.extend(list(range(64)))
    store(client, Namespace(f"{theirs}/0.0", PAGE), keys[0:3])
    client.open(SPACE)
    file = tmp_path / "tokens"
    file.write_text(" ".join(map(str, range(64))))
    (row,) = ems("explain", "--tokens", str(file), "--namespace", SPACE.name, "-o", "json")["namespaces"]
    assert (row["reason"], row["leading"]) == ("other_tenant", 0)
    assert row["detail"] == f"{theirs}/0.0 has 3 blocks from the start"
    hits = client.lookup(SPACE, key("x"))
    assert hits.reason is Reason.NEVER_STORED, "an engine is not told"
    assert "no engine has described" in ems("explain", "--tokens", str(file), "--namespace", "x", status=1)


def test_another_layout_is_named_with_the_field_that_differs(client: PoolClient, ems: Ems, tmp_path: Path) -> None:
    client.describe(OLD.name, {**FACTS, "cache_dtype": "fp8"})
    store(client, OLD, chain("y", 1))
    hits = client.lookup(Namespace(SPACE.name, 0), key("x"))
    assert (hits.count, hits.reason and hits.reason.value) == (0, "other_layout")
    client.open(SPACE)
    file = tmp_path / "tokens"
    file.write_text(" ".join(map(str, range(32))))
    told = {row["namespace"]: row for row in ems("explain", "--tokens", str(file), "-o", "json")["namespaces"]}
    assert told[SPACE.name]["reason"] == "other_layout"
    assert told[SPACE.name]["detail"] == f"{OLD.name}: cache_dtype is fp8, not "
    assert "other_layout 1" in ems("status")


def test_a_drained_node_takes_nothing_in_until_it_may_again(client: PoolClient, ems: Ems) -> None:
    store(client, SPACE, chain("x", 1))
    assert "takes pages in" in ems("drain", "--dry-run")
    assert "takes nothing new in" in ems("drain")
    assert not client.reserve(SPACE, bytes(16), [key("new")]).granted
    assert client.lookup(SPACE, chain("x", 1)[0]).count == 1
    assert "ILL" in ems("health", status=1)
    ems("drain", "--undo")
    assert client.reserve(SPACE, bytes(16), [key("new")]).granted
    assert ems("health", "-o", "json")["well"] is True
    err = ems("drain", "--timeout", "0.2", "-o", "json", status=1)
    assert err["reservations"] == 1


def test_drain_stops_an_idle_node(client: PoolClient, ems: Ems, node: NodeProcess) -> None:
    store(client, SPACE, chain("x", 1))
    ems("drain", "--stop")
    assert node.wait() == 0


def test_a_pool_becomes_smaller_and_larger_under_its_readers(client: PoolClient, ems: Ems, node: NodeProcess) -> None:
    segments = 4
    room = 0
    while client.reserve(SPACE, bytes(16), [key(room)]).granted:
        room += 1
        if room > 20:
            break
    client.close()
    client = node.client("again")
    payload = os.urandom(PAGE)
    for name in range(20):
        reserved = client.reserve(SPACE, bytes(16), [key(("p", name))])
        client.segments(reserved.epoch).page(reserved.granted[0], PAGE)[:] = payload
        client.commit(reserved)
    hits = client.lookup(SPACE, key(("p", 19)), lease=True)
    assert hits.lease is not None
    assert ems("resize", "512KB", "--dry-run", "-o", "json")["taken"] == segments - 2
    report = ems("resize", "512KB", "-o", "json")
    assert (report["taken"], report["done"]) == (2, True)
    figures = client.stats()
    assert figures["bytes_total"] == 512 << 10
    (ref,) = hits.lease.refs
    assert bytes(client.segments(hits.lease.epoch).page(ref, PAGE)) == payload
    report = ems("resize", "2MB", "-o", "json")
    assert (report["added"], report["segments"]) == (6, 8)
    node.wait_touched()
    assert client.stats()["bytes_total"] == 2 << 20
    for name in range(40):
        reserved = client.reserve(SPACE, bytes(16), [key(("q", name))])
        client.segments(reserved.epoch).page(reserved.granted[0], PAGE)[:] = payload
        client.commit(reserved)
    for name in range(40):
        hits = client.lookup(SPACE, key(("q", name)), lease=True)
        assert hits.lease is not None
        (ref,) = hits.lease.refs
        assert client.segments(hits.lease.epoch).holds(ref, key(("q", name)))
        assert bytes(client.segments(hits.lease.epoch).page(ref, PAGE)) == payload
        client.release(hits.lease)
    assert "more than 4096 segments" in ems("resize", "100TB", status=1)
    client.close()


@pytest.mark.parametrize(
    ("tokens", "status"),
    [
        (("clear",), 2),
        (("clear", "--all", "--tenant", "x"), 2),
        (("clear", "--older-than", "soon"), 2),
        (("resize", "much"), 2),
        (("pin", "space", "nohex"), 2),
        (("warm",), 2),
        (("warm", "space"), 1),
        (("warm", "--model", "m", "--limit", "much"), 2),
        (("warm", "space", "00" * 16, "--limit", "1GB"), 2),
        (("warm", "space", "00" * 16), 1),
        (("warm", "--prompt", "text"), 2),
    ],
)
def test_mistakes_are_one_sentence(ems: Ems, tokens: tuple[str, ...], status: int) -> None:
    ems(*tokens, status=status)


def test_an_old_client_is_told_no_reasons(node: NodeProcess) -> None:
    from ems.pool.protocol import messages

    with wire(node.socket) as old:
        number = old.open("old", PAGE)
        assert old.ask(messages.Lookup(number, key("x"))) == messages.Hits(0, 0, 0, b"")
