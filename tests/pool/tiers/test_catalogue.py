"""What a node knows of a tier: every key in one pack, bytes counted right, what leaves and what stays."""

from __future__ import annotations

from contextlib import suppress

import msgspec
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from ems.pool.keys import Tail
from ems.pool.tiers.answers import KeyRun
from ems.pool.tiers.catalogue import MAX_TAILS, Catalogue, Pack, decode_packs, encode_packs
from ems.pool.tiers.pack_format import Head, Malformed, parse_head
from tests.kit.tiers import KEYS, key
from tests.pool.tiers.packed import named, packed
from tests.pool.wrong import wrong_catalogue

NAMESPACE = "t/m/l"


def head(
    names: list[str], parent: str = "", tails: dict[str, Tail] | None = None, namespace: str = NAMESPACE, size: int = 10
) -> Head:
    """A pack of pages, the first behind ``parent``, the others behind each other."""
    before = [parent, *names[:-1]]
    pages = [(key(name), key(last) if last else bytes(16)) for name, last in zip(names, before, strict=True)]
    # The key of a page that is not full is a hash of its tokens; here it is a name.
    made = packed(pages, namespace=namespace, size=size)
    assert parse_head(made.raw, named(namespace), KEYS).records.tobytes() == made.records.tobytes()
    listed = {names.index(name): tail for name, tail in (tails or {}).items()}
    return msgspec.structs.replace(made, tails=listed)


def test_the_first_pack_of_a_key_counts() -> None:
    catalogue = Catalogue()
    one = catalogue.add("1", 10, head(["a", "b"]), 0.0)
    catalogue.add("2", 10, head(["b", "c"]), 0.0)
    place = catalogue.find(NAMESPACE, key("b"))
    assert place is not None
    assert place.pack is one
    assert catalogue.pages == 3
    catalogue.remove("1")
    assert catalogue.holds(NAMESPACE, [key("c")]) == 1
    assert catalogue.find(NAMESPACE, key("a")) is None
    assert wrong_catalogue(catalogue) == []


def test_a_page_that_two_packs_have_is_found_in_the_other_when_one_goes_or_is_bad() -> None:
    tail = Tail(key("directory"), b"tail")
    catalogue = Catalogue()
    catalogue.add("1", 10, head(["a", "b"], tails={"b": tail}), 0.0)
    second = catalogue.add("2", 10, head(["c", "b"], tails={"b": tail}), 0.0)
    third = catalogue.add("3", 10, head(["b"], tails={"b": tail}), 0.0)
    catalogue.remove("1")
    place = catalogue.find(NAMESPACE, key("b"))
    assert place is not None
    assert (place.pack, place.position) == (second, 1)
    assert catalogue.find_tail(NAMESPACE, tail) == tail
    assert catalogue.pages == 2

    catalogue.drop(place)
    place = catalogue.find(NAMESPACE, key("b"))
    assert place is not None
    assert place.pack is third
    assert catalogue.find_tail(NAMESPACE, tail) == tail
    catalogue.drop(place)
    assert catalogue.find(NAMESPACE, key("b")) is None
    assert catalogue.find_tail(NAMESPACE, tail) is None
    catalogue.remove("2")
    catalogue.remove("3")
    assert (catalogue.pages, catalogue.bytes, len(catalogue), wrong_catalogue(catalogue)) == (0, 0, 0, [])


def test_a_second_copy_keeps_the_place_of_its_tail() -> None:
    """Or the next page's tail would be pushed out of a list that is full."""
    tails = {f"p{number}": Tail(key("directory"), bytes([number, 0, 0, 0])) for number in range(MAX_TAILS + 1)}
    catalogue = Catalogue()
    for name, tail in tails.items():
        catalogue.add(name, 10, head([name], tails={name: tail}), 0.0)
    found = {name for name, tail in tails.items() if catalogue.find_tail(NAMESPACE, tail) == tail}
    for name, tail in tails.items():
        catalogue.add(f"again-{name}", 10, head([name], tails={name: tail}), 0.0)
        catalogue.remove(name)
        assert {one for one, its in tails.items() if catalogue.find_tail(NAMESPACE, its) == its} == found
    assert wrong_catalogue(catalogue) == []


