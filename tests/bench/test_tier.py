"""The tier's benchmark measures both sides, leaves nothing behind, and refuses what it cannot measure."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ems.cli import run


def test_it_measures_and_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench", "tier", f"dir:{tmp_path}", "--total", "1MB", "--page", "64KB", "--rounds", "2", "-o", "json"]
    assert run(command) == 0
    (row,) = json.loads(capsys.readouterr().out)["items"]
    assert row["page_bytes"] == 65536
    assert all(row[name] > 0 for name in ("plain_write", "tier_write", "plain_read", "tier_read"))
    assert not list(tmp_path.iterdir())


def test_a_folder_that_was_not_there_is_gone_again(tmp_path: Path) -> None:
    place = tmp_path / "new"
    assert run(["bench", "tier", f"dir:{place}", "--total", "256KB", "--page", "64KB", "--rounds", "1"]) == 0
    assert not place.exists()


def test_it_shows_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "tier", f"dir:{tmp_path}", "--total", "256KB", "--page", "64KB", "--rounds", "1"]) == 0
    assert "plain write" in capsys.readouterr().out


@pytest.mark.parametrize("flags", [["s3://bucket"], ["dir:/tmp", "--rounds", "0"], ["dir:/tmp", "--total", "1KB"]])
def test_a_mistake_is_one_line(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "tier", *flags]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
