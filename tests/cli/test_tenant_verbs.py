"""``ems tenant`` and ``ems key``: on a file alone, and on a node that obeys."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ems.cli import run
from ems.errors import PoolUnavailable, Unauthorised
from ems.pool.client.answers import Namespace
from ems.pool.client.pool_client import PoolClient
from ems.pool.tenants import store
from ems.pool.tenants.registry import MAX_KEYS
from ems.pool.tenants.scram import Credentials
from tests.kit.audit_log import acts_in
from tests.kit.node import NodeProcess

SPACE = Namespace("model", 4096)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "conf" / "tenants.json"
    monkeypatch.setenv("EMS_TENANTS", str(file))
    monkeypatch.setenv("EMS_SOCKET", str(tmp_path / "nobody.sock"))
    return file


def said(capsys: pytest.CaptureFixture[str], *tokens: str, status: int = 0) -> tuple[str, str]:
    assert run(tokens) == status
    captured = capsys.readouterr()
    return captured.out, captured.err


def told(capsys: pytest.CaptureFixture[str], *tokens: str) -> Any:
    return json.loads(said(capsys, *tokens, "-o", "json")[0])


def test_a_key_is_shown_once_and_stored_nowhere(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, err = said(capsys, "tenant", "add", "ann", "--cap", "50%")
    assert out == ""
    assert "tenant ann added" in err
    assert "no node runs on" in err
    out, err = said(capsys, "key", "add", "ann")
    (key,) = out.splitlines()
    assert len(key) > 40
    assert key not in err
    everything = b"".join(file.read_bytes() for file in path.parent.iterdir())
    assert key.encode() not in everything
    assert {stat.S_IMODE(file.stat().st_mode) for file in path.parent.iterdir()} == {0o600}


@pytest.mark.parametrize("verb", ["add", "rotate"])
def test_a_key_can_go_into_a_file_that_nobody_else_reads(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    said(capsys, "tenant", "add", "ann")
    out = tmp_path / "ann.key"
    shown, err = said(capsys, "key", verb, "ann", "--out", str(out))
    key = out.read_text().strip()
    assert (len(key) > 40, shown, key in err) == (True, "", False)
    assert stat.S_IMODE(out.stat().st_mode) == 0o600
    before = path.read_bytes()
    for taken in (out, tmp_path / "no" / "folder"):
        assert "give a new file" in said(capsys, "key", verb, "ann", "--out", str(taken), status=2)[1]
    assert (path.read_bytes(), out.read_text().strip()) == (before, key), "nothing was made or written"
    assert "access_key" not in told(capsys, "key", verb, "ann", "--out", str(tmp_path / "other"))


@pytest.mark.parametrize(("mode", "warned"), [(0o644, True), (0o600, False)])
def test_a_key_in_a_file_that_others_can_read_is_warned_of(
    path: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], mode: int, warned: bool
) -> None:
    assert run(["tenant", "add", "ann"]) == 0
    file = tmp_path / "ann.key"
    with file.open("w") as opened:
        file.chmod(mode)
        command = [sys.executable, "-m", "ems.cli", "key", "add", "ann"]
        done = subprocess.run(command, stdout=opened, stderr=subprocess.PIPE, text=True, check=True)
    assert ("warning: others can read the file with the key (mode 644)" in done.stderr) is warned


def test_what_is_there_is_listed(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said(capsys, "tenant", "add", "ann", "--minimum", "1GB", "--cap", "50%")
    made = told(capsys, "key", "add", "ann", "--ttl", "1d")
    assert told(capsys, "tenant", "list") == {
        "items": [{"tenant": "ann", "minimum": "1GB", "cap": "50%", "keys": 1, "bytes": None}]
    }
    (key,) = told(capsys, "key", "list", "ann")["items"]
    assert (key["key"], key["valid"]) == (made["key"], True)
    assert key["expires"] == made["expires"] > key["created"]
    shown = told(capsys, "tenant", "show", "ann")
    assert (shown["minimum"], shown["cap"], len(shown["keys"])) == ("1GB", "50%", 1)
    for verb in (["tenant", "list"], ["tenant", "show", "ann"], ["key", "list", "ann"]):
        assert "ann" in said(capsys, *verb)[0] or made["key"] in said(capsys, *verb)[0]


def test_one_key_too_many_is_refused_with_the_number_of_those_that_are_there(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said(capsys, "tenant", "add", "ann")
    for _ in range(MAX_KEYS):
        said(capsys, "key", "add", "ann")
    assert f"has {MAX_KEYS} keys, which is the most" in said(capsys, "key", "add", "ann", status=2)[1]


def test_a_dry_run_checks_and_changes_nothing(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "were this not a dry run" in said(capsys, "tenant", "add", "ann", "--dry-run")[1]
    assert not path.exists()
    said(capsys, "tenant", "add", "ann")
    before = path.read_bytes()
    for verb in (
        ["tenant", "set", "ann", "--cap", "10%"],
        ["tenant", "remove", "ann"],
        ["key", "add", "ann"],
        ["key", "rotate", "ann"],
        ["key", "revoke", "ann", "all"],
    ):
        out, _ = said(capsys, *verb, "--dry-run")
        assert out == ""
        assert told(capsys, *verb, "--dry-run")["dry_run"] is True
    assert path.read_bytes() == before
    said(capsys, "tenant", "remove", "bob", "--dry-run", status=2)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (["tenant", "add", "a/b"], "a tenant is called 'a/b'"),
        (["tenant", "add", "ann"], "there is a tenant 'ann' already"),
        (["tenant", "add", "bob", "--cap", "much"], "cap is 'much'"),
        (["tenant", "add", "bob", "--minimum", "20GB", "--cap", "10GB"], "minimum is 20GB, expected at most the cap"),
        (["tenant", "set", "ann"], "give --minimum or --cap"),
        (["tenant", "set", "bob", "--cap", "1GB"], "there is no tenant 'bob'"),
        (["key", "add", "bob"], "there is no tenant 'bob'"),
        (["key", "add", "ann", "--ttl", "soon"], "--ttl is 'soon'"),
        (["key", "revoke", "ann", "0123"], "tenant ann has no key '0123'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_sentence(
    path: Path, capsys: pytest.CaptureFixture[str], tokens: list[str], message: str
) -> None:
    said(capsys, "tenant", "add", "ann")
    _, err = said(capsys, *tokens, status=2)
    assert message in err
    assert len(err.splitlines()) == 1


def test_without_a_file_the_verbs_say_how_to_make_one(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, err = said(capsys, "key", "add", "ann", status=2)
    assert "make one with 'ems tenant add NAME" in err


def test_a_file_in_memory_or_open_to_others_is_refused(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, err = said(capsys, "tenant", "add", "ann", "--tenants", "/dev/shm/tenants.json", status=2)
    assert "gone with the next start of this host" in err
    said(capsys, "tenant", "add", "ann")
    path.chmod(0o644)
    _, err = said(capsys, "tenant", "list", status=2)
    assert "make it private with 'chmod 600" in err


def test_every_change_is_in_the_audit_log_without_a_secret(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said(capsys, "tenant", "add", "ann")
    key = said(capsys, "key", "add", "ann")[0].strip()
    said(capsys, "key", "revoke", "ann", "0123", status=2)
    said(capsys, "tenant", "set", "ann", "--cap", "10%")
    said(capsys, "tenant", "remove", "ann", "--dry-run")
    log = path.parent / "audit.jsonl"
    acts = [(act.verb, act.result.partition(":")[0]) for act in acts_in(log)]
    assert acts == [("tenant add", "done"), ("key add", "done"), ("key revoke", "refused"), ("tenant set", "done")]
    assert key not in log.read_text()


@pytest.mark.process
def test_a_running_node_obeys_before_the_verb_returns(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said(capsys, "tenant", "add", "ann")
    key = said(capsys, "key", "add", "ann")[0].strip()
    with NodeProcess("--size", "1MB", "--segment-size", "256KB", "--tenants", str(path)) as node:
        client = node.client("test", Credentials("ann", key))
        at = ["--socket", str(node.socket)]
        try:
            assert client.lookup(SPACE, bytes(16)).count == 0
            made = told(capsys, "key", "rotate", "ann", "--overlap", "1h", *at)
            new = node.client("new", Credentials("ann", made["access_key"]))
            assert new.lookup(SPACE, bytes(16)).count == 0
            new.close()
            (old,) = [one["key"] for one in told(capsys, "key", "list", "ann")["items"] if one["key"] != made["key"]]
            _, err = said(capsys, "key", "revoke", "ann", old, *at)
            assert f"the node on {node.socket} obeys" in err
            _, err = said(capsys, "tenant", "set", "ann", "--minimum", "1GB", *at)
            assert "obeys" not in err
            assert "keeps the quotas of before: the tenants' guaranteed minima come to" in err
            assert "ILL, the tenants' guaranteed minima" in said(capsys, "health", *at, status=1)[0]
            assert f"the node on {node.socket} obeys" in said(capsys, "tenant", "set", "ann", "--minimum", "0", *at)[1]
            with pytest.raises((Unauthorised, PoolUnavailable)):
                client.lookup(SPACE, bytes(16))
            with pytest.raises(Unauthorised):
                client.lookup(SPACE, bytes(16))
            assert told(capsys, "tenant", "list", *at)["items"][0]["bytes"] == 0
            status = told(capsys, "status", *at)
            assert status["tenants"]["revision"] == store.read(path).revision
        finally:
            client.close()


def test_a_node_that_reads_another_file_is_told_apart(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with NodeProcess("--size", "1MB") as node:
        _, err = said(capsys, "tenant", "add", "ann", "--socket", str(node.socket))
        assert f"does not read {path}, start it with 'ems node --tenants {path}'" in err


def test_a_tenant_cannot_measure_the_pool_and_is_told_so(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said(capsys, "tenant", "add", "ann")
    monkeypatch.setenv("ACCELERATE_ID", "ann")
    monkeypatch.setenv("ACCELERATE_KEY", said(capsys, "key", "add", "ann")[0].strip())
    with NodeProcess("--size", "1MB", "--segment-size", "256KB", "--tenants", str(path)) as node:
        _, err = said(capsys, "bench", "pool", "--socket", str(node.socket), status=1)
    assert "leave --socket out" in err


def test_another_user_than_the_nodes_is_told_who_looks_after_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refusing(PoolClient):
        def stats(self, timeout: float | None = None) -> Any:
            raise Unauthorised("give an access id and key")

    monkeypatch.setattr("ems.cli.acts.PoolClient", Refusing)
    (tmp_path / "node.sock").touch()
    _, err = said(capsys, "status", "--socket", str(tmp_path / "node.sock"), status=1)
    assert f"only its own user (number {os.getuid()}) looks after it" in err
    assert "access id" not in err