def test_a_key_that_a_pack_repeats_counts_once() -> None:
    catalogue = Catalogue()
    catalogue.add("1", 10, head(["a", "a", "a"]), 0.0)
    catalogue.add("2", 10, head(["a", "b", "a"]), 0.0)
    assert catalogue.pages == 2
    assert catalogue._namespaces[NAMESPACE].elsewhere == {key("a"): [1 << 17]}
    catalogue.remove("1")
    place = catalogue.find(NAMESPACE, key("a"))
    assert place is not None
    assert (place.pack.name, place.position) == ("2", 0)
    catalogue.remove("2")
    assert (catalogue.pages, len(catalogue), wrong_catalogue(catalogue)) == (0, 0, [])


def test_whoever_looks_while_a_pack_goes_finds_the_page_in_the_other_one() -> None:
    catalogue = Catalogue()
    catalogue.add("1", 10, head(["a"]), 0.0)
    second = catalogue.add("2", 10, head(["a"]), 0.0)

    class Going(dict[int, Pack]):
        """The pack goes between the two looks of a reader."""

        def get(self, number: int, default: Pack | None = None) -> Pack | None:  # type: ignore[override]
            catalogue._packs = dict(self)
            catalogue.remove("1")
            return catalogue._packs.get(number, default)

    catalogue._packs = Going(catalogue._packs)
    place = catalogue.find(NAMESPACE, key("a"))
    assert place is not None
    assert place.pack is second


def test_a_pack_of_another_page_size_is_not_taken() -> None:
    catalogue = Catalogue()
    catalogue.add("1", 10, head(["a"]), 0.0)
    assert catalogue.add("2", 10, head(["b"], size=20), 0.0) is None
    assert catalogue.page_size(NAMESPACE) == 10


def test_leading_keys_are_counted() -> None:
    catalogue = Catalogue()
    catalogue.add("1", 10, head(["a", "b"]), 0.0)
    assert catalogue.holds(NAMESPACE, [key("a"), key("b"), key("c"), key("a")]) == 2
    assert catalogue.holds(NAMESPACE, [key("c"), key("a")]) == 0
    assert catalogue.holds("other", [key("a")]) == 0


def test_what_was_not_used_for_longest_leaves_and_a_prefix_stays_with_its_suffix() -> None:
    catalogue = Catalogue()
    first = catalogue.add("1", 10, head(["a"]), 1.0)
    second = catalogue.add("2", 10, head(["b"], parent="a"), 2.0)
    third = catalogue.add("3", 10, head(["x"]), 3.0)
    assert first is not None
    assert second is not None
    assert catalogue.to_leave(25) == [first]
    assert catalogue.use(second, 9.0) == [second, first]
    assert catalogue.to_leave(25) == [third]
    assert catalogue.to_leave(30) == []
    assert catalogue.too_old(12.0, 9.0) == [third]
    assert catalogue.too_old(99.0, 0.0) == []


def test_a_ring_of_parents_ends() -> None:
    catalogue = Catalogue()
    one = catalogue.add("1", 10, head(["a"], parent="b"), 1.0)
    other = catalogue.add("2", 10, head(["b"], parent="a"), 1.0)
    assert one is not None
    assert catalogue.use(one, 2.0) == [one, other]


def test_tails_are_bounded_and_leave_with_their_pages() -> None:
    catalogue = Catalogue()
    directory = key("d")
    tails = {str(number): Tail(directory, bytes([1, 0, 0, 0, number, 0, 0, 0])) for number in range(MAX_TAILS + 5)}
    catalogue.add("1", 10, head(list(tails), tails=tails), 0.0)
    assert catalogue.find_tail(NAMESPACE, Tail(directory, bytes([1, 0, 0, 0, 36, 0, 0, 0]))) == tails["36"]
    found = catalogue.find_tail(NAMESPACE, Tail(directory, bytes([1, 0, 0, 0, 0, 0, 0, 0])))
    assert found is not None
    assert found != tails["0"], "the oldest left the list"
    catalogue.remove("1")
    assert catalogue.find_tail(NAMESPACE, tails["36"]) is None


