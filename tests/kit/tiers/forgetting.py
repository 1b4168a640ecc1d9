"""What is taken out of a tier stays out, whatever fails meanwhile."""

from __future__ import annotations

import threading

from ems.errors import TierFailed
from ems.pool.keys import Tail
from ems.pool.tiers.answers import ForgetRequest, ForgetResult, Outcome, Stored, StoredTail
from tests.kit.tiers.bench import NAMESPACE, TierBench, chain, fetch, forget, key, page
from tests.kit.tiers.places import PATIENCE


class Forgetting(TierBench):
    """What an administrator takes out."""

    def test_what_is_forgotten_does_not_come_back(self) -> None:
        tier, _ = self.opened()
        for name in ("a", "b"):
            tier.store(NAMESPACE, chain(name, 3))
        tier.store("other/model/layout", chain("a", 2))
        before = tier.namespaces()[NAMESPACE]
        assert forget(tier, ForgetRequest(NAMESPACE)) == ForgetResult(6, before.bytes)
        assert list(tier.namespaces()) == ["other/model/layout"]
        tier.maintain()
        for one in (tier, self.opened()[0]):
            assert one.holds(NAMESPACE, [key("a/0")]) == 0
            assert {outcome for outcome, _ in fetch(one, [key("a/0"), key("b/2")])} == {Outcome.MISSING}
            assert one.holds("other/model/layout", [key("a/0"), key("a/1")]) == 2
        assert len(self.packs()) == 1
        tier.store(NAMESPACE, chain("a", 3))
        tier.close()
        again, _ = self.opened()
        self.expect(again, chain("a", 3))
        assert again.holds(NAMESPACE, [key("b/0")]) == 0

    def test_what_is_spared_stays_and_nothing_else(self) -> None:
        tier, _ = self.opened()
        tail = Tail(key("directory"), bytes([1, 0, 0, 0] * 3))
        whole, part = chain("whole", 3), chain("part", 4)
        part.append(Stored(tail.key, part[-1].key, tail, memoryview(page("tail"))))
        tier.store(NAMESPACE, whole)
        tier.store(NAMESPACE, part)
        untouched = chain("untouched", 2)
        tier.store(NAMESPACE, untouched)
        spared = [part[0], part[2], part[4], *untouched]
        assert forget(tier, ForgetRequest(NAMESPACE, 0.0, frozenset(one.key for one in spared))).pages == 5
        tier.maintain()
        for one in (tier, self.opened()[0]):
            self.expect(one, spared)
            assert {outcome for outcome, _ in fetch(one, [part[1].key, whole[0].key])} == {Outcome.MISSING}
            assert one.namespaces()[NAMESPACE].pages == 5
            found = one.find_tail(NAMESPACE, tail)
            assert found == StoredTail(tail, part[3].key)
        assert forget(tier, ForgetRequest(NAMESPACE, 0.0, frozenset(one.key for one in spared))) == ForgetResult()

    def test_only_what_nobody_used_for_long_is_forgotten(self) -> None:
        tier, _ = self.opened()
        tier.store(NAMESPACE, chain("a", 3))
        assert forget(tier, ForgetRequest(NAMESPACE, 3600.0)) == ForgetResult()
        self.expect(tier, chain("a", 3))

    def test_a_dry_run_says_what_would_be_forgotten_and_changes_nothing(self) -> None:
        tier, _ = self.opened()
        for name in ("a", "b"):
            tier.store(NAMESPACE, chain(name, 3))
        before = {blob.name: self.content(blob) for blob in self.blobs().blobs()}
        would = tier.forget(ForgetRequest(NAMESPACE, 0.0, [key("a/1")]), dry_run=True)
        assert (would.pages, would.more) == (5, False)
        assert 0 < would.bytes < tier.namespaces()[NAMESPACE].bytes
        assert {blob.name: self.content(blob) for blob in self.blobs().blobs()} == before
        self.expect(tier, [*chain("a", 3), *chain("b", 3)])

    def test_what_another_node_forgot_is_a_miss(self) -> None:
        one, _ = self.opened()
        one.store(NAMESPACE, [*chain("a", 2), *chain("b", 2)])
        other, _ = self.opened()
        forget(one, ForgetRequest(NAMESPACE, 0.0, [key("b/0"), key("b/1")]))
        assert [outcome for outcome, _ in fetch(other, [key("a/0"), key("b/0")])] == [Outcome.MISSING] * 2
        other.maintain()
        assert other.holds(NAMESPACE, [key("a/0")]) == 0
        self.expect(other, chain("b", 2))

    def test_what_another_node_stored_is_forgotten_too(self) -> None:
        one, _ = self.opened()
        other, _ = self.opened()
        other.store(NAMESPACE, chain("a", 2))
        one.maintain()
        assert forget(one, ForgetRequest(NAMESPACE)).pages == 2
        assert not self.packs()

    def test_forgetting_that_fails_anywhere_serves_nothing_wrong_and_ends_when_done_again(self) -> None:
        """Whichever call of the place is the first that fails."""
        spared = chain("part", 2)
        meant = ForgetRequest(NAMESPACE, 0.0, [one.key for one in spared])
        for works in range(40):
            tier, blobs = self.opened()
            tier.store(NAMESPACE, chain("whole", 2))
            tier.store(NAMESPACE, chain("part", 4))
            blobs.works_for = works
            failed = False
            try:
                forget(tier, meant)
            except TierFailed:
                failed = True
            blobs.works_for = None
            restarted, _ = self.opened()
            for one in (tier, restarted):
                found = fetch(one, [one.key for one in chain("part", 4)])
                assert [raw for _, raw in found[:2]] == [bytes(one.payload) for one in spared]
            assert tier.holds(NAMESPACE, [key("whole/0")]) == 0, "it is not handed out any more"
            forget(restarted, meant)
            fresh, _ = self.opened()
            self.expect(fresh, spared)
            assert fresh.namespaces()[NAMESPACE].pages == 2
            assert len(self.packs()) == 1
            forget(fresh, ForgetRequest(NAMESPACE))
            if not failed:
                return
        raise AssertionError("forgetting two packs takes more than 40 calls of the place")

    def test_what_could_not_be_removed_goes_when_the_place_works_again(self) -> None:
        tier, blobs = self.opened()
        tier.store(NAMESPACE, chain("a", 2))
        blobs.works_for = 0
        try:
            forget(tier, ForgetRequest(NAMESPACE))
        except TierFailed:
            assert self.packs()
        else:
            raise AssertionError("a place that fails was not noticed")
        blobs.works_for = None
        tier.maintain()
        assert tier.holds(NAMESPACE, [key("a/0")]) == 0
        assert not self.packs()

    def test_forgetting_that_hangs_holds_nobody_up(self) -> None:
        tier, blobs = self.opened()
        tier.store(NAMESPACE, chain("a", 2))
        tier.store("other/model/layout", chain("a", 1))
        blobs.gate.clear()
        hanging = threading.Thread(target=lambda: forget(tier, ForgetRequest(NAMESPACE)), daemon=True)
        hanging.start()
        assert tier.holds("other/model/layout", [key("a/0")]) == 1
        assert "other/model/layout" in tier.namespaces()
        assert [one.keys for one in tier.recent("other/model/layout")] == [[key("a/0")]]
        blobs.gate.set()
        hanging.join(PATIENCE)
        assert not hanging.is_alive()
        assert list(tier.namespaces()) == ["other/model/layout"]

    def test_what_was_used_last_comes_first_and_each_prefix_before_its_suffix(self) -> None:
        tier, _ = self.opened()
        first, last = chain("a", 4), chain("b", 2)
        tier.store(NAMESPACE, first[2:])
        tier.store(NAMESPACE, last)
        tier.store(NAMESPACE, first[:2])
        self.expect(tier, last)
        recent = [one for run in tier.recent(NAMESPACE) for one in run.keys]
        assert sorted(recent) == sorted(one.key for one in (*first, *last))
        parents = {one.key: one.parent for one in (*first, *last)}
        for run in tier.recent(NAMESPACE):
            assert [parents[one] for one in run.keys] == [run.parent, *run.keys[:-1]]
        assert [one for one in recent if one in {page.key for page in first}] == [one.key for one in first]
        assert recent[:2] == [one.key for one in last]
