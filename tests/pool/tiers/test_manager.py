"""Between segments and tiers: nothing is lost, pinned or handed out wrongly, whatever a tier does."""

from __future__ import annotations

import asyncio
import errno
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import pytest_asyncio

from ems.pool.keys import NO_PARENT, Tail, page_keys, shard_masks, split_keys
from ems.pool.layout import PageFlag, PageRef, crc32c, header_offset
from ems.pool.media import STORAGE, asked_for, named
from ems.pool.movement.questions import MOST_PARTY_KEYS
from ems.pool.protocol.messages import FROM_NOW
from ems.pool.tiers.answers import Asking, KeyRun, Outcome, Unknown, Wanted
from ems.pool.tiers.cluster.known import KnownKeys
from ems.pool.tiers.manager import MOST_DUE, MOST_WAITING
from ems.pool.tiers.packs import PackTier
from ems.pool.tiers.threads import Job, ThreadPool
from tests.kit.tiers import key, page
from tests.pool.segment_memory import map_segment
from tests.pool.tiers.node_with_tier import NAME, PAGE, PATIENCE, Bench, chain, stored
from tests.pool.wrong_core import wrong_core

FLAGS_AT = 56
"""Where in a header its flags are."""


@pytest_asyncio.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def make(**settings: object) -> Bench:
        made.append(Bench(tmp_path, **settings))
        return made[-1]

    yield make
    for one in made:
        one.tier.gate.set()
        await one.until(one.nothing_is_held)
        assert wrong_core(one.node.core) == []
        one.node.close()


async def test_a_lookup_brings_back_what_memory_lost(bench: Callable[..., Bench]) -> None:
    one, keys = bench(), chain("a", 30)
    await stored(one, keys)
    one.forget()
    assert one.present(keys) == 0
    assert one.look([*keys, key("none")]) == 30
    await one.until(lambda: one.present(keys) == 30)
    assert one.right(keys)
    assert one.look(keys) == 0


async def test_what_a_tier_gets_and_loses_is_told(bench: Callable[..., Bench]) -> None:
    one, keys = bench(), chain("a", 4)
    names = asked_for([NAME])
    on_disk = names.index(named(NAME, STORAGE))
    changes = one.node.core.changes
    place = changes.since(FROM_NOW, names, time.monotonic())[0]
    told: list[tuple[bool, bytes]] = []

    def news() -> list[tuple[bool, bytes]]:
        nonlocal place
        place, _, runs = changes.since(place, names, time.monotonic())
        told.extend((run.stored, run.keys) for run in runs if run.namespace == on_disk)
        return told

    await stored(one, keys)
    assert news() == [(True, b"".join(keys))]
    assert one.tier_manager.prefetch(one.namespace, keys) == 4
    for pack in one.folder.glob("*/*.pack"):
        pack.unlink()
    one.state.look_soon()
    await one.until(lambda: len(news()) == 2)
    assert told[1] == (False, b"".join(keys))


async def test_what_a_tier_had_before_is_told_when_somebody_looks_it_up(bench: Callable[..., Bench]) -> None:
    one, keys = bench(), chain("a", 4)
    await stored(one, keys)
    one.forget()
    names = [named(NAME, STORAGE)]
    place = one.node.core.changes.since(FROM_NOW, names, time.monotonic())[0]
    one.look(keys)
    one.look(keys)
    (run,) = one.node.core.changes.since(place, names, time.monotonic())[2]
    assert (run.stored, run.keys) == (True, b"".join(keys))


async def test_keys_that_come_up_are_being_written_for_everybody(bench: Callable[..., Bench]) -> None:
    one, keys = bench(), chain("a", 4)
    await stored(one, keys)
    one.forget()
    one.tier.gate.clear()
    assert one.look(keys) == 4
    await one.until(lambda: one.state.fetches)
    found = one.node.core.reading.lookup(9, one.namespace, keys, lease=True)
    assert (len(found.pages), found.pending) == (0, 4)
    assert one.look(keys) == 4, "they still come up"
    assert one.save(keys, client_id=7) == 0, "nobody else writes them"
    calls = one.tier.calls
    one.tier.gate.set()
    await one.until(lambda: one.present(keys) == 4)
    assert one.tier.calls <= calls + 1, "each page is fetched once"


