"""The verbs that administer a node, against real ones."""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from ems.cli import run
from ems.pool.client.answers import Lease, LookupHints, Namespace
from ems.pool.client.pool_client import PoolClient
from ems.pool.keys import KeyChain
from ems.pool.reasons.words import Reason
from tests.kit.node import NodeProcess
from tests.kit.tiny_tokenizer import write_tokenizer
from tests.pool.brain import chain, key
from tests.pool.conftest import MakeClient, MakeNode
from tests.pool.stored_pages import store_unwritten

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
    "chunk_tokens": "16",
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
        return json.loads(said.out) if "json" in tokens and not status else said.out + said.err * bool(status)

    return call


def test_list_adds_up_by_namespace_model_and_tenant(client: PoolClient, ems: Ems) -> None:
    store_unwritten(client, SPACE, chain("x", 3))
    store_unwritten(client, OLD, chain("y", 2))
    rows = ems("list", "-o", "json")["items"]
    assert [(row["namespace"], row["pages"], row["bytes"]) for row in rows] == [
        (SPACE.name, 3, 3 * PAGE),
        (OLD.name, 2, 2 * PAGE),
    ]
    (total,) = ems("list", "--by", "model", "-o", "json")["items"]
    assert (total["model"], total["pages"]) == ("model", 5)
    assert "tenant" in ems("list", "--by", "tenant")
    assert SPACE.name in ems("list")


def test_clear_says_what_it_would_do_and_does_it(client: PoolClient, ems: Ems) -> None:
    store_unwritten(client, SPACE, chain("x", 3))
    store_unwritten(client, OLD, chain("y", 2))
    assert "would clear 3 pages" in ems("clear", "--namespace", SPACE.name, "--dry-run")
    assert client.lookup(SPACE, b"".join(chain("x", 3))).count == 3
    assert "cleared 3 of 3 pages" in ems("clear", "--namespace", SPACE.name)
    assert client.lookup(SPACE, b"".join(chain("x", 3))).count == 0
    assert client.lookup(OLD, b"".join(chain("y", 2))).count == 2
    assert ems("clear", "--older-than", "1h", "-o", "json")["matched"] == 0
    assert ems("clear", "--all", "--yes", "-o", "json")["removed"] == 2
    (row,) = ems("show", chain("x", 1)[0].hex(), "-o", "json")["namespaces"]
    assert (row["state"], row["reason"]) == ("absent", "cleared")


def test_a_page_that_is_read_leaves_when_its_reader_is_done(client: PoolClient, ems: Ems) -> None:
    store_unwritten(client, SPACE, chain("x", 2))
    hits = client.lookup(SPACE, b"".join(chain("x", 2)), lease=True)
    assert hits.lease is not None
    # Its reader lives in this process, so the verb is to wait in another thread.
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as beside:
        cleared = beside.submit(ems, "clear", "--all", "-y", "-o", "json")
        while client.lookup(SPACE, b"".join(chain("x", 2))).count:
            assert not cleared.done()
        (first, *_) = hits.lease.refs
        assert client.reader(SPACE, hits.lease.epoch).look(first.pack(), chain("x", 1)[0]).present == 1, (
            "its bytes stay"
        )
        client.release(hits.lease)
        assert cleared.result(30)["removed"] == 2


def test_a_restarted_node_is_cleared_whole(make_node: MakeNode, ems: Ems, monkeypatch: pytest.MonkeyPatch) -> None:
    node = make_node("--size", "8MB", "--high-watermark", "1.0")
    monkeypatch.setenv("EMS_SOCKET", str(node.socket))
    node.wait_touched()
    client = node.client()
    store_unwritten(client, SPACE, chain("x", 1000))
    client.close()
    for stop in (node.stop, node.kill):
        stop()
        node.start()
    assert "would clear 1000 pages" in ems("clear", "--tenant", "tenant", "--dry-run")
    assert "cleared 1000 of 1000 pages in 1 namespace" in ems("clear", "--tenant", "tenant")
    assert ems("list", "-o", "json")["items"][0]["pages"] == 0


