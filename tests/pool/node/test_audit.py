"""The audit log: complete, private, bounded, and whole when several write."""

from __future__ import annotations

import stat
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest

from ems.errors import ConfigError
from ems.pool.node.audit import Act, AuditLog
from tests.kit.audit_log import acts_in


def test_an_act_says_who_when_what_and_what_came_of_it(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "audit.jsonl")
    log.record(Act(verb="clear", what={"tenant": "ann"}, result="refused: no such tenant", uid=7, pid=8))
    (line,) = log.path.read_text().splitlines()
    said = msgspec.json.decode(line)
    assert abs(datetime.now(UTC) - datetime.fromisoformat(said["when"])) < timedelta(minutes=2)
    assert said == {
        "when": said["when"],
        "uid": 7,
        "pid": 8,
        "verb": "clear",
        "what": {"tenant": "ann"},
        "result": "refused: no such tenant",
    }


def test_nobody_else_can_read_it(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    path.touch(0o644)
    AuditLog(path).record(Act(verb="show"))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_it_stays_small_and_the_oldest_leave(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "audit.jsonl", max_bytes=1000, kept=2)
    for number in range(100):
        log.record(Act(verb="show", what={"number": number}))
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["audit.jsonl", "audit.jsonl.1", "audit.jsonl.2"]
    assert all(file.stat().st_size <= 1000 for file in files)
    kept = [act.what["number"] for file in reversed(files) for act in acts_in(file)]
    assert kept == list(range(100))[-len(kept) :]


def test_several_writers_lose_nothing_while_the_file_is_put_aside(tmp_path: Path) -> None:
    def write(name: str) -> None:
        log = AuditLog(tmp_path / "audit.jsonl", max_bytes=2000, kept=100)
        for number in range(30):
            log.record(Act(verb="show", what={"writer": name, "number": number}))

    threads = [threading.Thread(target=write, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    acts = [one for file in tmp_path.iterdir() for one in acts_in(file)]
    assert sorted(f"{one.what['writer']} {one.what['number']:02}" for one in acts) == [
        f"{name} {number:02}" for name in "abcd" for number in range(30)
    ]


def test_an_act_that_cannot_be_recorded_must_not_happen(tmp_path: Path) -> None:
    (tmp_path / "audit.jsonl").mkdir()
    with pytest.raises(ConfigError, match="cannot write the audit log"):
        AuditLog(tmp_path / "audit.jsonl").record(Act(verb="clear"))
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="cannot write the audit log"):
        AuditLog(tmp_path / "link").record(Act(verb="clear"))
