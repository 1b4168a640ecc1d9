"""What people write in kv_connector_extra_config, right and wrong."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from ems.errors import ConfigError
from ems.pool.tiers.settings import parse_tier
from ems.vllm.configuration.settings import WITHOUT_MEANING, ConnectorSettings, check_kvcache_type, read_settings
from ems.vllm.node import make_client


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("EMS_", "ACCELERATE_")) or name == "MODEL_ID"]:
        monkeypatch.delenv(name)


@pytest.mark.parametrize(("role", "saves"), [("kv_producer", True), ("kv_both", True), ("kv_consumer", False)])
def test_the_role_says_who_stores(role: str, saves: bool) -> None:
    settings, warnings = read_settings(role, {})

    assert settings.saves is saves
    assert warnings == []


def test_numbers_and_booleans_may_come_as_strings() -> None:
    settings, _ = read_settings(
        "kv_both", {"pool_size": "1GB", "autostart": "False", "lookup_timeout_ms": "250", "handoff_timeout_ms": 1500}
    )

    assert settings.pool_size == 1 << 30
    assert settings.autostart is False
    assert settings.lookup_timeout == 0.25
    assert settings.handoff_timeout == 1.5


def test_the_environment_is_used_where_the_file_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMS_SOCKET", "/run/pool.sock")
    monkeypatch.setenv("EMS_POOL_SIZE", "2GB")
    monkeypatch.setenv("EMS_AUTOSTART", "0")

    settings, _ = read_settings("kv_both", {})
    assert settings.socket == Path("/run/pool.sock")
    assert settings.pool_size == 2 << 30
    assert settings.autostart is False

    settings, _ = read_settings("kv_both", {"socket": "/run/other.sock", "pool_size": 4096, "autostart": True})
    assert settings.socket == Path("/run/other.sock")
    assert settings.pool_size == 4096
    assert settings.autostart is True


def test_credentials_come_from_the_file_or_the_environment_and_are_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_settings("kv_both", {})[0].credentials.name == ""
    monkeypatch.setenv("ACCELERATE_ID", "ann")
    monkeypatch.setenv("ACCELERATE_KEY", "from outside")
    settings, warnings = read_settings("kv_both", {})
    assert (settings.credentials.access_id, settings.credentials.access_key) == ("ann", "from outside")
    settings, warnings = read_settings("kv_both", {"access_id": "bob", "access_key": "secret"})
    assert (settings.credentials.name, settings.credentials.access_key) == ("bob", "secret")
    assert warnings == []
    assert "secret" not in repr(settings)
    with pytest.raises(ConfigError, match="access_key is a list, expected a text") as refused:
        read_settings("kv_both", {"access_key": ["secret"]})
    assert "secret" not in str(refused.value)


def test_a_folder_without_a_socket_has_the_socket_inside() -> None:
    settings, _ = read_settings("kv_both", {"directory": "/dev/shm/mine"})

    assert settings.socket == Path("/dev/shm/mine/node.sock")
    assert settings.node_config().directory == Path("/dev/shm/mine")


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"pool_size": "many"}, "pool_size is 'many'"),
        ({"pool_size": "-1GB"}, "pool_size is '-1GB'"),
        ({"autostart": "perhaps"}, "autostart is 'perhaps'"),
        ({"lookup_timeout_ms": "soon"}, "lookup_timeout_ms is 'soon'"),
        ({"handoff_timeout_ms": 0}, "handoff_timeout_ms is 0"),
        ({"call_timeout_ms": 1e9}, "call_timeout_ms is 1000000000.0"),
        ({"lookup_timeout_ms": "nan"}, "lookup_timeout_ms is 'nan'"),
        ({"load_async": "maybe"}, "load_async is 'maybe'"),
        ({"num_min_reuse_tokens": "2k"}, "num_min_reuse_tokens is '2k'"),
        ({"num_min_load_blocks": -1}, "num_min_load_blocks is -1"),
        ({"num_min_load_blocks": True}, "num_min_load_blocks is True"),
        ({"num_min_load_blocks": 1.5}, "num_min_load_blocks is 1.5"),
        ({"store_tp_size": "auto"}, "store_tp_size is 'auto'"),
        ({"store_tp_size": 6, "prefill_tp_size": 4}, "store_tp_size is 6, expected a multiple of prefill_tp_size"),
        ({"prefill_tp_size": 3, "decode_tp_size": 2}, "prefill_tp_size is 3 and decode_tp_size is 2"),
        ({"decode_tp_size": 0}, "decode_tp_size is 0"),
        ({"kvcache_type": "GQA"}, "kvcache_type is 'GQA', expected 'MHA' or 'MLA'"),
        ({"on_error": True}, "on_error is True, expected 'refuse' or 'serve_without'"),
        ({"tenant": ["me"]}, "tenant is ['me']"),
    ],
)
def test_a_wrong_value_is_refused_by_name(extra: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=r"expected") as error:
        read_settings("kv_both", extra)

    assert named in str(error.value)


def test_an_unknown_key_is_named_with_the_nearest_known_one() -> None:
    _, warnings = read_settings("kv_both", {"pool_sise": "1GB", "zzz": 1})

    assert warnings == [
        "key 'pool_sise' in kv_connector_extra_config means nothing to this connector, did you mean 'pool_size'",
        "key 'zzz' in kv_connector_extra_config means nothing to this connector",
    ]


def test_a_wrong_value_of_the_environment_is_refused_by_its_own_name() -> None:
    with pytest.raises(ConfigError) as error:
        read_settings("kv_both", {}, {"EMS_NUM_MIN_REUSE_TOKENS": "all"})

    assert str(error.value) == "EMS_NUM_MIN_REUSE_TOKENS is 'all', expected a whole number of tokens from 0 on"


def test_each_variable_has_a_key_that_goes_before_it() -> None:
    environment = {
        "EMS_NUM_MIN_REUSE_TOKENS": "2048",
        "EMS_NUM_MIN_LOAD_BLOCKS": "1",
        "EMS_TIMEOUT": "5000",
        "MODEL_ID": "cc_kvstore@_@ds_default_ns_001",
    }
    silent, _ = read_settings("kv_both", {}, environment)
    assert (silent.min_reuse_tokens, silent.min_load_blocks, silent.call_timeout) == (2048, 1, 5.0)
    assert silent.namespace == "cc_kvstore@_@ds_default_ns_001"

    shorter, _ = read_settings("kv_both", {}, {**environment, "EMS_CALL_TIMEOUT_MS": "700"})
    assert shorter.call_timeout == 0.7

    said = {"num_min_reuse_tokens": 0, "num_min_load_blocks": "3", "call_timeout_ms": 100, "namespace": "mine"}
    spoken, _ = read_settings("kv_both", said, environment)
    assert (spoken.min_reuse_tokens, spoken.min_load_blocks, spoken.call_timeout) == (0, 3, 0.1)
    assert spoken.namespace == "mine"


def test_a_model_id_of_another_program_is_not_taken_for_a_namespace() -> None:
    settings, _ = read_settings("kv_both", {}, {"MODEL_ID": "Qwen/Qwen2.5-7B-Instruct"})

    assert settings.namespace == ""


def test_nothing_is_held_back_unless_asked_for() -> None:
    settings, _ = read_settings("kv_both", {})

    assert (settings.saves, settings.loads, settings.load_async, settings.save_answers) == (True, True, None, True)
    assert (settings.min_reuse_tokens, settings.min_load_blocks) == (0, 0)
    assert (settings.cost_model, settings.health_gate, settings.save_tails) == (True, True, True)
    assert (settings.layerwise, settings.explain) == (False, False)
    assert (settings.store_tp_size, settings.kvcache_type, settings.on_error) == (0, "", "refuse")


def test_keys_of_other_pools_mean_what_they_say() -> None:
    settings, warnings = read_settings(
        "kv_both",
        {
            "load_async": "false",
            "use_layerwise": "true",
            "save_decode_cache": False,
            "discard_partial_chunks": "True",
            "consumer_is_to_load": False,
        },
    )

    assert settings.load_async is False
    assert settings.layerwise is True
    assert settings.save_answers is False
    assert settings.save_tails is False
    assert settings.loads is True, "that key is for consumers"
    assert warnings == []


@pytest.mark.parametrize(
    ("extra", "saves", "loads"),
    [
        ({}, False, True),
        ({"consumer_is_to_load": True}, False, True),
        ({"consumer_is_to_put": "true"}, True, True),
        ({"consumer_is_to_put": True, "consumer_is_to_load": False}, True, False),
    ],
    ids=str,
)
def test_a_consumer_loads_and_does_not_save_unless_told_otherwise(
    extra: dict[str, Any], saves: bool, loads: bool
) -> None:
    settings, _ = read_settings("kv_consumer", extra)

    assert (settings.saves, settings.loads) == (saves, loads)


def test_a_consumer_that_neither_loads_nor_saves_is_refused() -> None:
    with pytest.raises(ConfigError) as error:
        read_settings("kv_consumer", {"consumer_is_to_load": "false"})

    assert str(error.value) == (
        "consumer_is_to_load is false for a kv_consumer that does not save either, so it would do nothing; "
        "leave consumer_is_to_load out, set consumer_is_to_put to true, or remove the connector"
    )


@pytest.mark.parametrize("role", [None, "", "producer"])
def test_a_role_that_is_missing_or_unknown_is_refused(role: str | None) -> None:
    with pytest.raises(ConfigError, match=r"kv_role is .*, expected kv_producer, kv_consumer or kv_both"):
        read_settings(role, {})


def test_what_steers_other_systems_is_accepted_in_one_sentence() -> None:
    _, warnings = read_settings("kv_both", {"lookup_rpc_port": "1", "backend": "mooncake", "h2d_stagger_us": 5})

    (sentence,) = warnings
    assert sentence == (
        "accepted, but without a meaning for this connector, in kv_connector_extra_config: "
        "lookup_rpc_port, h2d_stagger_us"
    )


@pytest.mark.parametrize(
    ("backend", "environment", "tiers"),
    [
        ("mooncake", {"MOONCAKE_CONFIG_PATH": "/etc/a b.json"}, ("mooncake:/etc/a%20b.json",)),
        ("Mooncake", {"MOONCAKE_CONFIG_PATH": "m.json", "MOONCAKE_MASTER": "h:1"}, (f"mooncake:{Path.cwd()}/m.json",)),
        ("mooncake", {"MOONCAKE_MASTER": "h:1"}, ("mooncake:",)),
        ("mooncake", {"MOONCAKE_MASTER": "h:1", "EMS_TIER": "dir:/cache"}, ()),
        ("mooncake", {}, ()),
        ("memcache", {"MOONCAKE_CONFIG_PATH": "/etc/mooncake.json"}, ()),
        (None, {"MOONCAKE_CONFIG_PATH": "/etc/mooncake.json"}, ()),
    ],
)
def test_mooncake_is_the_cluster_below_a_node_that_is_started_from_here(
    monkeypatch: pytest.MonkeyPatch, backend: str | None, environment: dict[str, str], tiers: tuple[str, ...]
) -> None:
    for name in ("MOONCAKE_CONFIG_PATH", "MOONCAKE_MASTER"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    config = read_settings("kv_both", {"backend": backend})[0].node_config()
    assert config.tiers == tiers
    assert all(parse_tier(tier).kind == "mooncake" for tier in tiers)


@pytest.mark.parametrize("backend", ["memcache", "yuanrong"])
def test_another_backend_is_not_used_and_one_sentence_says_so(backend: str) -> None:
    said = f"backend is {backend!r}, which EMS does not use: the node of this host keeps the pages"
    assert read_settings("kv_both", {"backend": backend})[1] == [said]


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        *((word, "on_save") for word in (True, "1", "true", "on_save")),
        *((word, "never") for word in (False, "0", "false", "never")),
        ("On_Evict", "on_evict"),
        ("on_second_use", "on_second_use"),
        *((word, "") for word in (None, "")),
    ],
)
def test_when_a_cluster_gets_what_is_stored(monkeypatch: pytest.MonkeyPatch, said: object, meant: str) -> None:
    assert read_settings("kv_both", {"write_rcache": said})[0].write_rcache == meant
    if said is not None:
        monkeypatch.setenv("EMS_ENABLE_WRITE_RCACHE", str(said))
        assert read_settings("kv_both", {})[0].write_rcache == meant
        assert read_settings("kv_both", {"write_rcache": "never"})[0].write_rcache == "never"


def test_another_word_for_that_is_refused() -> None:
    with pytest.raises(ConfigError) as error:
        read_settings("kv_both", {"write_rcache": "always"})
    assert str(error.value) == (
        "write_rcache is 'always', expected true, false or never, on_save, on_second_use, on_evict"
    )


def test_an_engine_may_keep_to_its_host(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_settings("kv_both", {})[0].read_local_only is False
    assert read_settings("kv_both", {"read_local_only": "true"})[0].read_local_only is True
    monkeypatch.setenv("EMS_ENABLE_READ_LOCAL_ONLY", "1")
    assert read_settings("kv_both", {})[0].read_local_only is True
    client = make_client(read_settings("kv_both", {"write_rcache": False})[0], "test")
    assert (client._local_only, client._cluster_write) == (True, "never")
    client.close()


def test_no_key_is_both_used_and_without_meaning() -> None:
    _, warnings = read_settings("kv_both", dict.fromkeys(WITHOUT_MEANING))

    assert len(warnings) == 1
    assert not WITHOUT_MEANING & set(ConnectorSettings.__struct_fields__)


def test_null_counts_as_absent() -> None:
    settings, _ = read_settings("kv_both", {"load_async": None, "pool_size": None, "tenant": None})

    assert (settings.load_async, settings.pool_size, settings.tenant) == (None, 0, "default")
    assert read_settings("kv_both", {"use_layerwise": True})[0].load_async is False
    assert read_settings("kv_both", {"load_async": "true"})[0].load_async is True


def refusal(declared: str, *, mla: bool) -> str:
    try:
        check_kvcache_type(declared, mla=mla)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("declared", "mla", "sentence"),
    [
        ("", True, ""),
        ("", False, ""),
        ("MHA", False, ""),
        ("MLA", True, ""),
        (
            "MLA",
            False,
            (
                "kvcache_type is 'MLA', but the model's attention is MHA (grouped queries count as MHA); "
                "leave kvcache_type out or set it to 'MHA'"
            ),
        ),
        (
            "MHA",
            True,
            "kvcache_type is 'MHA', but the model's attention is MLA; leave kvcache_type out or set it to 'MLA'",
        ),
    ],
)
def test_a_declared_kind_of_cache_has_to_be_right(declared: str, mla: bool, sentence: str) -> None:
    assert refusal(declared, mla=mla) == sentence
