"""Whole namespaces brought up before anybody asks, and what is told of tiers without asking them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from ems.errors import PoolRefused
from ems.pool.administration.refilling import LIMIT, NO_ROOM
from ems.pool.protocol.acts import List, Refill, Show
from tests.pool.tiers.administered import OTHER, Administered, administered, below
from tests.pool.tiers.node_with_tier import NAME, PAGE, chain, stored


@pytest_asyncio.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Callable[..., Administered]]:
    async with administered(tmp_path) as make:
        yield make


async def ready(one: Administered, pages: int) -> None:
    """Memory is touched and the tier has looked around."""
    await one.until(lambda: one.node.core.stats()["bytes_touched"] == 2 << 20)
    await one.until(lambda: one.tier.figures()["pages"] == pages and one.state._keeping is None)


async def test_a_whole_namespace_comes_up(bench: Callable[..., Administered]) -> None:
    one, keys = bench(), chain("a", 60)
    await stored(one, keys)
    one.forget()
    would = await one.do(Refill(namespace=NAME), dry_run=True)
    assert ([row["pages"] for row in would["namespaces"]], one.present(keys)) == ([60], 0)
    report = await one.do(Refill(namespace=NAME))
    (row,) = report["namespaces"]
    assert (row["pages"], row["bytes"], row["in_memory"], row["reason"]) == (60, 60 * PAGE, 0, "")
    assert report["on_their_way"] == 0
    assert one.present(keys) == 60
    assert one.right(keys)
    again = (await one.do(Refill(namespace=NAME)))["namespaces"][0]
    assert (again["pages"], again["in_memory"]) == (0, 60)


async def test_a_namespace_that_only_a_tier_knows_comes_up(bench: Callable[..., Administered], tmp_path: Path) -> None:
    below(tmp_path / "tier", OTHER, chain("b", 8))
    one = bench()
    await ready(one, 8)
    assert [row["pages"] for row in (await one.do(Refill(model="other"), dry_run=True))["namespaces"]] == [8]
    assert one.node.core.find_namespace(OTHER) == -1
    assert (await one.do(Refill(model="other")))["pages"] == 8
    assert len(one.node.core.namespaces[one.node.core.find_namespace(OTHER)].index) == 8
    with pytest.raises(PoolRefused, match="below memory there is no model"):
        await one.do(Refill(model="nobody's"))


async def test_what_was_used_last_comes_first_and_a_limit_holds(
    bench: Callable[..., Administered], tmp_path: Path
) -> None:
    for name, used in (("old", 10), ("new", 20)):
        below(tmp_path / "tier", NAME, chain(name, 20))
        for path in (tmp_path / "tier").glob("*/*.pack"):
            if path.stat().st_mtime > 100:
                os.utime(path, (used, used))
    one = bench()
    await ready(one, 40)
    report = await one.do(Refill(namespace=NAME, limit=25 * PAGE))
    assert (report["pages"], report["namespaces"][0]["reason"]) == (25, LIMIT)
    assert (one.present(chain("new", 20)), one.present(chain("old", 20))) == (20, 5)


async def test_nothing_leaves_memory_for_what_is_brought_up(bench: Callable[..., Administered], tmp_path: Path) -> None:
    below(tmp_path / "tier", NAME, chain("below", 400))
    below(tmp_path / "tier", OTHER, chain("other", 400))
    one, mine = bench(), chain("mine", 200)
    await ready(one, 800)
    assert one.save(mine) == 200
    would = await one.do(Refill(namespace=NAME), dry_run=True)
    report = await one.do(Refill(namespace=NAME))
    (row,) = report["namespaces"]
    assert row["reason"] == NO_ROOM
    assert 200 < row["pages"] <= would["pages"] <= 300
    assert one.present(chain("below", 400)) == row["pages"]
    assert one.present(mine) == 200
    assert one.node.core.stats()["counters"]["pages_evicted"] == 0  # type: ignore[index]
    both = await one.do(Refill(tenant="tenant"))
    assert (both["pages"], both["namespaces"][0]["reason"]) == (0, NO_ROOM)


async def test_two_namespaces_share_the_room_and_nothing_leaves(
    bench: Callable[..., Administered], tmp_path: Path
) -> None:
    for name in ("tenant/m/one", "tenant/m/two"):
        below(tmp_path / "tier", name, chain(name, 400))
    one = bench()
    await ready(one, 800)
    report = await one.do(Refill(model="m", tenant="tenant"))
    assert [row["reason"] for row in report["namespaces"]] == [NO_ROOM] * 2
    assert all(row["pages"] > 100 for row in report["namespaces"])
    assert one.node.core.stats()["counters"]["pages_evicted"] == 0  # type: ignore[index]


async def test_a_suffix_without_its_prefix_stays_below(bench: Callable[..., Administered], tmp_path: Path) -> None:
    keys = chain("a", 8)
    below(tmp_path / "tier", NAME, keys[4:], parent=keys[3])
    below(tmp_path / "tier", NAME, chain("b", 2))
    one = bench()
    await ready(one, 6)
    report = (await one.do(Refill(namespace=NAME)))["namespaces"][0]
    assert (report["pages"], report["without_prefix"]) == (2, 4)
    assert one.save(keys[:4]) == 4
    assert (await one.do(Refill(namespace=NAME)))["pages"] == 4, "its prefix is in memory"
    assert one.present(keys) == 8


async def test_a_tier_that_fails_is_named(bench: Callable[..., Administered]) -> None:
    one, keys = bench(), chain("a", 8)
    await stored(one, keys)
    one.forget()
    one.tier.failing = True
    first = await one.do(Refill(namespace=NAME))
    assert first["pages"] == 0
    (tier,) = (await one.do(Refill(namespace=NAME)))["tiers"]
    assert tier["reason"] == "it is left alone because it does not work: the test lets this tier fail"
    one.tier.failing = False


async def test_a_list_and_a_page_tell_of_tiers_without_asking_them(
    bench: Callable[..., Administered], tmp_path: Path
) -> None:
    below(tmp_path / "tier", OTHER, chain("b", 3))
    one, keys = bench(), chain("a", 4)
    await ready(one, 3)
    one.save(keys)
    await one.until(lambda: one.in_tier(keys) == 4)
    await one.until(one.nothing_is_held)
    one.tier.gate.clear()
    rows = {row["namespace"]: row for row in (await one.do(List()))["namespaces"]}
    name = one.config.name
    assert [(held["name"], held["pages"]) for held in rows[NAME]["tiers"]] == [(name, 4)]
    assert (rows[OTHER]["pages"], rows[OTHER]["model"], rows[OTHER]["page_size"]) == (0, "other", PAGE)
    (held,) = rows[OTHER]["tiers"]
    assert (held["pages"], held["bytes"] >= 3 * PAGE) == (3, True)
    assert (await one.do(Show(OTHER)))["tiers"] == [held]
    (row,) = (await one.do(Show(keys[0].hex())))["namespaces"]
    assert (row["state"], row["tiers"]) == ("present", [name])
    (row,) = (await one.do(Show(chain("b", 1)[0].hex())))["namespaces"]
    assert (row["namespace"], row["state"], row["reason"], row["tiers"]) == (OTHER, "absent", "lower_tier", [name])
    assert (await one.do(Show(chain("c", 1)[0].hex())))["namespaces"] == []
    await asyncio.sleep(0)  # the tier manager has its turn
