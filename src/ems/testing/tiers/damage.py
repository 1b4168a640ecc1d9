"""What is damaged is a miss, and a place that does not work holds nobody up."""

from __future__ import annotations

import hashlib
import random
import threading

from ems.errors import TierFailed
from ems.pool.tiers.seam import Outcome
from ems.testing.tiers.bench import TierBench
from ems.testing.tiers.pages import NAMESPACE, PAGE, PATIENCE, chain, fetch, key


class Damage(TierBench):
    """Bytes that changed, and places that fail."""

    def test_every_byte_of_a_pack_may_be_wrong(self) -> None:
        """Whatever byte of a pack changes: what comes back is right or missing, and the others stay."""
        tier, _ = self.opened()
        pages = chain("a", 3)
        tier.store(NAMESPACE, pages)
        (pack,) = self.packs()
        raw = self.content(pack)
        rng = random.Random(5)
        served = 0
        places = [0, 8, 12, 60, *rng.sample(range(400), 8), *rng.sample(range(len(raw)), 8), len(raw) - 1]
        for place in places:
            self.begin_with({pack.name: raw[:place] + bytes([raw[place] ^ 1 << rng.randrange(8)]) + raw[place + 1 :]})
            served += self.only_right(pages)
        assert served >= len(places), "one wrong byte should not cost all pages"

    def test_a_pack_that_was_cut_serves_what_is_whole(self) -> None:
        tier, _ = self.opened()
        pages = chain("a", 3)
        tier.store(NAMESPACE, pages)
        (pack,) = self.packs()
        raw = self.content(pack)
        for size in (0, 7, 111, 200, len(raw) - 2 * PAGE, len(raw) - PAGE):
            self.begin_with({pack.name: raw[:size]})
            served = self.only_right(pages)
            assert served == (0 if size <= 200 else 1 if size == len(raw) - 2 * PAGE else 2)

    def test_packs_that_changed_places_serve_nothing_wrong(self) -> None:
        tier, _ = self.opened()
        tier.store(NAMESPACE, chain("a", 2))
        tier.store("other/model/layout", chain("b", 2))
        one, other = self.packs()
        self.begin_with({one.name: self.content(other), other.name: self.content(one)})
        again, _ = self.opened()
        for namespace, name in ((NAMESPACE, "a"), (NAMESPACE, "b"), ("other/model/layout", "a")):
            assert fetch(again, [key(f"{name}/0")], namespace)[0][0] is not Outcome.DONE

    def test_what_is_not_ours_is_left_alone(self) -> None:
        blobs = self.blobs()
        blobs.put("notes.txt", [b"mine"])
        folder = hashlib.sha256(NAMESPACE.encode()).hexdigest()[:32]
        blobs.put(f"{folder}/readme", [b"mine too"])
        tier, _ = self.opened()
        tier.store(NAMESPACE, chain("a", 1))
        tier.maintain()
        assert {"notes.txt", f"{folder}/readme"} <= {blob.name for blob in blobs.blobs()}

    def test_a_bad_page_is_mended_away_and_can_be_stored_again(self) -> None:
        tier, _ = self.opened()
        pages = chain("a", 3)
        tier.store(NAMESPACE, pages)
        (pack,) = self.packs()
        raw = self.content(pack)
        self.rewrite(pack.name, raw[:-500] + bytes([raw[-500] ^ 1]) + raw[-499:])
        assert [outcome for outcome, _ in fetch(tier, [one.key for one in pages])][2] is Outcome.CORRUPT
        tier.maintain()
        self.expect(tier, pages[:2])
        assert tier.store(NAMESPACE, pages)[2] is Outcome.DONE
        self.expect(tier, pages)

    def test_a_lying_place_serves_nothing_wrong(self) -> None:
        tier, blobs = self.opened()
        pages = chain("a", 3)
        tier.store(NAMESPACE, pages)
        blobs.flip_reads = True
        for outcome, raw in fetch(tier, [one.key for one in pages]):
            assert outcome is not Outcome.DONE or raw in {bytes(one.payload) for one in pages}
        blobs.flip_reads, blobs.cut_reads = False, True
        self.only_right(pages, tier)
        blobs.cut_reads = False
        tier.maintain()
        self.expect(tier, pages)

    def test_a_torn_write_is_a_miss(self) -> None:
        tier, blobs = self.opened()
        blobs.torn_writes = True
        pages = chain("a", 4)
        tier.store(NAMESPACE, pages)
        blobs.torn_writes = False
        self.only_right(pages, tier)
        self.only_right(pages)

    # Places that do not work

    def test_a_place_that_fails_says_so_and_works_again(self) -> None:
        tier, blobs = self.opened()
        pages = chain("a", 2)
        tier.store(NAMESPACE, pages)
        blobs.failing = True
        for call in (
            lambda: tier.store(NAMESPACE, chain("b", 1)),
            lambda: fetch(tier, [pages[0].key]),
            tier.maintain,
            lambda: tier.maintain(probe=True),
        ):
            try:
                call()
            except TierFailed:
                continue
            raise AssertionError("a place that fails was not noticed")
        assert tier.holds(NAMESPACE, [pages[0].key]) == 1
        blobs.failing = False
        tier.maintain(probe=True)
        self.expect(tier, pages)

    def test_a_full_place_says_so_and_keeps_what_it_has(self) -> None:
        tier, blobs = self.opened()
        tier.store(NAMESPACE, chain("a", 2))
        blobs.full = True
        try:
            tier.store(NAMESPACE, chain("b", 2))
        except TierFailed as error:
            assert isinstance(error.__cause__, OSError)  # noqa: PT017 - pytest is no part of this package
        else:
            raise AssertionError("a full place was not noticed")
        assert tier.holds(NAMESPACE, [key("b/0")]) == 0

    def test_asking_what_is_there_never_waits_for_the_place(self) -> None:
        tier, blobs = self.opened()
        tier.store(NAMESPACE, chain("a", 2))
        blobs.gate.clear()
        hanging = threading.Thread(target=lambda: fetch(tier, [key("a/0")]), daemon=True)
        hanging.start()
        assert tier.holds(NAMESPACE, [key("a/0"), key("a/1")]) == 2
        assert tier.figures()["pages"] == 2
        assert list(tier.namespaces()) == [NAMESPACE]
        blobs.gate.set()
        hanging.join(PATIENCE)
        assert not hanging.is_alive()
