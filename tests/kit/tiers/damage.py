"""A place that lies serves nothing wrong, and one that does not work holds nobody up."""

from __future__ import annotations

import hashlib
import threading

from ems.errors import TierFailed
from ems.pool.tiers.answers import Outcome
from tests.kit.tiers.bench import NAMESPACE, TierBench, chain, fetch, key
from tests.kit.tiers.places import PATIENCE


class Damage(TierBench):
    """Places that lie, tear, fail or hang."""

    def test_what_is_not_ours_is_left_alone(self) -> None:
        blobs = self.blobs()
        blobs.put("notes.txt", [b"mine"])
        folder = hashlib.sha256(NAMESPACE.encode()).hexdigest()[:32]
        blobs.put(f"{folder}/readme", [b"mine too"])
        tier, _ = self.opened()
        tier.store(NAMESPACE, chain("a", 1))
        tier.maintain()
        assert {"notes.txt", f"{folder}/readme"} <= {blob.name for blob in blobs.blobs()}

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
            tier.probe,
        ):
            try:
                call()
            except TierFailed:
                continue
            raise AssertionError("a place that fails was not noticed")
        assert tier.holds(NAMESPACE, [pages[0].key]) == 1
        blobs.failing = False
        tier.probe()
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