def test_a_clear_says_whom_it_waits_for(
    client: PoolClient, ems: Ems, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("ems.cli.acts._TELL_AFTER", 0.0)
    notes: SimpleQueue[str] = SimpleQueue()
    monkeypatch.setattr("ems.cli.acts.note", notes.put)
    store_unwritten(client, SPACE, chain("x", 2))
    lease = client.lookup(SPACE, b"".join(chain("x", 2)), lease=True).lease
    assert lease is not None
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as beside:
        cleared = beside.submit(ems, "clear", "--tenant", "tenant")
        assert notes.get(timeout=30) == f"waiting for test (process {os.getpid()}): 1 lease on 2 pages"
        client.release(lease)
        assert "cleared 2 of 2 pages" in cleared.result(30)


@pytest.mark.parametrize(("answer", "status", "left"), [("n", 1, 2), ("", 1, 2), ("y", 0, 0)])
def test_who_sits_at_a_terminal_is_asked_before_everything_is_taken_out(
    client: PoolClient, ems: Ems, monkeypatch: pytest.MonkeyPatch, answer: str, status: int, left: int
) -> None:
    store_unwritten(client, SPACE, chain("x", 2))
    terminal = io.StringIO(answer and f"{answer}\n")
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdin", terminal)
    said = ems("clear", "--all", status=status)
    assert "would clear 2 pages (8.0 KiB) in 1 namespace; go on? [y/N]" in said or not status
    assert client.lookup(SPACE, b"".join(chain("x", 2))).count == left


def test_nobody_is_asked_where_there_is_no_terminal(
    client: PoolClient, ems: Ems, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO())
    store_unwritten(client, SPACE, chain("x", 2))
    assert "add --yes" in ems("clear", "--all", status=2)
    assert "would clear 2 pages" in ems("clear", "--all", "--dry-run")
    assert client.lookup(SPACE, b"".join(chain("x", 2))).count == 2
    assert "cleared 2 of 2 pages" in ems("clear", "--all", "--yes")


def test_a_mistyped_name_is_an_error_that_names_what_there_is(client: PoolClient, ems: Ems) -> None:
    store_unwritten(client, SPACE, chain("x", 2))
    assert "there is no tenant 'tenantt', did you mean tenant?" in ems("clear", "--tenant", "tenantt", status=1)
    assert "there is no model 'other', there are model" in ems("clear", "--model", "other", status=1)
    assert f"did you mean {SPACE.name}?" in ems("clear", "--namespace", IDENTITY, status=1)


def test_a_shrink_says_who_is_waited_for_and_can_be_cancelled(client: PoolClient, ems: Ems) -> None:
    keys = [key(number) for number in range(200)]
    for one in keys:
        store_unwritten(client, SPACE, [one])
    held: dict[int, Lease] = {}
    for one in keys:
        lease = client.lookup(SPACE, one, lease=True).lease
        assert lease is not None
        if held.setdefault(lease.refs[0].segment, lease) is not lease:
            client.release(lease)
    assert len(held) == 4
    said = ems("resize", "256KB", "--timeout", "0.3", status=1)
    assert f"waits for test (process {os.getpid()}): 3 leases on 3 pages and goes on" in said
    assert "being resized" in ems("resize", "512KB", status=1)
    assert "3 of them would stay" in ems("resize", "--cancel", "--dry-run")
    assert "the pool has 1.0 MiB in 4 segments; 3 of them stay" in ems("resize", "--cancel")
    assert "nothing to cancel" in ems("resize", "--cancel", status=1)
    assert "give the new size" in ems("resize", "256KB", "--cancel", status=2)
    for lease in held.values():
        client.release(lease)
    assert "the pool has 256.0 KiB in 1 segment, 3 fewer" in ems("resize", "256KB")


def test_show_tells_of_namespaces_pages_and_requests(client: PoolClient, ems: Ems) -> None:
    store_unwritten(client, SPACE, chain("x", 2))
    client.lookup(SPACE, b"".join(chain("x", 3)), lease=True, hints=LookupHints("cmpl-4711-0"))
    assert "chunk_tokens" in ems("show", SPACE.name)
    assert "present" in ems("show", chain("x", 2)[1].hex())
    shown = ems("show", "4711")
    assert "2 of 3 keys found" in shown
    assert "never_stored" in shown
    explained = ems("explain", "--request", "4711")
    assert re.sub(r"\d+s ago", "", explained) == re.sub(r"\d+s ago", "", shown), "but for the time between them"
    client.lookup(SPACE, b"".join(chain("x", 3)), lease=False, hints=LookupHints("cmpl-4712-0"))
    said = ems("explain", "--request", "cmpl", status=1)
    assert "'cmpl' is in the ids of 2 requests, cmpl-4711-0 and cmpl-4712-0 the last of them: give a part" in said
    assert "nothing here is called" in ems("show", "no such thing", status=1)


def test_explain_finds_a_prompt_by_its_tokens(client: PoolClient, ems: Ems, tmp_path: Path) -> None:
    ids = list(range(1000, 1000 + 5 * 16 + 3))
    keys = KeyChain(IDENTITY, 16)
    keys.extend(ids)
    store_unwritten(client, SPACE, keys[0:2])
    client.abort(client.reserve(SPACE, keys[1:2][0], keys[2:4]))
    client.commit(client.reserve(SPACE, keys[3:4][0], keys[4:5]))
    file = tmp_path / "tokens"
    file.write_text(json.dumps(ids))
    (row,) = ems("explain", "--tokens", str(file), "-o", "json")["namespaces"]
    assert (row["chunks"], row["leading"], row["present"], row["first_missing"]) == (6, 2, 3, 2)
    assert (row["reason"], row["reasons"]) == ("unfinished", {"unfinished": 2, "never_stored": 1})
    assert row["tokens"] == 32
    file.write_text(" ".join(map(str, ids)))
    text = ems("explain", "--tokens", str(file), "--namespace", IDENTITY)
    assert "chunk 2, tokens 32 to 47" in text
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
    store_unwritten(client, SPACE, keys[0:blocks])
    (row,) = ems("explain", "--prompt", text, "--model", str(tmp_path), "-o", "json")["namespaces"]
    assert (row["leading"], row["present"]) == (blocks, blocks)
    assert "reason" not in row
    assert "tokenizer.json" in ems("explain", "--prompt", text, "--model", str(tmp_path / "none"), status=2)


def test_pinned_pages_stay(client: PoolClient, ems: Ems) -> None:
    store_unwritten(client, SPACE, chain("x", 2))
    assert "would pin 2 pages" in ems("pin", SPACE.name, "--dry-run")
    assert "pinned 2 pages; of the namespace 2 pages are pinned" in ems("pin", SPACE.name, "--lasting", "1h")
    report = json.loads(ems("clear", "--all", "-y", "-o", "json", status=1).partition("error:")[0])
    assert (report["matched"], report["pinned"]) == (0, 2)
    assert ems("list", "-o", "json")["items"][0]["pinned"] == 2
    assert "unpinned 1 page; of the namespace 1 page is pinned" in ems("unpin", SPACE.name, chain("x", 1)[0].hex())


def test_a_key_that_is_not_there_is_not_said_to_be_pinned(client: PoolClient, ems: Ems) -> None:
    store_unwritten(client, SPACE, chain("x", 1))
    here, absent = chain("x", 1)[0].hex(), key("absent").hex()
    assert "1 of 2 keys is not in memory" in ems("pin", SPACE.name, here, absent, status=1)
    assert "1 of 1 key is not in memory" in ems("pin", SPACE.name, absent, "--dry-run", status=1)
    assert "1 of 1 key is not pinned" in ems("unpin", SPACE.name, absent, status=1)
    assert ems("pin", SPACE.name, here, "--dry-run", "-o", "json")["dry_run"] is True
    assert ems("pin", SPACE.name, here, "-o", "json")["dry_run"] is False
    assert "--lasting is '48h', expected a day at most" in ems("pin", SPACE.name, "--lasting", "48h", status=2)


def test_explain_counts_the_tokens_of_chunks_that_are_shared_in_part(
    client: PoolClient, ems: Ems, tmp_path: Path
) -> None:
    chain = KeyChain(IDENTITY, 16)
    chain.extend(list(range(32)))
    client.commit(client.reserve(SPACE, bytes(16), chain[0:2], tails=chain.tails(0, 2)))
    file = tmp_path / "tokens"
    file.write_text(" ".join(map(str, [*range(21), 900, 901])))
    (row,) = ems("explain", "--tokens", str(file), "-o", "json")["namespaces"]
    assert (row["chunks"], row["leading"], row["tokens"]) == (2, 1, 21)
    assert "missing      chunk 1, tokens 21 to 22" in ems("explain", "--tokens", str(file))
    file.write_text(" ".join(map(str, range(32))))
    (row,) = ems("explain", "--tokens", str(file), "-o", "json")["namespaces"]
    assert (row["chunks"], row["leading"], row["tokens"]) == (2, 2, 32)


def test_an_administrator_learns_that_another_tenant_has_it(client: PoolClient, ems: Ems, tmp_path: Path) -> None:
    theirs = "rival/model/0123"
    client.describe(f"{theirs}/0.0", {**FACTS, "tenant": "rival"})
    keys = KeyChain(theirs, 16)
    keys.extend(list(range(64)))
    store_unwritten(client, Namespace(f"{theirs}/0.0", PAGE), keys[0:3])
    client.open(SPACE)
    file = tmp_path / "tokens"
    file.write_text(" ".join(map(str, range(64))))
    (row,) = ems("explain", "--tokens", str(file), "--namespace", SPACE.name, "-o", "json")["namespaces"]
    assert (row["reason"], row["leading"]) == ("other_tenant", 0)
    assert row["detail"] == f"{theirs}/0.0 has 48 tokens from the start"
    hits = client.lookup(SPACE, key("x"))
    assert hits.reason is Reason.NEVER_STORED, "an engine is not told"
    assert "no engine has described" in ems("explain", "--tokens", str(file), "--namespace", "x", status=1)


def test_another_layout_is_named_with_the_field_that_differs(client: PoolClient, ems: Ems, tmp_path: Path) -> None:
    client.describe(OLD.name, {**FACTS, "cache_dtype": "fp8"})
    store_unwritten(client, OLD, chain("y", 1))
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
    store_unwritten(client, SPACE, chain("x", 1))
    assert "takes pages in" in ems("drain", "--dry-run")
    assert "takes nothing new in" in ems("drain")
    assert not client.reserve(SPACE, bytes(16), [key("new")]).granted
    assert client.lookup(SPACE, chain("x", 1)[0]).count == 1
    assert "ILL" in ems("health", status=1)
    ems("drain", "--undo")
    assert client.reserve(SPACE, bytes(16), [key("new")]).granted
    assert ems("health", "-o", "json")["well"] is True
    assert '"reservations": 1' in ems("drain", "--timeout", "0.2", "-o", "json", status=1)


def test_drain_stops_an_idle_node(client: PoolClient, ems: Ems, node: NodeProcess) -> None:
    store_unwritten(client, SPACE, chain("x", 1))
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
        assert client.reader(SPACE, hits.lease.epoch).look(ref.pack(), key(("q", name))).present == 1
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