async def test_part_of_a_block_that_comes_up_is_waited_for(bench: Callable[..., Bench]) -> None:
    one, tail = bench(kind="mooncake"), Tail(key("directory"), b"five" + b"six.")
    await one.until(lambda: one.node.core.stats()["bytes_touched"] == 2 << 20)
    reserved = one.node.promise(1, one.namespace, bytes(NO_PARENT), [bytes(tail.key)], [tail])
    one.memory(reserved.granted[0])[:] = page(bytes(tail.key))
    done = one.node.storing.commit(1, reserved.reservation)
    one.tier_manager.committed(one.namespace, done.pages)
    await one.until(lambda: one.state.counts["pages_written"] == 1)
    await one.until(one.nothing_is_held)
    one.forget()

    def comes() -> bool:
        shared, _ = one.node.core.reading.lookup_tail(9, one.namespace, tail, lease=False)
        return one.tier_manager.looked_up_tail(one.namespace, tail, shared).keys > 0

    one.tier.gate.clear()
    assert one.tier_manager.looked_up_tail(one.namespace, tail, 0, asking=Asking(local_only=True)).keys == 0
    assert comes(), "it is about to be fetched"
    await one.until(lambda: one.state.fetches)
    assert comes(), "it is being fetched"
    one.tier.gate.set()
    await one.until(lambda: one.present([bytes(tail.key)]) == 1)
    assert not comes()


async def test_the_pages_of_a_tails_chunk_come_up_together(bench: Callable[..., Bench]) -> None:
    one, tail = bench(kind="mooncake"), Tail(key("directory"), b"five" + b"six.")
    await one.until(lambda: one.node.core.stats()["bytes_touched"] == 2 << 20)
    pages = split_keys(page_keys(tail.key, 3))
    reserved = one.node.promise(1, one.namespace, bytes(NO_PARENT), pages, [tail, None, None])
    for granted, name in zip(reserved.granted, pages, strict=True):
        one.memory(granted)[:] = page(name)
    one.tier_manager.committed(one.namespace, one.node.storing.commit(1, reserved.reservation).pages)
    await one.until(lambda: one.state.counts["pages_written"] == 3)
    await one.until(one.nothing_is_held)
    one.forget()
    longer = Tail(tail.directory, tail.tokens + b"more")
    assert one.tier_manager.looked_up_tail(one.namespace, longer, 0, shard_masks(3)).keys
    await one.until(lambda: one.present(pages) == 3)


async def test_a_read_that_hangs_frees_its_keys_at_once_and_its_slots_when_it_ends(bench: Callable[..., Bench]) -> None:
    one, keys = bench(timeout=0.2), chain("a", 4)
    await stored(one, keys)
    one.forget()
    one.tier.gate.clear()
    one.look(keys)
    await one.until(lambda: not one.state.reading.open)
    assert one.node.core.reading.lookup(9, one.namespace, keys, lease=False).pending == 0
    assert one.look(keys) == 0, "a tier that was cut out promises nothing"
    assert one.node.core.stats()["slots_resting"] == 4
    one.node.core.tick(time.monotonic() + 1e6)
    assert one.node.core.stats()["slots_resting"] == 4, "the thread may still write into them"
    assert one.save(keys) == 4, "engines go on"
    one.tier.gate.set()
    await one.until(lambda: one.node.core.stats()["slots_resting"] == 0)
    assert one.right(keys)
    assert one.state.counts["hung"] == 1


