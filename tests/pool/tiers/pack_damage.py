"""What packs must stand beside what every tier must: bytes of theirs that changed."""

from __future__ import annotations

import random

from ems.pool.tiers.answers import Outcome
from tests.kit.tiers import NAMESPACE, PAGE, TierConformance, chain, fetch, key


class PackConformance(TierConformance):
    """The suite for a tier of packs."""

    def rewrite(self, name: str, content: bytes) -> None:
        blobs = self.blobs()
        blobs.delete([name])
        blobs.put(name, [content])

    def begin_with(self, contents: dict[str, bytes]) -> None:
        blobs = self.blobs()
        blobs.delete([blob.name for blob in blobs.blobs()])
        for name, content in contents.items():
            blobs.put(name, [content])

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
