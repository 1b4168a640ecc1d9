"""What is stored in a tier comes back, after a restart and for other nodes too."""

from __future__ import annotations

import threading

import msgspec

from ems.errors import TierFailed
from ems.pool.keys import NO_PARENT, Tail
from ems.pool.layout import crc32c
from ems.pool.tiers.answers import Outcome, Stored, StoredTail
from tests.kit.tiers.bench import NAMESPACE, PAGE, TierBench, chain, fetch, key, page
from tests.kit.tiers.places import PATIENCE


class Keeping(TierBench):
    """Pages and nodes that come and go."""

    def test_what_was_stored_comes_back(self) -> None:
        tier, _ = self.opened()
        pages = chain("a", 5)
        assert tier.store(NAMESPACE, pages) == [Outcome.DONE] * 5
        assert tier.holds(NAMESPACE, [one.key for one in pages]) == 5
        self.expect(tier, pages)
        self.expect(tier, [pages[3], pages[0]])

    def test_nothing_is_there_that_was_not_stored(self) -> None:
        tier, _ = self.opened()
        tier.store(NAMESPACE, chain("a", 2))
        assert tier.holds(NAMESPACE, [key("b/0")]) == 0
        assert tier.holds("tenant/other/layout", [key("a/0")]) == 0
        assert fetch(tier, [key("b/0")])[0][0] is Outcome.MISSING
        assert fetch(tier, [key("a/0")], "tenant/other/layout")[0][0] is Outcome.MISSING

    def test_the_first_page_of_a_key_stays(self) -> None:
        tier, _ = self.opened()
        first = chain("a", 2)
        tier.store(NAMESPACE, first)
        second = [Stored(one.key, one.parent, None, memoryview(page("other"))) for one in first]
        assert tier.store(NAMESPACE, [*second, *chain("b", 1)]) == [Outcome.PRESENT, Outcome.PRESENT, Outcome.DONE]
        self.expect(tier, [*first, *chain("b", 1)])

    def test_a_page_that_is_stored_twice_at_once_is_stored_once(self) -> None:
        tier, _ = self.opened()
        (one,) = chain("a", 1)
        assert tier.store(NAMESPACE, [one, one]) == [Outcome.DONE, Outcome.PRESENT]
        self.expect(tier, [one])

    def test_some_of_a_batch_are_missing_and_the_others_come(self) -> None:
        tier, _ = self.opened()
        pages = chain("a", 3)
        tier.store(NAMESPACE, pages)
        found = fetch(tier, [pages[2].key, key("none"), pages[0].key])
        assert [outcome for outcome, _ in found] == [Outcome.DONE, Outcome.MISSING, Outcome.DONE]
        assert found[0][1] == pages[2].payload
        assert found[2][1] == pages[0].payload

    def test_a_page_of_another_size_is_refused(self) -> None:
        tier, _ = self.opened()
        tier.store(NAMESPACE, chain("a", 1))
        assert tier.store(NAMESPACE, chain("b", 1, PAGE // 2)) == [Outcome.WRONG_SIZE]
        assert fetch(tier, [key("a/0")], size=PAGE // 2)[0][0] is Outcome.WRONG_SIZE

    def test_what_is_wrong_in_memory_does_not_get_into_a_tier(self) -> None:
        tier, _ = self.opened()
        good, bad = chain("a", 2)
        sums = [crc32c(good.payload), crc32c(bad.payload) ^ 1]
        pages = [msgspec.structs.replace(one, checksum=value) for one, value in zip((good, bad), sums, strict=True)]
        assert tier.store(NAMESPACE, pages) == [Outcome.DONE, Outcome.CORRUPT]
        assert tier.holds(NAMESPACE, [bad.key]) == 0
        self.expect(tier, [good])

    def test_pages_that_compress_come_back_too(self) -> None:
        tier, _ = self.opened()
        pages = [
            Stored(key(number), bytes(NO_PARENT), None, memoryview(bytes([number, 7]) * (PAGE // 2)))
            for number in range(3)
        ]
        tier.store(NAMESPACE, [*pages, *chain("a", 1)])
        self.expect(tier, [*chain("a", 1), *pages])

    def test_namespaces_and_their_page_sizes_are_known(self) -> None:
        tier, _ = self.opened()
        tier.store(NAMESPACE, chain("a", 1))
        tier.store("t/m/other", chain("a", 1, PAGE // 2))
        found = tier.namespaces()
        assert {name: (one.page_size, one.pages) for name, one in found.items()} == {
            NAMESPACE: (PAGE, 1),
            "t/m/other": (PAGE // 2, 1),
        }
        assert all(one.bytes > 0 and 0 <= one.idle_seconds < PATIENCE for one in found.values())

    def test_a_tail_is_found_by_its_tokens(self) -> None:
        tier, _ = self.opened()
        directory = key("directory")
        tails = [Tail(directory, bytes([1, 0, 0, 0] * 3)), Tail(directory, bytes([1, 0, 0, 0, 2, 0, 0, 0] * 4))]
        pages = [Stored(tail.key, key("parent"), tail, memoryview(page(tail.tokens))) for tail in tails]
        tier.store(NAMESPACE, pages)
        again = self.open(self.blobs())
        again.maintain()
        for one in (tier, again):
            found = one.find_tail(NAMESPACE, Tail(directory, bytes([1, 0, 0, 0, 2, 0, 0, 0, 9, 0, 0, 0])))
            assert found == StoredTail(tails[1], key("parent"))
            assert one.find_tail(NAMESPACE, Tail(directory, bytes([7, 0, 0, 0]))) is None
            assert one.find_tail(NAMESPACE, Tail(key("elsewhere"), tails[0].tokens)) is None
            self.expect(one, pages)

    # Restarts and other nodes

    def test_a_restart_finds_everything(self) -> None:
        tier, _ = self.opened()
        pages = [*chain("a", 4), *chain("b", 3)]
        tier.store(NAMESPACE, pages[:4])
        tier.store(NAMESPACE, pages[4:])
        tier.close()
        again, _ = self.opened()
        assert again.holds(NAMESPACE, [one.key for one in pages]) == 7
        self.expect(again, pages)

    def test_a_crash_loses_nothing_that_was_stored(self) -> None:
        tier, _ = self.opened()
        tier.store(NAMESPACE, chain("a", 4))
        again, _ = self.opened()
        self.expect(again, chain("a", 4))

    def test_what_another_node_stores_is_found(self) -> None:
        one, _ = self.opened()
        other, _ = self.opened()
        one.store(NAMESPACE, chain("a", 2))
        other.maintain()
        self.expect(other, chain("a", 2))

    def test_what_another_node_removed_is_a_miss(self) -> None:
        tier, _ = self.opened()
        tier.store(NAMESPACE, chain("a", 2))
        self.blobs().delete([pack.name for pack in self.packs()])
        assert [outcome for outcome, _ in fetch(tier, [key("a/0"), key("a/1")])] == [Outcome.MISSING] * 2
        assert tier.holds(NAMESPACE, [key("a/0")]) == 0
        tier.store(NAMESPACE, chain("a", 2))
        self.expect(tier, chain("a", 2))

    def test_two_nodes_store_the_same_at_once(self) -> None:
        one, _ = self.opened()
        other, _ = self.opened()
        for tier in (one, other):
            tier.store(NAMESPACE, chain("a", 2))
        for tier in (one, other):
            tier.maintain()
            self.expect(tier, chain("a", 2))
        assert one.figures()["pages"] == 2

    def test_threads_store_and_load_at_the_same_time(self) -> None:
        tier, _ = self.opened()
        wrong: list[object] = []

        def work(number: int) -> None:
            for turn in range(4):
                pages = chain(f"{number}/{turn}", 3)
                try:
                    tier.store(NAMESPACE, pages)
                    self.expect(tier, pages)
                except (AssertionError, TierFailed) as error:
                    wrong.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for _ in range(3):
            tier.maintain()
        for thread in threads:
            thread.join(PATIENCE)
        assert not wrong