def test_what_was_written_down_says_what_was_known_and_what_is_damaged_nothing() -> None:
    catalogue = Catalogue()
    catalogue.add("1", 10, head(["a", "b"]), 5.0)
    raw = b"".join(encode_packs(catalogue))
    found = decode_packs(raw)
    assert list(found) == ["1"]
    size, used_at, kept = found["1"]
    assert (size, used_at) == (10, 5.0)
    assert parse_head(kept, named(), KEYS).records["key"].tolist() == [key("a"), key("b")]
    for place in range(0, len(raw), 7):
        damaged = decode_packs(raw[:place] + bytes([raw[place] ^ 4]) + raw[place + 1 :])
        for *_, one in damaged.values():
            with suppress(Malformed):
                parse_head(one, named(), KEYS)
                assert one == kept
    assert decode_packs(raw[:-1]) == {}
    assert decode_packs(raw.replace(b"\xa11", b"\xa1\xb0", 1)) == {}, "no text"
    assert decode_packs(b"") == {}


class Packs(RuleBasedStateMachine):
    """Packs come and go in any order; a key is found as long as any pack has it that did not turn out bad."""

    def __init__(self) -> None:
        super().__init__()
        self.catalogue = Catalogue()
        self.packs: dict[str, list[str]] = {}
        self.number = 0

    @rule(names=st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=4, unique=True), used=st.floats(0, 9))
    def add(self, names: list[str], used: float) -> None:
        self.number += 1
        name = str(self.number)
        tails = {one: Tail(key(f"dir{one}"), key(one)[:8]) for one in names if one in "ab"}
        assert self.catalogue.add(name, 10, head(names, tails=tails), used) is not None
        self.packs[name] = names

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        if self.packs:
            name = data.draw(st.sampled_from(sorted(self.packs)))
            self.catalogue.remove(name)
            del self.packs[name]

    @rule(most=st.integers(0, 60))
    def make_room(self, most: int) -> None:
        leaving = self.catalogue.to_leave(most)
        kept = set(self.packs) - {pack.name for pack in leaving}
        assert 10 * len(kept) <= most or not kept or not leaving
        assert [pack.used_at for pack in leaving] == sorted(pack.used_at for pack in leaving)
        for pack in leaving:
            self.catalogue.remove(pack.name)
            del self.packs[pack.name]
        assert self.catalogue.bytes <= most

    @rule(name=st.sampled_from("abcdefgh"))
    def turned_out_bad(self, name: str) -> None:
        place = self.catalogue.find(NAMESPACE, key(name))
        if place is not None:
            self.catalogue.drop(place)
            self.packs[place.pack.name] = [other for other in self.packs[place.pack.name] if other != name]

    @invariant()
    def what_is_there_is_found_and_nothing_else(self) -> None:
        assert wrong_catalogue(self.catalogue) == []
        for name in "abcdefgh":
            place = self.catalogue.find(NAMESPACE, key(name))
            having = {pack for pack, names in self.packs.items() if name in names}
            assert place.pack.name in having if place is not None else not having


TestPacks = Packs.TestCase


def test_pages_with_tails_in_the_middle_of_a_chain_stay_one_run() -> None:
    names = ["a", "b", "c", "d"]
    tails = {name: Tail(key(("directory", name)), b"tail") for name in names}
    catalogue = Catalogue()
    catalogue.add("1", 10, head(names, tails=tails), 0.0)
    assert list(catalogue.recent(NAMESPACE)) == [KeyRun(bytes(16), [key(name) for name in names])]
    assert [catalogue.tail(NAMESPACE, key(name)) for name in names] == list(tails.values())
    assert catalogue.tail(NAMESPACE, key("elsewhere")) is None
