"""What the tools of accelerators print becomes facts; what they do not say stays empty."""

from __future__ import annotations

import pytest

from ems.doctor.devices import gpus, hccn_addresses, npus, ping
from ems.doctor.facts import Device
from tests.doctor import recorded
from tests.doctor.recorded import ascend_host, cuda_host, no_tools


def test_npus_have_the_state_of_their_network() -> None:
    well = Device(0, "Ascend 910B3", link="UP", health="Success", address="10.20.0.10", tls=False)
    assert npus(ascend_host()) == [well, Device(1, "Ascend 910B3", "UP", "Success", "10.20.0.11", tls=False)]


def test_chips_of_one_card_are_devices_of_their_own() -> None:
    listed = npus(lambda command: recorded.NPU_SMI_WITH_PHYSICAL if command[0] == "npu-smi" else None)
    assert listed == [Device(0, "Ascend910"), Device(1, "Ascend910")]


@pytest.mark.parametrize(
    ("said", "tls"),
    [
        (recorded.TLS_ON, True),
        (recorded.TLS_OFF, False),
        ("no certificate found\n", False),
        ("busy\n", None),
        (None, None),
    ],
)
def test_the_tls_switch_is_on_off_or_unknown(said: str | None, tls: bool | None) -> None:
    assert npus(ascend_host({(1, "-tls"): said}))[1].tls is tls


@pytest.mark.parametrize("health", ["Init", "Fault", "Receive timeout"])
def test_the_health_of_a_network_is_told_in_the_drivers_words(health: str) -> None:
    assert npus(ascend_host({(0, "-net_health"): f"net health status: {health}\n"}))[0].health == health


@pytest.mark.parametrize(
    ("said", "reached"),
    [
        (recorded.PING_SUCCESS, True),
        ("This pkt ping success\n", True),
        (recorded.PING_LOST, False),
        (recorded.PING_LOST.replace("100.00%", "10.00%"), False),
        (None, False),
    ],
)
def test_a_ping_that_lost_a_packet_is_none(said: str | None, reached: bool) -> None:
    assert (ping(lambda _: said, Device(0, "Ascend 910B3"), "10.20.1.10").problem == "") is reached


def test_gpus_have_the_number_of_their_inactive_links() -> None:
    name = "NVIDIA H100 80GB HBM3"
    assert gpus(cuda_host) == [Device(0, name), Device(1, name, inactive_nvlinks=1)]


def test_without_tools_there_are_no_devices() -> None:
    assert npus(no_tools) == []
    assert gpus(no_tools) == []


def test_addresses_of_hccn_conf_are_told_by_number() -> None:
    text = "address_0=10.20.0.10\nnetmask_0=255.255.255.0\n address_11 = 10.20.0.11 \n#address_2=10.20.0.12\n"
    assert hccn_addresses(text) == {0: "10.20.0.10", 11: "10.20.0.11"}
