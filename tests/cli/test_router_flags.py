from __future__ import annotations

import pytest

from ems.cli.router_flags import paired
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
