"""``ems node --config``: what a file says, what goes before it, and one sentence for each mistake in it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from ems.cli import node as verb
from ems.cli import node_file, run
from ems.config import GIB, NodeConfig
from ems.pool.node.restart import KeptOpen
from ems.pool.tiers.settings import parse_tier

WHOLE = """
dir = "pool"
allow-disk = true
socket = "/run/ems.sock"
socket-mode = "666"
tenants = "tenants.json"
size = "8GB"
segment-size = 134217728
high-watermark = 0.9
eviction-ratio = 1
policy = "lru"
http-host = "::1"
http-port = 0
http-token-file = "token"
prefault = false
verify = "always"
tier = ["dir:/var/cache/ems"]
"""


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[NodeConfig]]:
    """The settings with which nodes would have run."""
    configs: list[NodeConfig] = []

    def remember(config: NodeConfig, _kept: object) -> None:
        configs.append(config)

    monkeypatch.setattr(verb, "_serve", remember)
    monkeypatch.setattr(verb, "_run", lambda serve: serve())
    monkeypatch.setattr("uvloop.run", lambda nothing: None)
    for name in ("EMS_DIR", "EMS_SOCKET", "EMS_TENANTS", "EMS_POOL_SIZE", "EMS_TIER", "EMS_ALLOW_DISK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(verb, "SYSTEM_FILE", Path("/nonexistent/node.toml"))
    yield configs
    structlog.reset_defaults()


def test_every_setting_can_come_from_a_file(started: list[NodeConfig], tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text(WHOLE)
    assert run(["node", "--config", str(file)]) == 0
    assert started == [
        NodeConfig(
            directory=tmp_path / "pool",
            allow_disk=True,
            socket=Path("/run/ems.sock"),
            socket_mode=0o666,
            tenants=tmp_path / "tenants.json",
            size=8 * GIB,
            segment_size=134217728,
            high_watermark=0.9,
            eviction_ratio=1.0,
            policy="lru",
            http_host="::1",
            http_port=0,
            http_token_file=tmp_path / "token",
            prefault=False,
            verify="always",
            tiers=("dir:/var/cache/ems",),
        )
    ]


def test_a_relative_tier_is_taken_from_the_files_folder_or_the_current_one(
    started: list[NodeConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "of the file").mkdir()
    file = tmp_path / "of the file" / "node.toml"
    file.write_text('tier = ["dir:below?key=secret&size=1GB"]')
    monkeypatch.chdir(tmp_path)
    assert run(["node", "--config", str(file)]) == 0
    assert run(["node", "--tier", "dir:below", "--config", "/dev/null"]) == 0
    first, second = (parse_tier(config.tiers[0]) for config in started)
    assert (first.place, first.key, first.size) == (str(file.parent / "below"), file.parent / "secret", GIB)
    assert second.place == str(tmp_path / "below")
    monkeypatch.chdir("/")
    assert parse_tier(started[1].tiers[0]) == second


def test_flags_go_before_variables_and_these_before_the_file(
    started: list[NodeConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "node.toml"
    file.write_text('size = "1GB"\ndir = "pool"\npolicy = "lru"\nhttp = false\n')
    monkeypatch.setenv("EMS_POOL_SIZE", "2GB")
    monkeypatch.setenv("EMS_DIR", "")
    assert run(["node", "--config", str(file), "--policy", "arc", "--http"]) == 0
    assert run(["node", "--config", str(file), "--size", "3GB"]) == 0
    first, second = started
    assert (first.size, first.policy, first.http_port) == (2 * GIB, "arc", NodeConfig().http_port)
    assert (second.size, second.policy, second.http_port) == (3 * GIB, "lru", None)
    assert first.socket == tmp_path / "pool" / "node.sock"


def test_the_file_of_the_system_is_read_where_no_other_is_named(
    started: list[NodeConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    system, other = tmp_path / "system.toml", tmp_path / "other.toml"
    system.write_text('policy = "lru"\n')
    other.write_text("")
    monkeypatch.setattr(verb, "SYSTEM_FILE", system)
    assert run(["node"]) == run(["node", "--config", str(other)]) == run(["node", "--autostarted"]) == 0
    assert [config.policy for config in started] == ["lru", "forecast", "forecast"]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("sise = 1", "{} has the unknown key 'sise', did you mean size?"),
        ("fresh = true", "{} has the unknown key 'fresh', expected one of dir, allow-disk,"),
        ("[node]\nsize = 1", "{} has the unknown key 'node'"),
        ('size = "lots"', "{}, key size: size is 'lots', expected a number above 0"),
        ("size = true", "{}, key size: True is given, expected a size such as"),
        ("size = 5.5", "{}, key size: 5.5 is given, expected a size"),
        ('http-port = "x"', "{}, key http-port: 'x' is given, expected a whole number"),
        ("http-port = 70000", "{}, key http-port: HTTP port is 70000, expected 0 to 65535"),
        ("high-watermark = 3", "{}, key high-watermark: high watermark is 3.0, expected a share"),
        ("socket-mode = 666", "{}, key socket-mode: 666 is given, expected a text in quotes"),
        ('socket-mode = "rw"', "{}, key socket-mode: socket mode is 'rw', expected an octal mode"),
        ('socket-mode = "666"', "{}: socket mode 666 opens the node to other users"),
        ('policy = "mru"', "{}, key policy: eviction policy is 'mru', expected one of"),
        ('verify = "maybe"', "{}, key verify: verify is 'maybe', expected always, sampled or never"),
        ('http = "no"', "{}, key http: 'no' is given, expected true or false"),
        ('tier = "dir:/x"', "{}, key tier: 'dir:/x' is given, expected a list of texts"),
        ("tier = [1]", "{}, key tier: [1] is given, expected a list of texts"),
        ('tier = ["tape:/x"]', "{}, key tier: "),
        ('size = "1MB"\nsegment-size = "2MB"', "{}: segment size 2.0 MiB is larger than the pool"),
        ("size = ", "{} is no TOML (Invalid value (at end of document)), expected lines such as"),
        ("\xff", "{} is no TOML ("),
    ],
)
def test_a_mistake_is_one_sentence_with_file_and_key(
    text: str, sentence: str, started: list[NodeConfig], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "node.toml"
    file.write_text(text, encoding="latin-1")
    assert run(["node", "--config", str(file)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {sentence.format(file)}")
    assert not started


def test_a_file_that_is_not_there(started: list[NodeConfig], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["node", "--config", "/nonexistent/node.toml"]) == 2
    sentence = "cannot read /nonexistent/node.toml (No such file or directory), give another file with --config"
    assert capsys.readouterr().err == f"error: {sentence}\n"


def test_every_flag_of_a_setting_is_a_key() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ems.cli", "node", "--help"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "COLUMNS": "200"},
    )
    named = {word.removeprefix("--") for word in done.stdout.split() if word.startswith("--")}
    others = {"config", "fresh", "no-allow-disk", "no-http", "no-prefault"}
    assert others < named
    assert {one.strip(".,") for one in named} - others == set(node_file._KEYS)


# What is asked before an upgrade


@pytest.mark.parametrize("wrong", ["a tier that is a file", "a tier that others may write", "a module that is broken"])
def test_a_release_that_could_not_start_says_so_when_it_is_asked(
    wrong: str, started: list[NodeConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "tier"
    if wrong == "a tier that is a file":
        place.write_text("something else")
    else:
        place.mkdir()
    if wrong == "a tier that others may write":
        place.chmod(0o777)
    command = ["node", "--check", "--dir", str(tmp_path / "pool"), "--tier", f"dir:{place}"]
    if wrong == "a module that is broken":
        monkeypatch.setenv("EMS_SEAL_KEY", str(tmp_path / "seal.key"))
        monkeypatch.setitem(sys.modules, "ems.pool.http.server", None)
        with pytest.raises(ImportError):
            run([*command, "--http-port", "0"])
    else:
        assert run([*command, "--no-http"]) != 0
    assert not started
    assert not (tmp_path / "pool").exists()


def test_what_a_tier_has_to_say_does_not_stand_in_the_answer(
    started: list[NodeConfig], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mooncake.json"
    file.write_text('{"master_server_address": "127.0.0.1:50088", "metadata_server": "P2PHANDSHAKE", "unknown": 1}')
    assert run(["node", "--check", "--dir", str(tmp_path / "pool"), "--tier", f"mooncake:{file}", "--no-http"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["release"]
    assert "unknown" in said.err
    assert not started


def test_a_restart_keeps_size_and_segments_whatever_the_file_says(tmp_path: Path) -> None:
    kept = KeptOpen(1, 0, 1, None, str(tmp_path), str(tmp_path / "node.sock"), 128 << 20, False, 32 << 20)
    config = verb._as_it_was(NodeConfig(size=GIB, segment_size=256 << 20, fresh=True), kept)
    assert (config.size, config.segment_size, config.fresh) == (128 << 20, 32 << 20, False)


def test_a_restart_without_http_lets_go_of_its_socket() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        kept = KeptOpen(1, 0, 1, os.dup(listener.fileno()), "/pool", "/pool/node.sock", 1, draining=False)
    with verb._bound(NodeConfig(http_port=None), kept) as none:
        assert none is None
    assert kept.http is not None
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(kept.http)


def test_a_restart_whose_port_is_taken_goes_on_without_http() -> None:
    kept = KeptOpen(1, 0, 1, None, "/pool", "/pool/node.sock", 1, draining=False)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = NodeConfig(http_host="127.0.0.1", http_port=taken.getsockname()[1])
        with verb._bound(config, kept) as none:
            assert none is None
