"""Settings: sizes as people write them, and sentences for what makes no sense."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ems.cli import build_app
from ems.config import NodeConfig, default_directory, default_socket, format_size, parse_size
from ems.errors import ConfigError

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1073741824", GIB),
        ("1073741824B", GIB),
        ("1048576KB", GIB),
        ("1024MB", GIB),
        ("1GB", GIB),
        ("1gb", GIB),
        ("1g", GIB),
        ("1G", GIB),
        ("1GiB", GIB),
        ("1 GB", GIB),
        (" 1GB ", GIB),
        ("1.5GB", 3 * GIB // 2),
        ("0.5k", 512),
        ("2TB", 2 << 40),
        ("64kib", 64 * KIB),
        ("1b", 1),
        ("9007199254740993", 9007199254740993),
        ("8191.5TB", 16383 << 39),
    ],
)
def test_sizes_are_read_as_people_write_them(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["1", "16", "4095"])
def test_a_small_number_without_a_unit_is_one_whose_unit_was_forgotten(text: str) -> None:
    with pytest.raises(ConfigError, match=f"--size is '{text}', which means bytes, expected a unit such as {text}GB"):
        parse_size(text, name="--size")
    assert parse_size(f"{text}B") == parse_size(int(text)) == int(text)


def test_a_number_is_a_size() -> None:
    assert parse_size(GIB) == GIB


@pytest.mark.parametrize(
    "text",
    [
        "",
        "GB",
        "1XB",
        "1e9",
        "-1",
        "1,5GB",
        "1GBB",
        "0x10",
        "1 2",
        "one",
        "1PB",
        "\uff11GB",
        "1ib",
        "-",
        "-5GB",
        "1\n2",
        "nan",
        True,
    ],
)
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--size is .*, expected a number above 0 with a unit such as 1GB"):
        parse_size(text, name="--size")


@pytest.mark.parametrize("text", ["0", -5, "0GB", "0.1"])
def test_a_size_is_positive(text: str | int) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"size is {text!r}, expected a number above 0 with a unit")):
        parse_size(text)


@pytest.mark.parametrize("digits", [25, 400, 5000])
def test_a_number_longer_than_any_memory_is_refused(digits: int) -> None:
    with pytest.raises(ConfigError, match="expected a number above 0"):
        parse_size("9" * digits)


@given(st.integers(4096, 1 << 60))
def test_plain_bytes_are_exact(size: int) -> None:
    assert parse_size(str(size)) == parse_size(size) == size


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (3 * GIB // 2, "1.5 GiB"), (1 << 50, "1024.0 TiB")],
)
def test_sizes_are_shown_with_one_unit(size: int, text: str) -> None:
    assert format_size(size) == text


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"high_watermark": 0.0}, "high watermark"),
        ({"high_watermark": 1.01}, "high watermark"),
        ({"high_watermark": float("nan")}, "high watermark"),
        ({"eviction_ratio": 0.0}, "eviction ratio"),
        ({"eviction_ratio": 1.01}, "eviction ratio"),
        ({"size": -1}, "cannot be negative"),
        ({"segment_size": -1}, "cannot be negative"),
        ({"size": MIB, "segment_size": 2 * MIB}, "is larger than the pool"),
        ({"http_port": -1}, "HTTP port"),
        ({"http_port": 65536}, "HTTP port"),
        ({"socket": Path("/" + "x" * 107)}, "longer than the 107 bytes"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, object], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        NodeConfig(**settings)  # type: ignore[arg-type]


def test_the_limits_themselves_are_settings() -> None:
    limits = {
        "high_watermark": 1.0,
        "eviction_ratio": 1.0,
        "http_port": 65535,
        "socket": Path("/" + "x" * 106),
        "size": 1,
    }
    made = NodeConfig(**limits)  # type: ignore[arg-type]
    assert {name: getattr(made, name) for name in limits} == limits


def test_the_environment_names_folder_and_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("EMS_DIR", "EMS_SOCKET"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.getuid", lambda: 0)
    assert default_directory() == Path("/dev/shm/ems")
    monkeypatch.setattr("os.getuid", lambda: 1000)
    assert default_socket() == Path("/dev/shm/ems-1000/node.sock")
    monkeypatch.setenv("EMS_DIR", "/somewhere")
    assert default_socket() == Path("/somewhere/node.sock")
    monkeypatch.setenv("EMS_SOCKET", "/else/s")
    assert (default_directory(), default_socket()) == (Path("/somewhere"), Path("/else/s"))


@pytest.mark.parametrize("name", ["EMS_DIR", "EMS_SOCKET", "EMS_ALLOW_DISK"])
def test_a_variable_that_is_set_to_nothing_is_not_set(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a path it would be the folder from which a node is started, with all that is in it."""
    for one in ("EMS_DIR", "EMS_SOCKET", "EMS_ALLOW_DISK"):
        monkeypatch.delenv(one, raising=False)
    started: list[NodeConfig] = []

    async def serve(config: NodeConfig, _kept: object) -> None:
        started.append(config)

    monkeypatch.setattr("ems.cli.node._serve", serve)
    monkeypatch.setattr("ems.cli.node._run", lambda run: run())
    for value in (None, ""):
        if value is not None:
            monkeypatch.setenv(name, value)
        build_app()(["node", "--no-http"], result_action="return_value")
    assert started[1] == started[0] == NodeConfig(http_port=None)
