from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ems.errors import ConfigError
from ems.http.address import Address


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("h:1", ("h", 1)),
        ("10.0.0.7:7100", ("10.0.0.7", 7100)),
        ("kimi-k25-pd-0-prefill-0-0.dev.svc:65535", ("kimi-k25-pd-0-prefill-0-0.dev.svc", 65535)),
        (" host_a:80 ", ("host_a", 80)),
        ("a" * 63 + ".b.:80", ("a" * 63 + ".b.", 80)),
        ("[::1]:7100", ("::1", 7100)),
        ("[fe80::a:1]:080", ("fe80::a:1", 80)),
    ],
)
def test_what_is_an_instance_is_read(text: str, expected: tuple[str, int]) -> None:
    address = Address.parse(text)

    assert expected == address
    assert address == Address.parse(str(address))


NO_PORTS = [
    "",
    ":",
    "h",
    "h:",
    ":80",
    "h:0",
    "h:65536",
    "h:-1",
    "h:+1",
    "h:1.0",
    "h:\N{ARABIC-INDIC DIGIT ONE}",
    "[::1]",
]
NO_HOSTS = ["::1:80", "[zz]:80", "http://h:80", "h/p:80", "h h:80", "h\r\nx:80", "-h:80", "user@h:80", "h:80/"]


@pytest.mark.parametrize("text", [*NO_PORTS, *NO_HOSTS, "a..b:80", "a" * 64 + ".b:80", ".".join("a" * 128) + ":80"])
def test_what_is_no_instance_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match="expected"):
        Address.parse(text)


@given(st.text())
def test_any_text_is_an_instance_or_refused(text: str) -> None:
    try:
        address = Address.parse(text)
    except ConfigError:
        return

    assert address == Address.parse(str(address))
    assert 1 <= address.port <= 65535
    assert ":" in address.host or address.host.encode("idna")


@given(st.from_regex(r"\A[-a_.]{1,70}:80\Z"))
def test_a_name_that_is_taken_can_be_looked_up(text: str) -> None:
    try:
        assert Address.parse(text).host.encode("idna")
    except ConfigError:
        pass


def test_an_ipv6_host_may_come_in_brackets_or_without() -> None:
    assert Address.of("[::1]", 80) == Address.of("::1", 80)
    assert str(Address.of("::1", 80)) == "[::1]:80"
