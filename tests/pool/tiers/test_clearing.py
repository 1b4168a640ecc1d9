"""Clearing a node whose pages are in memory and in tiers: nothing that was meant comes back, nothing else is lost."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from ems.errors import PoolRefused
from ems.pool.administration.passes import PATIENCE
from ems.pool.administration.service import MAX_RUNNING
from ems.pool.protocol.acts import Clear, Pin
from ems.pool.tiers.answers import ForgetRequest, ForgetResult, Stored
from ems.pool.tiers.directory import FolderBlobs
from ems.pool.tiers.pack_seal import SealKeys
from ems.pool.tiers.packs import PackTier
from ems.pool.tiers.repair import Quarantine, mend
from tests.kit.tiers import KEYS, key, page
from tests.pool.tiers.administered import OTHER, Administered, administered, below
from tests.pool.tiers.faulty_tier import FaultyTier
from tests.pool.tiers.node_with_tier import NAME, PAGE, chain, stored


@pytest_asyncio.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Callable[..., Administered]]:
    async with administered(tmp_path) as make:
        yield make


async def test_what_is_cleared_does_not_come_up_again(bench: Callable[..., Administered]) -> None:
    one, keys = bench(), chain("a", 30)
    await stored(one, keys)
    report = await one.do(Clear(namespace=NAME))
    (tier,) = report["tiers"]
    assert (report["removed"], tier["pages"], tier["reason"]) == (30, 30, "")
    assert tier["bytes"] >= 30 * PAGE
    assert (one.present(keys), one.look(keys), one.in_tier(keys)) == (0, 0, 0)
    assert one.save(keys) == 30, "it can be stored again"
    await one.until(lambda: one.in_tier(keys) == 30)


async def test_what_fsck_mends_while_it_is_cleared_does_not_come_back(
    bench: Callable[..., Administered], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, keys = bench(), chain("a", 30)
    await stored(one, keys)
    (pack,) = one.folder.glob("*/*.pack")
    raw = bytearray(pack.read_bytes())
    raw[8192] ^= 1
    forget = PackTier.forget

    def meanwhile(tier: PackTier, request: ForgetRequest, *, dry_run: bool = False) -> ForgetResult:
        """Between the look at what there is and its removal."""
        if pack.exists():
            pack.write_bytes(raw)
            place = FolderBlobs(one.folder)
            name = str(pack.relative_to(one.folder))
            assert mend(place, place.put, name, KEYS, Quarantine(place, 0)).kind == "mended"
            for aside in one.folder.glob("quarantine/*"):
                os.utime(aside, (2**32, 2**32))  # the clock of the place is ahead
        return forget(tier, request, dry_run=dry_run)

    monkeypatch.setattr(PackTier, "forget", meanwhile)
    await one.do(Clear(namespace=NAME))
    assert one.in_tier(keys) == 0
    assert not list(one.folder.glob("*/*.pack"))


async def test_what_only_the_tier_has_is_cleared_too(bench: Callable[..., Administered]) -> None:
    one, keys = bench(), chain("a", 4)
    await stored(one, keys)
    one.forget()
    below(one.folder, OTHER, chain("b", 3))
    would = await one.do(Clear(tenant="tenant"), dry_run=True)
    assert [tier["pages"] for tier in would["tiers"]] == [3]
    assert one.in_tier(chain("b", 3), OTHER) == 3
    did = await one.do(Clear(tenant="tenant"))
    assert (did["matched"], [tier["pages"] for tier in did["tiers"]]) == (0, [3])
    assert (one.in_tier(chain("b", 3), OTHER), one.in_tier(keys)) == (0, 4)
    assert [tier["pages"] for tier in (await one.do(Clear(everything=True)))["tiers"]] == [4]


async def test_packs_that_the_node_does_not_understand_stay_and_are_named(bench: Callable[..., Administered]) -> None:
    one, keys = bench(), chain("a", 4)
    await stored(one, keys)
    others = PackTier("other", FolderBlobs(one.folder), SealKeys(b"the secret of somebody else", encrypts=False))
    for name in (NAME, OTHER):
        others.store(name, [Stored(key("x"), key("y"), None, memoryview(page("x")))])
    acts = {Clear(namespace=NAME): [NAME], Clear(tenant="tenant"): [OTHER], Clear(everything=True): [NAME, OTHER]}
    for act, names in acts.items():
        (tier,) = (await one.do(act))["tiers"]
        assert tier["remaining"] == names
        assert tier["reason"].startswith(f"{len(names)} packs ")
        assert one.in_tier(keys) == 0
    assert len(list(one.folder.glob("*/*.pack"))) == 2


async def test_a_tier_can_be_left_alone(bench: Callable[..., Administered]) -> None:
    one, keys = bench(), chain("a", 4)
    await stored(one, keys)
    report = await one.do(Clear(namespace=NAME, memory_only=True))
    assert (report["removed"], "tiers" in report) == (4, False)
    assert one.look(keys) == 4
    await one.until(lambda: one.present(keys) == 4)


async def test_a_dry_run_counts_and_changes_nothing(bench: Callable[..., Administered]) -> None:
    one, keys = bench(), chain("a", 8)
    await stored(one, keys)
    await one.do(Pin(NAME, b"".join(keys[:2])))
    report = await one.do(Clear(everything=True), dry_run=True)
    assert (report["matched"], report["removed"], report["tiers"][0]["pages"]) == (6, 0, 6)
    assert (one.present(keys), one.in_tier(keys)) == (8, 8)


async def test_what_is_pinned_stays_in_both(bench: Callable[..., Administered]) -> None:
    one, keys = bench(), chain("a", 8)
    await stored(one, keys)
    await one.do(Pin(NAME, b"".join(keys[:2])))
    report = await one.do(Clear(everything=True))
    assert (report["removed"], report["tiers"][0]["pages"]) == (6, 6)
    assert (one.present(keys), one.in_tier(keys)) == (2, 2)
    one.node.core.namespaces[one.namespace].pins.unpin(keys)
    one.forget()
    assert one.look(keys) == 2
    await one.until(lambda: one.present(keys) == 2)
    assert one.right(keys)


async def test_only_what_is_old_in_both_is_cleared(bench: Callable[..., Administered]) -> None:
    one, old, young = bench(), chain("old", 4), chain("young", 4)
    await stored(one, old)
    one.save(young)
    await one.until(lambda: one.in_tier(young) == 4)
    for path in one.folder.glob("*/*.pack"):
        os.utime(path, (1, 1))
    one.state.tier = one.tier = FaultyTier("dir", FolderBlobs(one.folder), KEYS)
    core = one.node.core
    for number, name in enumerate((*old, *young)):
        page_of = core.page(one.namespace, name)
        assert page_of is not None
        page_of.used -= 7200.0 if number < 4 else 0.0
    report = await one.do(Clear(older_than=3600.0))
    assert (report["removed"], report["tiers"][0]["pages"]) == (4, 4)
    assert (one.present(young), one.in_tier(young), one.in_tier(old)) == (4, 4, 0)
    assert (await one.do(Clear(older_than=3600.0)))["tiers"][0]["pages"] == 0


async def test_what_waits_to_be_written_is_not_written(bench: Callable[..., Administered]) -> None:
    one, first, later = bench(), chain("a", 4), chain("b", 4)
    await stored(one, first)
    one.tier.gate.clear()
    one.save(later)
    await one.until(lambda: one.state.writes)
    waiting = chain("c", 4)
    one.save(waiting)
    assert one.state.write_back.size == 8 * PAGE
    clearing = asyncio.ensure_future(one.do(Clear(everything=True)))
    await one.until(lambda: one.tier_manager._held_back)
    assert one.state.write_back.size == 4 * PAGE, "what waits is let go of at once"
    await one.until(lambda: one.present(waiting) == 0)
    one.tier.gate.set()
    report = await clearing
    assert (report["removed"], report["kept"]) == (12, 0)
    assert one.in_tier([*first, *later, *waiting]) == 0
    assert one.look([*first, *later, *waiting]) == 0


async def test_what_is_being_fetched_is_cleared_when_it_is_there(bench: Callable[..., Administered]) -> None:
    one, keys = bench(), chain("a", 8)
    await stored(one, [*keys, *chain("b", 1)])
    one.forget()
    one.tier.gate.clear()
    assert one.look(keys) == 8
    await one.until(lambda: one.state.fetches)
    clearing = asyncio.ensure_future(one.do(Clear(everything=True)))
    await one.until(lambda: one.tier_manager._held_back)
    assert one.tier_manager.prefetch(one.namespace, chain("b", 1)) == 0
    one.tier.gate.set()
    report = await clearing
    assert report["removed"] == 8, "the ninth never came up"
    assert report["tiers"][0]["pages"] == 9
    assert (one.present(keys), one.in_tier(keys)) == (0, 0)


async def test_what_is_being_fetched_is_cleared_with_its_prefix_in_memory(bench: Callable[..., Administered]) -> None:
    one, keys = bench(), chain("a", 8)
    await stored(one, keys)
    one.forget()
    assert one.save(keys[:4]) == 4
    await one.until(lambda: not one.state.writes)
    one.tier.gate.clear()
    one.look(keys)
    await one.until(lambda: one.state.fetches)
    clearing = asyncio.ensure_future(one.do(Clear(everything=True)))
    await one.until(lambda: one.tier_manager._held_back)
    one.tier.gate.set()
    report = await asyncio.wait_for(clearing, PATIENCE / 2)
    assert (report["removed"], report["kept"]) == (8, 0)
    assert (one.present(keys), one.in_tier(keys)) == (0, 0)


async def test_a_clear_that_is_refused_closes_no_doors(bench: Callable[..., Administered]) -> None:
    one, keys = bench(), chain("a", 8)
    await stored(one, keys)
    await one.until(lambda: one.state._keeping is None)
    one.tier.gate.clear()
    clearing = [asyncio.ensure_future(one.do(Clear(namespace=f"none{number}"))) for number in range(MAX_RUNNING)]
    await one.until(lambda: len(one.tier_manager._held_back) == MAX_RUNNING)
    with pytest.raises(PoolRefused, match="8 passes are running"):
        await one.do(Clear(namespace=NAME))
    one.tier.gate.set()
    await asyncio.gather(*clearing)
    assert not one.tier_manager._held_back
    assert (one.present(keys), one.in_tier(keys)) == (8, 8)


async def test_what_is_stored_meanwhile_stays_and_is_written(bench: Callable[..., Administered]) -> None:
    one, old, new = bench(), chain("a", 4), chain("b", 4)
    await stored(one, old)
    await one.until(lambda: one.state._keeping is None)
    one.tier.gate.clear()
    clearing = asyncio.ensure_future(one.do(Clear(everything=True)))
    await one.until(lambda: one.state._keeping is not None)
    assert one.save(new) == 4
    one.tier.gate.set()
    await clearing
    assert (one.present(old), one.present(new)) == (0, 4)
    await one.until(lambda: one.in_tier(new) == 4)
    assert one.in_tier(old) == 0


async def test_a_tier_that_fails_says_so_and_memory_is_cleared(
    bench: Callable[..., Administered], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ems.pool.tiers.tier_state.FIRST_PAUSE", 0.05)
    one, keys = bench(), chain("a", 4)
    await stored(one, keys)
    await one.until(lambda: one.state._keeping is None)
    one.tier.failing = True
    report = await one.do(Clear(everything=True))
    (tier,) = report["tiers"]
    assert (report["removed"], tier["pages"], tier["remaining"]) == (4, 0, [NAME])
    assert tier["reason"] == "the test lets this tier fail"
    assert not one.state.writing.open
    again = (await one.do(Clear(everything=True)))["tiers"][0]
    assert again["reason"] == "it is left alone because it does not work: the test lets this tier fail"
    assert again["remaining"] == [NAME]
    one.tier.failing = False
    await one.until(lambda: one.state.writing.open and one.state.reading.open)
    assert (await one.do(Clear(everything=True)))["tiers"][0]["pages"] == 4


async def test_nobody_waits_for_a_tier_that_hangs(
    bench: Callable[..., Administered], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ems.pool.tiers.tier_state.KEEPER_PATIENCE", 1)
    one, keys = bench(timeout=0.2), chain("a", 4)
    await stored(one, keys)
    await one.until(lambda: one.state._keeping is None)
    one.tier.gate.clear()
    report = await one.do(Clear(everything=True))
    (tier,) = report["tiers"]
    assert (report["removed"], tier["reason"], tier["remaining"]) == (4, "it hangs and is left alone", [NAME])
    one.tier.gate.set()


async def test_a_tier_that_is_only_read_is_not_cleared(bench: Callable[..., Administered], tmp_path: Path) -> None:
    below(tmp_path / "tier", OTHER, chain("b", 3))
    one = bench(write="never")
    await one.until(one.tier.namespaces)
    (tier,) = (await one.do(Clear(everything=True)))["tiers"]
    assert (tier["reason"], tier["remaining"]) == ("this node only reads it (write=never)", [OTHER])
    (tier,) = (await one.do(Clear(namespace=NAME)))["tiers"]
    assert (tier["reason"], tier["remaining"]) == ("", []), "it has nothing of what is meant"
    assert one.in_tier(chain("b", 3), OTHER) == 3
