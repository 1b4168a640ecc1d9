from __future__ import annotations

from pathlib import Path

import pytest

from ems.cli.router_flags import by_instance, event_source, paired, told_nodes
from ems.errors import ConfigError
from ems.http.address import Address


def test_hosts_and_ports_are_paired_in_order() -> None:
    assert (Address("a", 1), Address("b", 2)) == paired("prefiller", ["a", "b"], [1, 2])
    assert paired("prefiller", [], []) == ()


@pytest.mark.parametrize(
    ("hosts", "ports", "said"),
    [
        (["a"], [], "--decoder-hosts has 1 host and --decoder-ports has 0 ports: expected as many"),
        (["a", "b"], [1], "2 hosts and --decoder-ports has 1 port:"),
        (["a"], [0], "Port 0 of a is out of range"),
        (["a"], [70000], "expected 1 to 65535"),
        (["http://a"], [1], "'http://a' is not a host"),
    ],
)
def test_lists_that_do_not_fit_are_refused(hosts: list[str], ports: list[int], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        paired("decoder", hosts, ports)


NODE = "10.0.0.1:8000=http://acme@10.0.0.1:9410"


@pytest.mark.parametrize(("texts", "key"), [([NODE], None), ([], Path("key"))])
def test_pool_nodes_and_their_key_go_together(texts: list[str], key: Path | None) -> None:
    with pytest.raises(ConfigError, match="--pool-nodes and --pool-key go together"):
        told_nodes(texts, key)
    assert told_nodes([], None) == {}
    assert list(told_nodes([NODE], Path("key"))) == [Address("10.0.0.1", 8000)]


def test_an_instance_has_one_source_and_one_node() -> None:
    with pytest.raises(ConfigError, match=r"--pool-nodes names 10\.0\.0\.1:8000 twice"):
        told_nodes([NODE, NODE], Path("key"))
    with pytest.raises(ConfigError, match="--kv-events names h:1 twice"):
        by_instance("kv-events", map(event_source, ["h:1=tcp://h:2", "h:1=tcp://h:3"]))
