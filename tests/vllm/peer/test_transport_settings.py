"""The JSON of the hand-off from peer to peer, right and wrong."""

from __future__ import annotations

from typing import Any

import pytest

from ems.errors import ConfigError
from ems.vllm.peer.transport_settings import read_transport

ONE = {"dp_size": 1, "tp_size": 1}


def read(role: str | None, extra: dict[str, Any], **own: int) -> tuple[dict[str, Any], list[str]]:
    sizes = {"tp_size": 1, "dp_size": 1, "pp_size": 1, **own}
    return read_transport(role, extra, sizes, ("backends", "num_threads"))


def test_the_transport_gets_its_own_keys_and_the_rest_is_said() -> None:
    extra = {
        "use_ascend_direct": True,
        "prefill": ONE,
        "decode": {"dp_size": "1", "tp_size": "1"},
        "backends": ["UCX"],
        "num_treads": 4,
    }

    passed, said = read("kv_producer", extra)

    assert passed == {"backends": ["UCX"]}
    assert said == [
        "key 'num_treads' in kv_connector_extra_config means nothing to this connector, did you mean 'num_threads'",
        "accepted, but without a meaning for MooncakeConnectorV1, in kv_connector_extra_config: use_ascend_direct",
    ]


def test_sizes_may_be_left_out() -> None:
    assert read("kv_producer", {}, tp_size=8, dp_size=2) == ({}, [])


@pytest.mark.parametrize(
    ("role", "extra", "own"),
    [
        ("kv_producer", {"prefill": {"tp_size": 8, "pp_size": 2}}, {"tp_size": 8, "pp_size": 2}),
        ("kv_consumer", {"prefill": {"tp_size": 8}, "decode": {"tp_size": 1, "dp_size": 16}}, {"dp_size": 16}),
        ("kv_consumer", {"prefill": {"tp_size": 2}, "decode": {"tp_size": "4"}}, {"tp_size": 4}),
        ("kv_consumer", {"decode": {"tp_size": 1, "dp_size": 16}}, {"dp_size": 1}),
        ("kv_both", {"prefill": {"tp_size": 2}, "decode": ONE}, {"tp_size": 4}),
    ],
    ids=["whole", "unequal", "text", "dense rank", "either side"],
)  # fmt: skip
def test_sizes_that_fit(role: str, extra: dict[str, Any], own: dict[str, int]) -> None:
    assert read(role, extra, **own)[1] == []


@pytest.mark.parametrize(
    ("role", "extra", "own", "sentence"),
    [
        (
            "kv_producer",
            {"prefill": {"tp_size": 2}},
            {},
            "prefill.tp_size is 2, but this engine runs with --tensor-parallel-size 1; make them equal",
        ),
        (
            "kv_consumer",
            {"decode": {"dp_size": 4}},
            {"dp_size": 2},
            "decode.dp_size is 4, but this engine runs with --data-parallel-size 2; make them equal",
        ),
        (
            "kv_producer",
            {"prefill": {"tp_size": 3}, "decode": {"tp_size": 2}},
            {"tp_size": 3},
            "prefill.tp_size is 3 and decode.tp_size is 2, expected one to be a multiple of the other",
        ),
        (
            "kv_consumer",
            {"decode": {"pp_size": 2}},
            {"pp_size": 2},
            "decode.pp_size is 2, expected 1: a decode runs in one pipeline stage",
        ),
        ("kv_both", {"prefill": 8}, {}, """prefill is 8, expected sizes such as {"tp_size": 1, "dp_size": 1}"""),
        (
            "kv_both",
            {"prefill": {"tp_size": 0}},
            {},
            "prefill.tp_size is 0, expected a whole number of ranks from 1 on",
        ),
        (None, {}, {}, "kv_role is None, expected kv_producer, kv_consumer or kv_both"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_in_a_sentence(
    role: str | None, extra: dict[str, Any], own: dict[str, int], sentence: str
) -> None:
    with pytest.raises(ConfigError) as error:
        read(role, extra, **own)

    assert str(error.value) == sentence
