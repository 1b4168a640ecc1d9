"""Files and variables of Mooncake as people have them, and one sentence for each that makes no sense."""

from __future__ import annotations

import json

import pytest

from ems.errors import ConfigError
from ems.pool.tiers.cluster.mooncake_config import parse_mooncake

DEPLOYED = {
    "metadata_server": "P2PHANDSHAKE",
    "protocol": "tcp",
    "device_name": "",
    "use_ascend_direct": True,
    "master_server_address": "127.0.0.1:50088",
    "global_segment_size": "1GB",
    "local_buffer_size": "1GB",
}


def parse(**settings: object) -> object:
    return parse_mooncake(json.dumps(DEPLOYED | settings), {}, "mooncake.json")[0]


def test_a_deployed_file_is_read_as_it_stands() -> None:
    config, unused = parse_mooncake(json.dumps(DEPLOYED), {}, "mooncake.json")
    assert config.global_segment_size == 1 << 30
    assert config.master_server_address == "127.0.0.1:50088"
    assert unused == ["use_ascend_direct"]


@pytest.mark.parametrize("size", ["1GB", "1024MB", "1048576KB", "1073741824B", "1073741824", "1gb", " 1 GB "])
def test_sizes_are_read_in_every_way_that_people_write_them(size: str) -> None:
    text = json.dumps(DEPLOYED | {"global_segment_size": size})
    assert parse_mooncake(text, {}, "mooncake.json")[0].global_segment_size == 1 << 30


def test_sizes_may_be_numbers_and_a_host_may_give_no_memory() -> None:
    for size, meant in ((1 << 30, 1 << 30), (0, 0), ("0", 0)):
        text = json.dumps(DEPLOYED | {"global_segment_size": size})
        assert parse_mooncake(text, {}, "mooncake.json")[0].global_segment_size == meant


def test_without_a_file_the_environment_says_it() -> None:
    variables = {
        "MOONCAKE_MASTER": "10.0.0.1:50051",
        "MOONCAKE_PROTOCOL": "RDMA",
        "MOONCAKE_GLOBAL_SEGMENT_SIZE": "4gb",
    }
    config, unused = parse_mooncake(None, variables, "the environment")
    assert (config.master_server_address, config.protocol) == ("10.0.0.1:50051", "rdma")
    assert config.global_segment_size == 4 << 30
    assert not unused


@pytest.mark.parametrize(
    "master",
    [
        "10.0.0.1:50051",
        "[fd00::1]:65535",
        "host:1",
        "etcd://10.0.0.1:2379;10.0.0.2:2379",
        "redis://host:6379",
        "redis://host:6379/0",
    ],
)
def test_masters_are_named_in_these_ways(master: str) -> None:
    text = json.dumps(DEPLOYED | {"master_server_address": master})
    assert parse_mooncake(text, {}, "mooncake.json")[0].master_server_address == master


@pytest.mark.parametrize("server", ["P2PHANDSHAKE", "http://10.0.0.1:8080/metadata", "etcd://host:2379", "host:2379"])
def test_metadata_servers_are_named_in_these_ways(server: str) -> None:
    text = json.dumps(DEPLOYED | {"metadata_server": server})
    assert parse_mooncake(text, {}, "mooncake.json")[0].metadata_server == server


@pytest.mark.parametrize(
    ("named", "meant"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("10.0.0.1:12345", "10.0.0.1"),
        (" host-1:12345", "host-1"),
        ("fd00::1", "fd00::1"),
        ("[fd00::1]:12345", "[fd00::1]"),
    ],
)
def test_a_port_of_this_host_means_nothing_for_it_has_several_clients(named: str, meant: str) -> None:
    text = json.dumps(DEPLOYED | {"local_hostname": named})
    assert parse_mooncake(text, {}, "mooncake.json")[0].local_hostname == meant


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"global_segment_size": "1XB"}, "global_segment_size in mooncake.json is '1XB', expected a number above 0"),
        ({"global_segment_size": "-1GB"}, "global_segment_size in mooncake.json is '-1GB'"),
        ({"global_segment_size": "15MB"}, "mooncake.json is '15MB', expected 16MB or more, or 0 to lend nothing"),
        (
            {"metadata_server": "junk"},
            "metadata_server in mooncake.json is 'junk', expected P2PHANDSHAKE or an address",
        ),
        ({"global_segment_size": True}, "global_segment_size in mooncake.json is True, expected bytes or a size"),
        ({"local_buffer_size": [1]}, "local_buffer_size in mooncake.json is [1], expected bytes or a size"),
        ({"protocol": "carrier-pigeon"}, "is 'carrier-pigeon', expected one of tcp, rdma, ascend"),
        ({"protocol": 5}, "protocol in mooncake.json is 5, expected a text"),
        *(
            ({"master_server_address": wrong}, f"is '{wrong}', expected host:port or etcd://host:port")
            for wrong in (
                "k8s://default/x",
                "redis://host",
                "nowhere",
                "host:0",
                "host:65536",
                "host:",
                "etcd://",
                "etcd://host",
                "a b:1",
            )
        ),
        (
            {"master_server_address": ""},
            "mooncake.json names no master, expected an address such as 10.0.0.1:50088 in master_server_address",
        ),
    ],
)
def test_what_makes_no_sense_is_refused_with_a_sentence(settings: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse(**settings)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("text", ["", "[]", "{", '"a"'])
def test_what_is_no_object_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"mooncake\.json is no JSON"):
        parse_mooncake(text, {}, "mooncake.json")


@pytest.mark.parametrize("nothing", ["0", 0.0, "0GB", "0 MB", "0gib", "00"])
def test_nothing_is_lent_in_any_unit(nothing: object) -> None:
    text = json.dumps(DEPLOYED | {"global_segment_size": nothing})
    assert parse_mooncake(text, {}, "mooncake.json")[0].global_segment_size == 0


def test_who_wrote_a_variable_reads_its_name() -> None:
    with pytest.raises(ConfigError, match=r"in the environment \(MOONCAKE_MASTER\) is 'nowhere'"):
        parse_mooncake(None, {"MOONCAKE_MASTER": "nowhere"}, "the environment")


def test_who_misspelt_the_master_reads_what_he_wrote() -> None:
    with pytest.raises(ConfigError, match=r"names no master \(but master_server_adress\), expected"):
        parse_mooncake(json.dumps({"master_server_adress": "10.0.0.1:50088"}), {}, "mooncake.json")
