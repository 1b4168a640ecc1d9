"""Files that were written for other releases and other hardware, and what of them reaches vLLM."""

from __future__ import annotations

from typing import Any

import pytest

from ems.errors import ConfigError
from ems.vllm.configuration.deployed_files import Installation, admit, check

KNOWN = frozenset(
    {"kv_connector", "kv_role", "kv_port", "engine_id", "kv_buffer_device", "kv_connector_extra_config"}
    | {"kv_connector_module_path", "kv_load_failure_policy"}
)
HERE = Installation(frozenset({"AscendStoreConnector", "MooncakeConnectorV1"}), KNOWN, "cpu", lambda module: False)


def test_what_vllm_takes_already_stays_but_failures_are_recomputed() -> None:
    fields = {"kv_connector": "AscendStoreConnector", "kv_role": "kv_both", "kv_port": "20001"}

    assert admit(fields, HERE) == ({**fields, "kv_load_failure_policy": "recompute"}, [])


def test_keys_without_a_meaning_are_left_out_in_one_sentence() -> None:
    fields = {
        "kv_connector": "MooncakeConnectorV1",
        "kv_role": "kv_producer",
        "kv_buffer_device": "npu",
        "kv_rank": 0,
        "kv_parallel_size": 1,
        "kv_ip": "10.0.0.1",
        "mooncake_rpc_port": "0",
        "kv_connector_module_path": "vllm_ascend.distributed.mooncake_connector",
        "engine_id": 7,
        "kv_load_failure_policy": "fail",
    }

    admitted, said = admit(fields, HERE)

    assert admitted == {
        "kv_connector": "MooncakeConnectorV1",
        "kv_role": "kv_producer",
        "engine_id": "7",
        "kv_load_failure_policy": "fail",
    }
    (sentence,) = said
    assert sentence == (
        "accepted, but without a meaning for MooncakeConnectorV1: kv_rank, kv_parallel_size, kv_ip, mooncake_rpc_port, "
        "kv_buffer_device, kv_connector_module_path"
    )
    assert fields["kv_rank"] == 0, "the caller's object is not changed"


def test_what_this_installation_does_have_stays() -> None:
    ascend = Installation(HERE.ours, KNOWN | {"kv_rank"}, "npu", lambda module: module == "vllm_ascend")
    fields = {
        "kv_connector": "MooncakeConnectorV1",
        "kv_rank": 1,
        "kv_buffer_device": "npu",
        "kv_connector_module_path": "vllm_ascend.distributed.mooncake_connector",
    }

    admitted, said = admit(fields, ascend)

    assert admitted == {**fields, "kv_load_failure_policy": "recompute"}
    assert said == []


@pytest.mark.parametrize(
    "fields",
    [
        {"kv_connector": "NixlConnector", "kv_rank": 0, "kv_role": "kv_both"},
        {"kv_rank": 0},
        {"kv_connector": ["AscendStoreConnector"], "kv_rank": 0},
        {"kv_connector": "MultiConnector", "kv_rank": 0},
        {"kv_connector": "MultiConnector", "kv_rank": 0, "kv_connector_extra_config": {"connectors": "none"}},
        {
            "kv_connector": "MultiConnector",
            "kv_connector_extra_config": {"connectors": [{"kv_connector": "NixlConnector", "kv_rank": 0}, 5]},
        },
    ],
)
def test_configurations_of_others_pass_untouched(fields: dict[str, Any]) -> None:
    assert admit(fields, HERE) == (fields, [])


def test_children_are_fitted_and_fail_as_the_whole_does() -> None:
    theirs = {"kv_connector": "OffloadingConnector", "kv_rank": 3}
    fields = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {
            "connectors": [
                {"kv_connector": "MooncakeConnectorV1", "kv_role": "kv_producer", "engine_id": "0", "kv_rank": 0},
                {"kv_connector": "AscendStoreConnector", "kv_role": "kv_producer", "kv_load_failure_policy": "fail"},
                theirs,
            ]
        },
    }

    admitted, said = admit(fields, HERE)

    assert admitted["kv_load_failure_policy"] == "recompute"
    hand_off, store, other = admitted["kv_connector_extra_config"]["connectors"]
    assert hand_off == {"kv_connector": "MooncakeConnectorV1", "kv_role": "kv_producer"}
    assert store == {"kv_connector": "AscendStoreConnector", "kv_role": "kv_producer"}
    assert other is theirs
    assert said == ["accepted, but without a meaning for MooncakeConnectorV1: kv_rank, engine_id"]


def test_a_pool_below_vllms_own_connector_makes_the_whole_recompute() -> None:
    child = {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {"spec_name": "EmsOffloadingSpec"}}
    admitted, said = admit(inside(child), HERE)
    assert admitted == {**inside(child), "kv_load_failure_policy": "recompute"}
    assert not said
    _, (sentence,) = admit({**inside(child), "kv_load_failure_policy": "fail"}, HERE)
    assert sentence.startswith("kv_load_failure_policy of MultiConnector is 'fail'")


def test_a_whole_that_lets_requests_fail_is_told_so() -> None:
    fields = {
        "kv_connector": "MultiConnector",
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {"connectors": [{"kv_connector": "AscendStoreConnector", "kv_role": "kv_both"}]},
    }

    admitted, (sentence,) = admit(fields, HERE)

    assert admitted == fields
    assert sentence.startswith("kv_load_failure_policy of MultiConnector is 'fail', which ends each request")


def inside(child: object) -> dict[str, Any]:
    return {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [child]}}


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (
            {"kv_connector": "AscendStoreConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"tenant": []}},
            "tenant is [], expected a text",
        ),
        ({"kv_connector": "AscendStoreConnector"}, "kv_role is None, expected kv_producer, kv_consumer or kv_both"),
        (
            {"kv_connector": "MooncakeConnectorV1", "kv_connector_extra_config": {"decode": {"tp_size": "two"}}},
            "decode.tp_size is 'two', expected a whole number of ranks from 1 on",
        ),
    ],
    ids=["value", "role", "sizes"],
)
def test_wrong_settings_are_refused_before_an_engine_starts(fields: dict[str, Any], sentence: str) -> None:
    for given in (fields, inside(fields)):
        with pytest.raises(ConfigError) as error:
            check(given, HERE)
        assert str(error.value) == sentence


@pytest.mark.parametrize(
    "fields",
    [
        {"kv_connector": "NixlConnector", "kv_connector_extra_config": {"tenant": []}},
        {"kv_connector": "AscendStoreConnector", "kv_role": "kv_both", "kv_connector_extra_config": None},
        {"kv_connector": "AscendStoreConnector", "kv_connector_extra_config": "vLLM says what is wrong"},
        {"kv_connector": "AscendStoreConnector", "kv_connector_extra_config": {"on_error": "serve_without"}},
        {"kv_connector": "MooncakeConnectorV1"},
        {},
    ],
    ids=["of others", "none", "no object", "allowed", "no sizes", "nothing"],
)
def test_what_is_not_wrong_or_not_ours_passes(fields: dict[str, Any]) -> None:
    assert [refusal(given) for given in (fields, inside(fields), inside(5))] == ["", "", ""]


def refusal(fields: dict[str, Any]) -> str:
    try:
        check(fields, HERE)
    except ConfigError as error:
        return str(error)
    return ""
