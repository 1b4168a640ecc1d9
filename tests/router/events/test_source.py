"""What KV events tell, and what a publisher's restart, gaps and several media do to it."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ems.engines.kv_events import AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, Event, read_batch
from ems.errors import ProtocolError
from ems.router.choosing.prefix_index import Place, block_hashes
from ems.router.events.source import Change, Source

TOKENS = list(range(100, 228))
NAMES = block_hashes(TOKENS, 64, "")


def stored(medium: str | None = "GPU", *, begin: int = 0, **fields: object) -> BlockStored:
    """The two blocks of TOKENS, or the second alone."""
    base: dict[str, object] = {
        "block_hashes": [b"a", b"b"][begin:],
        "parent_block_hash": b"a" if begin else None,
        "token_ids": TOKENS[begin * 64 :],
        "block_size": 64,
        "medium": medium,
    }
    return BlockStored(**{**base, **fields})  # type: ignore[arg-type]


def test_blocks_are_named_as_a_prompt_of_their_tokens_names_them() -> None:
    assert Source().heard(0, [stored()]) == [Change(Place.ENGINE, NAMES, stored=True)]


def test_of_small_blocks_those_are_told_of_with_which_a_piece_ends() -> None:
    names: list[BlockHash] = [bytes([at]) for at in range(8)]
    source = Source()
    assert source.heard(0, [stored(block_hashes=names, block_size=16)]) == [Change(Place.ENGINE, NAMES, stored=True)]
    assert source.heard(1, [BlockRemoved(names[:4], "GPU")]) == [Change(Place.ENGINE, NAMES[:1], stored=False)]


def test_a_block_is_named_over_its_parent() -> None:
    source = Source()
    source.heard(0, [stored(block_hashes=[b"a"], token_ids=TOKENS[:64])])
    assert source.heard(1, [stored(begin=1)]) == [Change(Place.ENGINE, NAMES[1:], stored=True)]


def test_a_block_whose_parent_is_unknown_has_no_name() -> None:
    assert Source().heard(0, [stored(begin=1)]) == []


@pytest.mark.parametrize("extra", [[("image", 3), None], [("salt",), ("salt",)]])
def test_blocks_with_more_than_tokens_have_no_name(extra: list[object]) -> None:
    assert Source().heard(0, [stored(extra_keys=extra)]) == []


def test_an_adapter_is_part_of_the_name() -> None:
    source = Source()
    (change,) = source.heard(0, [stored(lora_name="poet", extra_keys=[("poet",), ("poet",)])])
    assert change.hashes == block_hashes(TOKENS, 64, "poet") != NAMES
    assert source.adapters == {"poet"}


def test_a_block_leaves_a_place_with_the_last_medium_of_it() -> None:
    source = Source()
    assert source.heard(0, [stored("CPU"), stored("STORAGE")]) == [Change(Place.HOST, NAMES, stored=True)]
    assert source.heard(1, [BlockRemoved([b"a", b"b"], "CPU")]) == []
    assert source.heard(2, [BlockRemoved([b"b"], "STORAGE")]) == [Change(Place.HOST, NAMES[1:], stored=False)]


def test_a_cleared_engine_keeps_what_the_pool_has() -> None:
    source = Source()
    source.heard(0, [stored(), stored("CPU"), stored("EXTERNAL")])
    assert source.heard(1, [AllBlocksCleared()]) == [Change(Place.ENGINE, NAMES, stored=False)]
    assert len(source) == 2


def test_a_number_that_goes_back_is_a_restart() -> None:
    source = Source()
    source.heard(0, [stored()])
    source.heard(41, [])
    assert source.missing(3) == 0
    assert source.heard(3, []) == [Change(Place.ENGINE, NAMES, stored=False)]
    assert source.missing(4) is None


def test_what_was_missed_is_known() -> None:
    source = Source()
    assert source.missing(0) is None
    assert source.missing(5) == 0
    source.heard(5, [])
    assert source.missing(6) is None
    assert source.missing(9) == 6


def test_other_groups_and_unknown_media_are_left_out() -> None:
    assert Source().heard(0, [stored(group_idx=1), stored("TAPE")]) == []


def test_what_is_forgotten_for_want_of_room_counts_as_lost() -> None:
    source = Source(capacity=1)
    first, gone = source.heard(0, [stored()])
    assert first == Change(Place.ENGINE, NAMES, stored=True)
    assert gone == Change(Place.ENGINE, NAMES[:1], stored=False)


events = st.one_of(
    st.builds(
        lambda medium, begin: stored(medium, begin=begin),
        st.sampled_from(["GPU", "CPU", "STORAGE", "EXTERNAL"]),
        st.integers(0, 1),
    ),
    st.builds(
        BlockRemoved,
        st.lists(st.sampled_from([b"a", b"b", b"c"]), max_size=3),
        st.sampled_from(["GPU", "CPU", "STORAGE", "EXTERNAL"]),
    ),
    st.just(AllBlocksCleared()),
)


@given(st.lists(st.tuples(st.integers(0, 6), st.lists(events, max_size=4)), max_size=12), st.integers(1, 3))
def test_what_is_told_of_is_taken_back_exactly_once(batches: list[tuple[int, list[Event]]], capacity: int) -> None:
    source, held = Source(capacity), {place: set[int]() for place in Place}
    for number, batch in batches:
        for place, hashes, is_stored in source.heard(number, batch):
            if is_stored:
                assert held[place].isdisjoint(hashes)
                held[place].update(hashes)
            else:
                assert held[place].issuperset(hashes)
                held[place].difference_update(hashes)
        assert len(source) <= capacity
    for place, hashes, _ in source.lost():
        held[place].difference_update(hashes)
    assert not any(held.values())


def packed(*batch: object) -> bytes:
    return msgspec.msgpack.encode([1.5, list(batch), 0])


def test_events_are_read_as_maps_and_as_lists() -> None:
    as_map = {"type": "BlockStored", **msgspec.to_builtins(stored()), "block_hashes": [b"a", b"b"], "later": 1}
    as_list = ["BlockStored", [b"a", b"b"], None, TOKENS, 64, None, "GPU"]
    assert read_batch(packed(as_map, as_list)) == [stored(), stored()]
    assert read_batch(packed(["BlockRemoved", [7], "CPU"], {"type": "AllBlocksCleared"}, {"type": "New"}, 3)) == [
        BlockRemoved([7], "CPU"),
        AllBlocksCleared(),
    ]


@pytest.mark.parametrize(
    "payload", [b"", b"\xc1", packed({"type": "BlockStored"}), packed(["BlockRemoved", 4]), msgspec.msgpack.encode({})]
)
def test_what_is_no_batch_is_refused(payload: bytes) -> None:
    with pytest.raises(ProtocolError, match="not one of KV events"):
        read_batch(payload)


@given(st.binary(max_size=64))
def test_any_bytes_are_read_or_refused(payload: bytes) -> None:
    try:
        read_batch(payload)
    except ProtocolError:
        pass
