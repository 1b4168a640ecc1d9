"""Generated histories of a tier: stores, loads, restarts, other nodes, damage and failure in any order.

Whatever happens, what comes back has the bytes that its key stands for.
"""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ems.errors import TierFailed
from ems.pool.keys import NO_PARENT, Tail
from ems.pool.tiers.answers import ForgetRequest, Outcome, Stored
from ems.pool.tiers.codec import Compressor
from ems.pool.tiers.pack_seal import read_keys
from ems.pool.tiers.packs import PackTier
from ems.pool.tiers.repair import Quarantine, mend
from tests.kit.examples import examples
from tests.kit.tiers import FaultyBlobs, fetch, forget, key, page
from tests.pool.tiers.memory_blobs import MemoryBlobs
from tests.pool.wrong import wrong_catalogue

PAGE = 256
NAMESPACES = ("t/m/l", "u/m/l")
NAMES = st.integers(0, 11)
HISTORIES = int(os.environ.get("EMS_TIER_HISTORIES", "60"))


def lies(place: FaultyBlobs) -> bool:
    """What is read may not be what was written."""
    return place.flip_reads or place.cut_reads or place.torn_writes


def content(namespace: str, name: int) -> bytes:
    """Some pages compress, others do not."""
    return bytes([name]) * PAGE if name % 3 == 0 else page(f"{namespace}/{name}", PAGE)


def stored(namespace: str, name: int) -> Stored:
    tail = Tail(key("directory"), bytes([name, 0, 0, 0])) if name % 4 == 3 else None
    parent = key(name - 1) if name else bytes(NO_PARENT)
    return Stored(key(name), parent, tail, memoryview(content(namespace, name)))


