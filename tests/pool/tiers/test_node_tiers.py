"""A real node with a directory below: what memory loses comes back, and nobody waits for a sick disk."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ems.cli import run
from ems.errors import PoolRefused
from ems.pool.client.answers import LookupHints, Namespace
from ems.pool.client.pool_client import PoolClient
from ems.pool.keys import Tail
from ems.pool.protocol.acts import Show, Warm
from ems.pool.reasons.words import Reason
from tests.kit.node import NodeProcess
from tests.kit.tiers import key, page
from tests.kit.waiting import until
from tests.pool.conftest import MakeClient, MakeNode
from tests.pool.tiers.pages import look, read, save, wait_for

pytestmark = pytest.mark.process
PAGE = 64 << 10
MEMORY = Namespace("tenant/model/layout", PAGE)
READER = Namespace("tenant/model/layout", 0)
SIZE = ("--size", "16MB", "--segment-size", "4MB")


def chain(name: str, length: int) -> list[bytes]:
    return [key(f"{name}/{block}") for block in range(length)]


def tier(node: NodeProcess) -> dict[str, Any]:
    (figures,) = node.figures()["tiers"]
    assert isinstance(figures, dict)
    return figures


def written(node: NodeProcess, pages: int) -> Callable[[], bool]:
    return lambda: bool(tier(node)["pages_written"] >= pages)


def save_whole(client: PoolClient, keys: list[bytes]) -> None:
    def saved() -> bool:
        return save(client, MEMORY, keys) == len(keys) or look(client, MEMORY, keys).count == len(keys)

    until(saved, "it is saved", 45)


def lose_memory(node: NodeProcess) -> None:
    """The host starts again: the node is killed and its memory is gone."""
    node.kill()
    shutil.rmtree(node.directory)
    node.start()
    node.wait_touched()


def test_after_a_restart_of_the_host_use_refills_memory(
    make_node: MakeNode, make_client: MakeClient, tmp_path: Path
) -> None:
    node = make_node(*SIZE, "--tier", f"dir:{tmp_path}/tier")
    node.wait_touched()
    keys = chain("a", 40)
    client = make_client(node)
    assert save(client, MEMORY, keys) == 40
    until(written(node, 40), "all was written", 45)
    lose_memory(node)

    client = make_client(node)
    until(lambda: look(client, READER, keys).below > 0, "the tier is known", 45)
    assert look(client, READER, chain("b", 3)).below == 0
    wait_for(client, READER, keys)
    assert read(client, MEMORY, keys) == [page(one, PAGE) for one in keys]
    figures = tier(node)
    assert figures["pages_fetched"] == 40
    assert figures["fetch_corrupt"] == 0


def test_a_prefetch_brings_pages_up(make_node: MakeNode, make_client: MakeClient, tmp_path: Path) -> None:
    node = make_node(*SIZE, "--tier", f"dir:{tmp_path}/tier")
    node.wait_touched()
    keys = chain("a", 20)
    save(make_client(node), MEMORY, keys)
    until(written(node, 20), "all was written", 45)
    lose_memory(node)

    client = make_client(node)
    until(lambda: client.prefetch(READER, b"".join(keys)) == 20, "the tier is known", 45)
    until(lambda: tier(node)["pages_fetched"] == 20, "all came up", 45)
    assert read(client, MEMORY, keys) == [page(one, PAGE) for one in keys]


def test_what_does_not_fit_memory_comes_back_from_the_tier(
    make_node: MakeNode, make_client: MakeClient, tmp_path: Path
) -> None:
    node = make_node(*SIZE, "--tier", f"dir:{tmp_path}/tier?write=on_evict")
    node.wait_touched()
    client = make_client(node)
    prompts = [chain(str(number), 32) for number in range(20)]
    for keys in prompts:
        save_whole(client, keys)
        # As fast as engines save: memory turns over while a tier takes it in.
        until(lambda: tier(node)["queued_bytes"] == 0, "the tier keeps up", 45)
    assert look(client, MEMORY, prompts[0]).count < 32
    found = 0
    for keys in prompts:
        hits = look(client, MEMORY, keys)
        if hits.count + hits.pending + hits.below == 32:
            wait_for(client, MEMORY, keys)
            assert read(client, MEMORY, keys) == [page(one, PAGE) for one in keys]
            found += 1
    assert found >= 18, f"{found} of 20 prompts were found again"


def test_a_block_that_is_not_full_comes_back(make_node: MakeNode, make_client: MakeClient, tmp_path: Path) -> None:
    node = make_node(*SIZE, "--tier", f"dir:{tmp_path}/tier")
    node.wait_touched()
    client = make_client(node)
    tail = Tail(key("directory"), bytes([5, 0, 0, 0, 6, 0, 0, 0]))
    keys = [key("a/0"), bytes(tail.key)]
    reservation = client.reserve(MEMORY, bytes(16), keys, tails=[*[None] * (len(keys) - 1), tail])
    segments = client.segments(reservation.epoch)
    for position, ref in reservation.granted.items():
        segments.page(ref, PAGE)[:] = page(keys[position], PAGE)
    client.commit(reservation)
    until(written(node, 2), "all was written", 45)
    lose_memory(node)

    client = make_client(node)
    asked = Tail(tail.directory, tail.tokens + bytes([7, 0, 0, 0]))
    until(lambda: client.lookup_tail(READER, asked).tokens == 2, "the tail came up", 45)
    hit = client.lookup_tail(MEMORY, asked, lease=True)
    assert hit.key == tail.key
    assert hit.lease is not None
    (ref,) = hit.lease.refs
    assert bytes(client.segments(hit.lease.epoch).page(ref, PAGE)) == page(keys[1], PAGE)


def test_a_tier_that_is_damaged_serves_no_wrong_byte(
    make_node: MakeNode, make_client: MakeClient, tmp_path: Path
) -> None:
    node = make_node(*SIZE, "--tier", f"dir:{tmp_path}/tier")
    node.wait_touched()
    keys = chain("a", 8)
    save(make_client(node), MEMORY, keys)
    until(written(node, 8), "all was written", 45)
    (pack,) = (tmp_path / "tier").glob("*/*.pack")
    raw = bytearray(pack.read_bytes())
    raw[len(raw) - 3 * PAGE] ^= 1
    pack.write_bytes(raw)
    lose_memory(node)

    client = make_client(node)
    until(lambda: look(client, READER, keys).count == 5, "what is good came up", 45)
    until(lambda: tier(node)["fetch_corrupt"] > 0, "what is bad was noticed", 45)
    assert read(client, MEMORY, keys)[:5] == [page(one, PAGE) for one in keys[:5]]
    until(lambda: look(client, MEMORY, keys).below == 0, "nothing bad is promised", 45)


def test_a_tier_that_vanishes_costs_hits_only(make_node: MakeNode, make_client: MakeClient, tmp_path: Path) -> None:
    folder = tmp_path / "tier"
    node = make_node(*SIZE, "--tier", f"dir:{folder}")
    node.wait_touched()
    client = make_client(node)
    save(client, MEMORY, chain("a", 8))
    until(written(node, 8), "all was written", 45)
    shutil.rmtree(folder)
    folder.touch()
    save(client, MEMORY, chain("b", 8))
    until(lambda: not tier(node)["writing"], "the tier was cut out", 45)
    assert read(client, MEMORY, chain("b", 8)) == [page(one, PAGE) for one in chain("b", 8)]
    folder.unlink()
    until(lambda: bool(tier(node)["writing"]), "the tier is back", 45)
    save(client, MEMORY, chain("c", 8))
    until(written(node, 16), "the tier is in use again", 45)


def test_a_node_that_stops_writes_what_waits(make_node: MakeNode, make_client: MakeClient, tmp_path: Path) -> None:
    node = make_node(*SIZE, "--tier", f"dir:{tmp_path}/tier")
    node.wait_touched()
    client = make_client(node)
    save(client, MEMORY, chain("a", 100))
    assert node.stop() == 0
    node.start()
    node.wait_touched()
    client = make_client(node)
    until(lambda: look(client, READER, chain("a", 100)).count == 100, "all came back", 45)
    assert "Traceback" not in node.log


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("dir:relative?sise=1GB", "did you mean size"),
        ("ftp://x", "expected dir:/folder, s3://bucket/prefix or mooncake:/etc/mooncake.json"),
        ("dir:/proc/nope/tier", "cannot keep pages in /proc/nope/tier"),
        ("dir:/tmp/x?key=/nonexistent", "cannot read the key"),
    ],
)
def test_a_wrong_tier_is_one_sentence(flag: str, said: str, tmp_path: Path) -> None:
    node = NodeProcess("--tier", flag)
    try:
        node.spawn()
        assert node.wait() in (2, 3)
        (line,) = [line for line in node.log.splitlines() if line.startswith("error: ")]
        assert said in line
        assert "Traceback" not in node.log
    finally:
        node.close()


def test_an_upgrade_keeps_the_tier(make_node: MakeNode, make_client: MakeClient, tmp_path: Path) -> None:
    node = make_node(*SIZE, "--tier", f"dir:{tmp_path}/tier")
    node.wait_touched()
    client = make_client(node)
    save(client, MEMORY, chain("a", 50))
    node.upgrade()
    assert read(client, MEMORY, chain("a", 50)) == [page(one, PAGE) for one in chain("a", 50)]
    save(client, MEMORY, chain("b", 50))
    until(written(node, 50), "it writes as before", 45)
    until(lambda: node.figures()["leases"] == 0, "nothing stays held", 45)


def test_a_miss_says_that_a_tier_has_it_and_warm_brings_it(
    make_node: MakeNode, make_client: MakeClient, tmp_path: Path
) -> None:
    node = make_node(*SIZE, "--tier", f"dir:{tmp_path / 'tier'}")
    keys = chain("warm", 3)
    save_whole(make_client(node), keys)
    until(written(node, 3), "it is written below", 45)
    lose_memory(node)
    client = make_client(node)
    until(lambda: tier(node).get("tier_pages") == 3, "the tier is known again", 45)
    lower = Reason.LOWER_TIER.code
    assert client.explain(READER.name, b"".join([*keys, key("other")])).codes[:3] == bytes([lower] * 3)
    report = client.administer(Warm(READER.name, b"".join(keys)))
    assert report == {"pages": 3, "in_memory": 0, "on_their_way": 3}
    until(lambda: client.explain(READER.name, b"".join(keys)).codes == bytes(3), "it is in memory", 45)
    assert client.administer(Warm(READER.name, b"".join(keys)), dry_run=True)["in_memory"] == 3
    with pytest.raises(PoolRefused):
        client.administer(Warm("nobody", b"".join(keys)))


def test_what_is_cleared_is_gone_from_memory_tier_and_after_a_restart(
    make_node: MakeNode,
    make_client: MakeClient,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    node = make_node(*SIZE, "--tier", f"dir:{tmp_path / 'tier'}")
    monkeypatch.setenv("EMS_SOCKET", str(node.socket))
    keys, other = chain("cleared", 6), Namespace("tenant/other/layout", PAGE)
    client = make_client(node)
    save_whole(client, keys)
    assert save(client, other, chain("other", 3)) == 3
    until(written(node, 9), "it is written below", 45)
    assert run(["clear", "--model", "model", "--dry-run"]) == 0
    assert "would clear 6 pages" in (said := capsys.readouterr().out)
    assert "tier: 6 pages" in said
    assert run(["clear", "--model", "model", "-o", "json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["removed"], [one["pages"] for one in report["tiers"]]) == (6, [6])
    assert run(["list"]) == 0
    assert f"dir:{tmp_path / 'tier'}" in capsys.readouterr().out
    hits = look(client, READER, keys)
    assert (hits.count, hits.below) == (0, 0)
    lose_memory(node)
    client = make_client(node)
    until(lambda: look(client, Namespace(other.name, 0), chain("other", 3)).count == 3, "the other came back", 45)
    assert look(client, READER, keys).below == 0
    assert len(list((tmp_path / "tier").glob("*/*.pack"))) == 1


def test_a_model_is_brought_up_whole(
    make_node: MakeNode,
    make_client: MakeClient,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    node = make_node(*SIZE, "--tier", f"dir:{tmp_path / 'tier'}")
    monkeypatch.setenv("EMS_SOCKET", str(node.socket))
    keys = chain("warm", 20)
    save_whole(make_client(node), keys)
    until(written(node, 20), "it is written below", 20)
    lose_memory(node)
    until(lambda: tier(node).get("tier_pages") == 20, "the tier is known again", 20)
    assert run(["list", "-o", "json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["items"]
    assert (row["namespace"], row["pages"], row["tiers"][0]["pages"]) == (MEMORY.name, 0, 20)
    assert run(["show", keys[3].hex()]) == 0
    assert f"dir:{tmp_path / 'tier'}" in capsys.readouterr().out
    assert run(["warm", "--model", "model", "--dry-run"]) == 0
    assert "at most 20 pages" in capsys.readouterr().out
    assert run(["warm", "--model", "model", "--limit", "640KB", "-o", "json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["pages"], report["namespaces"][0]["reason"]) == (10, "the limit is reached")
    assert run(["warm", MEMORY.name]) == 0
    assert "10 pages (640.0 KiB) came, 10 were in memory" in capsys.readouterr().out
    assert read(make_client(node), MEMORY, keys) == [page(one, PAGE) for one in keys]
    assert run(["warm", "--model", "nobody's"]) == 1


def test_stop_with_clear_says_what_stays(make_node: MakeNode, make_client: MakeClient, tmp_path: Path) -> None:
    node = make_node(*SIZE, "--tier", f"dir:{tmp_path / 'tier'}")
    save_whole(make_client(node), chain("a", 3))
    until(written(node, 3), "it is written below", 20)
    command = [sys.executable, "-m", "ems.cli", "stop", "--clear", "--socket", str(node.socket)]
    stopped = subprocess.run(command, capture_output=True, text=True, check=False)
    assert stopped.returncode == 0
    assert f"what is in dir:{tmp_path / 'tier'} stays" in stopped.stderr
    assert list((tmp_path / "tier").glob("*/*.pack"))


def test_a_lookup_of_what_only_a_tier_has_counts_as_such(
    make_node: MakeNode, make_client: MakeClient, tmp_path: Path
) -> None:
    node = make_node(*SIZE, "--tier", f"dir:{tmp_path / 'tier'}")
    keys = chain("below", 2)
    save_whole(make_client(node), keys)
    until(written(node, 2), "it is written below", 45)
    lose_memory(node)
    client = make_client(node)
    until(lambda: tier(node).get("tier_pages") == 2, "the tier is known again", 45)
    hits = client.lookup(READER, b"".join(keys), hints=LookupHints("r-1"))
    assert (hits.count, hits.reason) == (0, Reason.LOWER_TIER)
    assert node.figures()["misses"]["lower_tier"] >= 1
    (row,) = client.administer(Show("r-1"))["lookups"]
    assert row["reason"] == "lower_tier"