async def test_a_write_that_hangs_is_no_burden(bench: Callable[..., Bench]) -> None:
    one = bench(timeout=0.2)
    await one.until(lambda: one.node.core.stats()["bytes_touched"] == 2 << 20)
    await one.until(lambda: one.state._next_look > 0)
    one.tier.gate.clear()
    one.save(chain("a", 4))
    await one.until(lambda: not one.state.writing.open)
    one.save(chain("b", 4))
    assert one.state.counts["not_offered"] == 4
    assert one.state.write_back.size == 4 * PAGE, "what is being written stays pinned"
    one.tier.gate.set()
    await one.until(one.nothing_is_held)


async def test_a_tier_that_fails_is_left_alone_and_comes_back(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ems.pool.tiers.tier_state.FIRST_PAUSE", 0.05)
    one, keys = bench(), chain("a", 4)
    await stored(one, keys)
    one.forget()
    one.tier.failing = True
    assert one.look(keys) == 4
    await one.until(lambda: not one.state.reading.open)
    assert one.state.figures(time.monotonic())["reason"] == "the test lets this tier fail"
    assert one.present(keys) == 0
    calls = one.tier.calls
    assert one.look(keys) == 0
    assert one.tier.calls == calls
    one.tier.failing = False
    await one.until(lambda: one.state.reading.open)
    one.look(keys)
    await one.until(lambda: one.present(keys) == 4)
    assert one.right(keys)


async def test_what_would_leave_memory_is_written_before(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ems.pool.movement.write_back.LINGER", 0.0)
    one = bench(write="on_evict")
    await one.until(lambda: one.node.core.stats()["bytes_touched"] == 2 << 20)
    prompts = [chain(str(number), 16) for number in range(60)]
    for keys in prompts:
        assert one.save(keys) == 16
        await asyncio.sleep(0)  # the tier manager has its turn
        await one.until(lambda: not one.state.write_back._waiting and not one.state.writes)
    assert one.present(prompts[0]) == 0
    reachable = [one.present(keys) + one.look(keys) for keys in prompts]
    assert sum(count == 16 for count in reachable) >= 57, reachable


async def test_a_writer_that_wishes_it_keeps_its_pages_from_a_cluster(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ems.pool.movement.write_back.LINGER", 0.0)
    one = bench(kind="mooncake")
    await one.until(lambda: one.node.core.stats()["bytes_touched"] == 2 << 20)
    for number in range(60):
        assert one.save(chain(str(number), 16), cluster_write="never") == 16
        await asyncio.sleep(0)  # the tier manager has its turn
    assert one.present(chain("0", 16)) == 0, "some left, which a tier is offered before"
    one.tier_manager._clean()
    assert (one.state.write_back.size, one.state.counts["pages_written"]) == (0, 0)
    one.save(chain("a", 4))
    await one.until(lambda: one.state.counts["pages_written"] == 4)


@pytest.mark.parametrize("own", ["on_save", "on_evict", "on_second_use"])
async def test_a_cluster_gets_pages_when_their_writer_wishes(bench: Callable[..., Bench], own: str) -> None:
    one, at_once, used = bench(kind="mooncake", write=own), chain("a", 4), chain("b", 4)
    await one.until(lambda: one.node.core.stats()["bytes_touched"] == 2 << 20)
    one.save(at_once, cluster_write="on_save")
    await one.until(lambda: one.state.counts["pages_written"] == 4)
    one.save(used, cluster_write="on_second_use")
    assert one.state.write_back.size == 0
    one.tier_manager.used(one.namespace, one.node.core.reading.lookup(9, one.namespace, used, lease=False).pages)
    await one.until(lambda: one.state.counts["pages_written"] == 8)


@pytest.mark.parametrize(("kind", "count"), [("dir", 4), ("s3", 0), ("mooncake", 0)])
async def test_who_reads_this_host_only_has_nothing_fetched_from_elsewhere(
    bench: Callable[..., Bench], kind: str, count: int
) -> None:
    one, keys = bench(kind=kind), chain("a", 4)
    await stored(one, keys)
    one.forget()
    one.tier.gate.clear()
    assert one.tier_manager.prefetch(one.namespace, keys, Asking(local_only=True)) == count
    assert one.tier_manager.looked_up(one.namespace, keys, 0, Asking(local_only=True)).keys == count
    assert len(one.tier_manager._promotions) == (count > 0)
    assert one.look(keys) == 4
    await one.until(lambda: one.state.fetches)
    assert one.tier_manager.looked_up(one.namespace, keys, 0, Asking(local_only=True)).keys == count, (
        "what others fetch"
    )
    one.tier.gate.set()
    await one.until(lambda: one.present(keys) == 4)


async def test_a_tier_that_is_only_read_is_never_written(bench: Callable[..., Bench]) -> None:
    one = bench(write="never")
    await one.until(lambda: one.node.core.stats()["bytes_touched"] == 2 << 20)
    for number in range(40):
        one.save(chain(str(number), 16))
        await asyncio.sleep(0)  # the tier manager has its turn
    assert one.state.write_back.size == 0
    assert not list(one.folder.glob("*/*.pack"))


async def test_too_slow_a_tier_is_not_asked(bench: Callable[..., Bench]) -> None:
    one, keys = bench(), chain("a", 8)
    await stored(one, keys)
    one.forget()
    for size in range(1, 10):
        one.state.speed.fetched.add(size * PAGE, size * 1.0, time.monotonic())
    assert one.tier_manager.looked_up(one.namespace, keys, 0, Asking(computing=0.001)).keys == 0
    assert one.state.speed.reluctance.refused == 1
    assert one.tier_manager.looked_up(one.namespace, keys, 0, Asking(computing=100.0)).keys == 8
    await one.until(lambda: one.present(keys) == 8)


async def test_prefetches_and_copies_that_wait_make_a_tier_too_slow_for_nobody(bench: Callable[..., Bench]) -> None:
    one, keys, others = bench(), chain("a", 8), [chain(f"other{number}", 30) for number in range(10)]
    for pages in (*others, keys):
        written = one.state.counts["pages_written"]
        await stored(one, pages)
        await one.until(lambda written=written: one.state.counts["pages_written"] > written)  # type: ignore[misc]
    one.forget()
    for size in range(1, 10):
        one.state.speed.fetched.add(size * PAGE, size * 0.001, time.monotonic())
    one.tier.gate.clear()
    for pages in others:
        assert one.tier_manager.bring(0, one.namespace, KeyRun(bytes(NO_PARENT), pages))
    await one.until(lambda: one.tier_manager.comes(one.namespace, others[0]))
    assert one.tier_manager.looked_up(one.namespace, keys, 0, Asking(computing=0.005)).keys == 8


def copies(one: Bench) -> None:
    """From now on all that is brought is a copy ahead."""
    ahead: Any = SimpleNamespace(arrived=lambda *_: None, discard=lambda *_: None, is_copy=lambda *_: True, step=int)
    one.tier_manager._ahead[0] = ahead


async def test_no_page_leaves_for_a_copy_and_a_copy_is_no_use(bench: Callable[..., Bench]) -> None:
    one, hot = bench(), chain("hot", 30)
    await stored(one, hot)
    one.forget()
    for number in range(30):
        one.save(chain(f"own{number}", 20))
    await one.until(one.nothing_is_held)
    space, core = one.node.core.namespaces[one.namespace], one.node.core
    while (full := core.reclaimer.idle_room(space)) > 0:
        one.save(chain(f"more{full}", 1))
    await one.until(one.nothing_is_held)
    pages, used = len(space.index), space.last_used
    run = KeyRun(bytes(NO_PARENT), hot)
    copies(one)
    assert one.tier_manager.bring(0, one.namespace, run)
    await one.until(lambda: not one.tier_manager.comes(one.namespace, hot))
    assert (one.present(hot), len(space.index)) == (0, pages)
    assert not one.tier_manager._is_crowded(one.namespace), "what engines ask for makes room"

    one.forget()
    assert one.tier_manager.bring(0, one.namespace, run)
    await one.until(lambda: core.page(one.namespace, hot[-1]) is not None and one.nothing_is_held())
    assert space.last_used == used
    assert one.present(hot) == 30


async def test_a_prefetch_brings_pages_up_without_a_lookup(bench: Callable[..., Bench]) -> None:
    one, keys = bench(), chain("a", 8)
    await stored(one, keys)
    one.forget()
    assert one.tier_manager.prefetch(one.namespace, [*keys, key("none")]) == 8
    await one.until(lambda: one.present(keys) == 8)
    assert one.right(keys)


async def test_a_page_that_was_corrupt_and_is_computed_again_is_not_written_half_done(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ems.pool.movement.write_back.LINGER", 1e9)
    one, keys = bench(), chain("a", 3)
    await one.until(lambda: one.node.core.stats()["bytes_touched"] == 2 << 20)
    one.save(keys)
    core = one.node.core
    wrong = core.page(one.namespace, keys[1])
    assert wrong is not None
    core.quarantine(one.namespace, wrong)
    again = one.node.promise(7, one.namespace, keys[0], keys[1:2])
    assert len(again.granted) == 1, "the engine computes it again"
    monkeypatch.setattr("ems.pool.movement.write_back.LINGER", 0.0)
    await one.until(lambda: one.state.counts["pages_written"] >= 2)
    await one.until(lambda: not one.state.write_back.size)
    assert [one.tier.holds(NAME, [name]) for name in keys] == [1, 0, 1], "its bytes are not there yet"
    core.writing.abort(7, again.reservation)


async def test_a_queue_of_nothing_but_corrupt_pages_ends(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ems.pool.movement.write_back.LINGER", 1e9)
    one, keys = bench(), chain("a", 1)
    await one.until(lambda: one.node.core.stats()["bytes_touched"] == 2 << 20)
    one.save(keys)
    wrong = one.node.core.page(one.namespace, keys[0])
    assert wrong is not None
    one.node.core.quarantine(one.namespace, wrong)
    monkeypatch.setattr("ems.pool.movement.write_back.LINGER", 0.0)
    await one.until(lambda: not one.state.write_back.size)
    assert one.tier.holds(NAME, keys) == 0


async def test_what_stands_behind_those_that_leave_first_is_written_too(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ems.pool.movement.write_back.LINGER", 0.0)
    monkeypatch.setattr("ems.pool.tiers.manager.CLEANED", 16)
    one = bench(write="on_evict")
    await one.until(lambda: one.node.core.stats()["bytes_touched"] == 2 << 20)
    assert sum(one.save(chain(str(number), 15)) for number in range(30)) == 450
    await one.until(lambda: one.state.counts["pages_written"] >= 70)
    written = one.state.counts["pages_written"]
    assert written < 120, "only what leaves soon"


async def test_a_tier_with_less_room_than_what_leaves_soon_is_not_written_for_ever(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ems.pool.movement.write_back.LINGER", 0.0)
    one = bench(write="on_evict", batch=32 << 10)
    one.tier._limit = 100_000
    await one.until(lambda: one.node.core.stats()["bytes_touched"] == 2 << 20)
    assert sum(one.save(chain(str(number), 15)) for number in range(30)) == 450
    for _ in range(20):
        one.tier_manager._tick()
        await one.until(lambda: not one.state.write_back.size)
    written = one.state.counts["pages_written"]
    assert one.tier.figures()["evicted_packs"], "it has less room than that"
    for _ in range(20):
        one.tier_manager._tick()
        await one.until(lambda: not one.state.write_back.size)
    assert one.state.counts["pages_written"] == written, "nobody uses anything"


async def test_memory_that_cannot_be_prepared_ends_one_portion_and_nothing_else(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, keys = bench(), chain("a", 4)
    await stored(one, keys)
    one.forget()
    promise = one.node.promise
    failed = []

    def full(*arguments: object, **named: object) -> object:
        failed.append(promise(*arguments, **named))  # type: ignore[arg-type]
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(one.node, "promise", full)
    one.look(keys)
    await one.until(lambda: failed)
    assert one.nothing_is_held()
    assert one.tier_manager._promotions.under_way == 0
    monkeypatch.setattr(one.node, "promise", promise)
    one.look(keys)
    await one.until(lambda: one.present(keys) == 4)


async def test_a_defect_does_not_stop_the_clock_of_the_tiers(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = bench()
    calls = []

    def keep(now: float) -> None:
        calls.append(now)
        if len(calls) == 1:
            raise RuntimeError("a defect")

    monkeypatch.setattr(one.state, "keep", keep)
    await one.until(lambda: len(calls) >= 2)


async def test_nobody_is_told_to_wait_for_pages_that_memory_has_no_room_for(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, keys = bench(), chain("a", 4)
    await stored(one, keys)
    one.forget()
    one.node.core.draining = True
    assert one.look(keys) == 4
    await one.until(lambda: not len(one.tier_manager._promotions))
    assert one.look(keys) == 0, "it was tried a moment ago"
    one.node.core.draining = False
    monkeypatch.setattr("ems.pool.tiers.manager.CROWDED_SECONDS", 0.0)
    assert one.look(keys) == 4
    await one.until(lambda: one.present(keys) == 4)


async def test_reads_that_were_not_begun_hang_with_the_one_before_them(bench: Callable[..., Bench]) -> None:
    one, first, second = bench(timeout=0.2, readers=1), chain("a", 4), chain("b", 4)
    await stored(one, [*first, *second])
    one.forget()
    wrong: list[dict[str, object]] = []
    one.node.loop.set_exception_handler(lambda _, context: wrong.append(context))
    one.tier.gate.clear()
    one.look(first)
    one.look(second)
    await one.until(lambda: not one.state.reading.open)
    assert wrong == []
    assert one.node.core.reading.lookup(9, one.namespace, second, lease=False).pending == 0
    one.tier.gate.set()


async def test_a_page_whose_header_is_damaged_does_not_get_into_a_tier(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ems.pool.movement.write_back.LINGER", 1e9)
    one, keys = bench(), chain("a", 1)
    await one.until(lambda: one.node.core.stats()["bytes_touched"] == 2 << 20)
    reserved = one.node.promise(1, one.namespace, bytes(NO_PARENT), keys)
    ref = PageRef.unpack(reserved.granted[0].ref)
    bytes_of_it = one.memory(reserved.granted[0])
    bytes_of_it[:] = page(keys[0])
    done = one.node.storing.commit(1, reserved.reservation, [0], [crc32c(bytes_of_it)])
    one.tier_manager.committed(one.namespace, done.pages)
    bytes_of_it[5] ^= 1
    header = memoryview(map_segment(one.node.arena, ref.segment))[header_offset(ref.slot) :]
    header[FLAGS_AT] ^= PageFlag.CHECKSUMMED
    monkeypatch.setattr("ems.pool.movement.write_back.LINGER", 0.0)
    await one.until(lambda: one.state.counts["pages_written"] + one.state.counts["write_corrupt"])
    assert one.state.counts["write_corrupt"] == 1
    assert one.tier.holds(NAME, keys) == 0
    bytes_of_it.release()
    header.release()


async def test_a_fetch_that_finds_only_some_may_end_after_a_segment_of_the_others_is_gone(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, keys = bench(), chain("a", 4)
    await stored(one, keys)
    one.forget()
    core = one.node.core
    geometry = core.slots.segments[0].geometry
    assert geometry is not None
    filler = chain("f", geometry.slot_count - 1)
    assert one.save(filler) == len(filler)
    await one.until(one.nothing_is_held)
    strange: list[object] = []
    one.node.loop.set_exception_handler(lambda _loop, context: strange.append(context))
    load = PackTier.load

    def first(tier: PackTier, namespace: str, wanted: Sequence[Wanted]) -> list[Outcome]:
        return [*load(tier, namespace, wanted[:1]), *[Outcome.MISSING] * (len(wanted) - 1)]

    monkeypatch.setattr(PackTier, "load", first)
    one.tier.gate.clear()
    one.look(keys)
    await one.until(lambda: one.state.fetches)
    coming = [core.page(one.namespace, name) for name in keys]
    segments = [PageRef.unpack(page.ref).segment for page in coming if page is not None]
    assert segments[0] != segments[-1]
    core.drop_segment(segments[-1])
    one.tier.gate.set()
    await one.until(lambda: not one.state.fetches)
    assert strange == []


async def test_a_fetch_that_ends_leaves_the_keys_of_another_on_their_way(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, keys, go_on = bench(), chain("a", 8), threading.Event()
    await stored(one, keys)
    one.forget()
    load = PackTier.load

    def late(tier: PackTier, namespace: str, wanted: Sequence[Wanted]) -> list[Outcome]:
        if wanted[0].key == keys[0]:
            assert go_on.wait(PATIENCE)
        return load(tier, namespace, wanted)

    monkeypatch.setattr(PackTier, "load", late)
    one.look(keys[:4])
    await one.until(lambda: one.state.fetches)
    assert one.tier_manager.bring(0, one.namespace, KeyRun(bytes(NO_PARENT), keys))
    await one.until(lambda: one.state.counts["pages_fetched"] == 4)
    assert one.tier_manager.comes(one.namespace, keys[:1])
    go_on.set()
    await one.until(lambda: one.present(keys) == 8)
    assert not one.tier_manager.comes(one.namespace, keys)


async def test_who_waits_for_a_tier_is_woken_once_when_it_has_said_what_it_has_or_the_time_is_over(
    bench: Callable[..., Bench],
) -> None:
    one, woken = bench(kind="mooncake"), Counter[str]()
    manager, now = one.tier_manager, time.monotonic()
    one.state.askers = ThreadPool("ask", 1, manager._tell)
    assert manager.learns(now) is None
    for name, seconds in (("answer", 60.0), ("time", 0.01)):
        waking = manager.learns(now + seconds)
        assert waking is not None
        waking(partial(woken.update, [name]))
    await one.until(lambda: woken["time"])
    assert woken == {"time": 1}
    manager._question(one.state, lambda: None, lambda: None)
    await one.until(lambda: woken["answer"])
    manager._question(one.state, lambda: None, lambda: None)
    await one.until(lambda: not len(one.state.questions))
    assert woken == {"time": 1, "answer": 1}


async def test_parties_take_turns_to_ask_and_each_has_so_much_asked_for(bench: Callable[..., Bench]) -> None:
    one, given = bench(kind="mooncake"), list[Job]()
    manager, state = one.tier_manager, one.state
    asked: list[str] = []
    answers = {"unknown": lambda _name, keys, _: Unknown(len(keys), keys, []), "unknown_tail": lambda *_: (True, True)}
    for name, answer in (answers | {"ask": lambda *_: None, "ask_tails": lambda *_: None}).items():
        setattr(one.tier, name, answer)
    state.askers = cast("ThreadPool", SimpleNamespace(give=given.append, dismiss=lambda: None))

    def asks(party: str) -> bool:
        keys, answered = chain("a", MOST_PARTY_KEYS // 4), partial(asked.append, party)
        return bool(manager._asks(state, NAME, keys, 0, answered, Asking(party)))

    def asks_tails(party: str) -> bool:
        tail, answered = Tail(key("directory"), bytes(4)), partial(asked.append, party)
        return manager._asks_tails(state, NAME, tail, answered, Asking(party))

    assert [asks("ann") for _ in range(6)] == [True] * 4 + [False] * 2
    assert not asks_tails("ann")
    assert asks("bob"), "what another may ask is his own"
    while given:
        job = given.pop(0)
        job.set_result(None)
        manager._learned(state, job._ended.args[1], job)  # type: ignore[attr-defined]
    assert asked == ["ann", "ann", "ann", "bob", "ann"], "two are under way at a time"
    assert asks_tails("ann")
    assert asks("ann")
    manager._cut_reading(state, "it does not answer", 0.0)
    assert len(state.questions) == 2, "what is under way ends by itself"


@pytest.mark.parametrize("cut", [False, True], ids=["answered", "not answered"])
async def test_a_tail_that_is_asked_for_with_keys_is_looked_up_again(bench: Callable[..., Bench], *, cut: bool) -> None:
    one, given, keys = bench(kind="mooncake"), list[Job](), chain("a", 2)
    manager, state, tail = one.tier_manager, one.state, Tail(key("directory"), bytes(4))
    known = KnownKeys()
    one.tier.unknown = lambda name, keys, directories: known.unknown(name, keys, 0.0, directories)  # type: ignore[attr-defined]
    one.tier.unknown_tail = lambda name, tail: known.unknown_place(name, tail.directory, 0.0)  # type: ignore[attr-defined]
    one.tier.ask = one.tier.ask_tails = lambda *_: None  # type: ignore[attr-defined]
    state.askers = cast("ThreadPool", SimpleNamespace(give=given.append, dismiss=lambda: None))
    looked = list[str]()

    asking = Asking(directories=key("first") + key("second") + tail.directory)
    assert manager._asks(state, NAME, keys, 0, partial(looked.append, "keys"), asking) == 2
    for name in ("one", "another"):
        assert manager._asks_tails(state, NAME, tail, partial(looked.append, name), asking)
    assert len(given) == 1, "it is under way"
    if cut:
        manager._cut_reading(state, "it does not answer", 0.0)
    given[0].set_result(None)
    manager._learned(state, given[0]._ended.args[1], given[0])  # type: ignore[attr-defined]
    assert looked == (["keys"] if cut else ["keys", "another"])
    assert not manager._due


async def test_who_asks_for_tails_under_way_looks_again_when_they_are_told(bench: Callable[..., Bench]) -> None:
    one, given = bench(kind="mooncake"), list[Job]()
    manager, state = one.tier_manager, one.state
    known = KnownKeys()
    one.tier.unknown_tail = lambda name, tail: known.unknown_place(name, tail.directory, 0.0)  # type: ignore[attr-defined]
    one.tier.ask_tails = lambda *_: None  # type: ignore[attr-defined]
    state.askers = cast("ThreadPool", SimpleNamespace(give=given.append, dismiss=lambda: None))
    looked = list[str]()
    for name in ("one", "another"):
        tail = Tail(key("directory"), bytes(4))
        assert manager._asks_tails(state, NAME, tail, partial(looked.append, name), Asking())
    job = given.pop()
    job.set_result(None)
    manager._learned(state, job._ended.args[1], job)  # type: ignore[attr-defined]
    assert looked == ["one", "another"]
    assert not manager._due


async def test_few_look_again_when_what_is_under_way_is_told(bench: Callable[..., Bench]) -> None:
    one = bench(kind="mooncake")
    one.tier.unknown_tail = lambda *_: (True, False)  # type: ignore[attr-defined]
    for number in range(2 * MOST_DUE):
        tail = Tail(key(f"directory/{number}"), bytes(4))
        assert one.tier_manager._asks_tails(one.state, NAME, tail, lambda: None, Asking())
    assert len(one.tier_manager._due) == MOST_DUE


async def test_few_lookups_wait_for_tiers(bench: Callable[..., Bench]) -> None:
    one = bench(kind="mooncake")
    for _ in range(MOST_WAITING):
        waking = one.tier_manager.learns(time.monotonic() + 60.0)
        assert waking is not None
        waking(lambda: None)
    assert one.tier_manager.learns(time.monotonic() + 60.0) is None