class Histories(RuleBasedStateMachine):
    """Two nodes on one place that is hurt again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.home = TemporaryDirectory()
        self.secret = Path(self.home.name) / "key"
        self.secret.write_bytes(b"of thirty-two bytes or a few more")
        self.secret.chmod(0o600)

    def teardown(self) -> None:
        self.home.cleanup()

    @initialize(encrypted=st.booleans(), small=st.booleans(), limit=st.sampled_from([0, 20_000]))
    def begin(self, encrypted: bool, small: bool, limit: int) -> None:
        self.keys = read_keys(self.secret, encrypts=encrypted)
        self.small, self.limit = small, limit
        self.place = MemoryBlobs()
        self.faults = FaultyBlobs(self.place)
        self.nodes = [self.open(), self.open()]
        self.hurt = False
        self.stored: set[tuple[str, int]] = set()
        self.pins: set[tuple[str, int]] = set()
        """What was stored and not forgotten since."""

    def open(self) -> PackTier:
        return PackTier(
            "memory", self.faults, self.keys, limit=self.limit, compressor=Compressor(2) if self.small else None
        )

    @rule(node=st.integers(0, 1), namespace=st.sampled_from(NAMESPACES), names=st.lists(NAMES, min_size=1, max_size=5))
    def store(self, node: int, namespace: str, names: list[int]) -> None:
        try:
            outcomes = self.nodes[node].store(namespace, [stored(namespace, name) for name in names])
        except TierFailed:
            assert self.faults.failing or self.faults.full
            return
        assert set(outcomes) <= {Outcome.DONE, Outcome.PRESENT}
        self.stored.update((namespace, name) for name in names)
        # A node that has not looked since another one forgot a page takes it for present.
        done = [name for name, outcome in zip(names, outcomes, strict=True) if outcome is Outcome.DONE]
        self.pins.update((namespace, name) for name in done)

    @rule(node=st.integers(0, 1), namespace=st.sampled_from(NAMESPACES), names=st.lists(NAMES, min_size=1, max_size=8))
    def load(self, node: int, namespace: str, names: list[int]) -> None:
        try:
            found = fetch(self.nodes[node], [key(name) for name in names], namespace, PAGE)
        except TierFailed:
            assert self.faults.failing
            return
        for name, (outcome, raw) in zip(names, found, strict=True):
            if outcome is Outcome.DONE:
                assert raw == content(namespace, name), "a wrong byte was served"
                assert (namespace, name) in self.stored

    @rule(node=st.integers(0, 1), namespace=st.sampled_from(NAMESPACES), name=NAMES)
    def find_tail(self, node: int, namespace: str, name: int) -> None:
        asked = Tail(key("directory"), bytes([name, 0, 0, 0, 9, 0, 0, 0]))
        best = self.nodes[node].find_tail(namespace, asked)
        if best is not None:
            assert best.tail == Tail(key("directory"), bytes([name, 0, 0, 0]))
            assert best.parent == (key(name - 1) if name else bytes(NO_PARENT))

    @rule(node=st.integers(0, 1), probe=st.booleans())
    def maintain(self, node: int, probe: bool) -> None:
        try:
            (self.nodes[node].probe if probe else self.nodes[node].maintain)()
        except TierFailed:
            assert self.faults.failing or self.faults.full or lies(self.faults)

    @rule(node=st.integers(0, 1), namespace=st.sampled_from(NAMESPACES), spared=st.sets(NAMES, max_size=6))
    def forget(self, node: int, namespace: str, spared: set[int]) -> None:
        meant = ForgetRequest(namespace, 0.0, [key(name) for name in spared])
        self.pins = {(of, name) for of, name in self.pins if of != namespace or name in spared}
        try:
            self.nodes[node].maintain()
            would = self.nodes[node].forget(meant, dry_run=True)
            did = forget(self.nodes[node], meant)
        except TierFailed:
            assert self.faults.failing or self.faults.full or lies(self.faults)
            return
        left = {name for name in range(12) if self.nodes[node].holds(namespace, [key(name)])}
        assert left <= spared, "what was forgotten is still known"
        if not lies(self.faults) and not self.hurt:
            assert did.pages == would.pages

    @rule(node=st.integers(0, 1), clean=st.booleans())
    def restart(self, node: int, clean: bool) -> None:
        if clean:
            try:
                self.nodes[node].close()
            except TierFailed:
                assert self.faults.failing or self.faults.full
        self.nodes[node] = self.open()

    @rule(
        how=st.sampled_from(["flip", "cut", "remove", "swap", "zero", "grow"]),
        which=st.integers(0, 1000),
        other=st.integers(0, 1000),
        where=st.integers(0, 100_000),
    )
    def damage(self, how: str, which: int, other: int, where: int) -> None:
        contents = self.place.contents
        if not contents:
            return
        self.hurt = True
        # Names are random; the order in which blobs came is not.
        names = list(contents)
        name, second = names[which % len(names)], names[other % len(names)]
        raw = bytearray(contents[name])
        at = where % max(len(raw), 1)
        if how == "remove":
            del contents[name]
            return
        if how == "swap":
            contents[name], contents[second] = contents[second], contents[name]
            return
        if how == "flip" and raw:
            raw[at] ^= 1 << other % 8
        elif how == "cut":
            del raw[at:]
        elif how == "zero":
            raw[at : at + 512] = bytes(len(raw[at : at + 512]))
        else:
            raw += bytes(at)
        contents[name] = bytes(raw)

    @rule(fault=st.sampled_from(["none", "failing", "full", "flip_reads", "cut_reads", "torn_writes"]))
    def fault(self, fault: str) -> None:
        for name in ("failing", "full", "flip_reads", "cut_reads", "torn_writes"):
            setattr(self.faults, name, name == fault)
        self.hurt = self.hurt or fault != "none"

    @rule(dry_run=st.booleans())
    def check(self, dry_run: bool) -> None:
        if self.faults.failing or self.faults.full:
            return
        before = dict(self.place.contents)
        for name in sorted(before):
            if name.endswith(".pack"):
                mend(
                    self.faults, self.faults.put, name, self.keys, Quarantine(self.faults, self.limit), dry_run=dry_run
                )
        assert not dry_run or self.place.contents == before

    @invariant()
    def the_catalogues_hold_together(self) -> None:
        for node in getattr(self, "nodes", ()):
            assert wrong_catalogue(node._catalogue) == []

    @invariant()
    def nothing_is_lost_without_a_reason(self) -> None:
        if not hasattr(self, "nodes") or self.hurt or self.limit:
            return
        fresh = self.open()
        fresh.maintain()
        for namespace, name in self.pins:
            ((outcome, raw),) = fetch(fresh, [key(name)], namespace, PAGE)
            assert outcome is Outcome.DONE
            assert raw == content(namespace, name)


TestHistories = Histories.TestCase
TestHistories.settings = examples(HISTORIES, stateful_step_count=30)
