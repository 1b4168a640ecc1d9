from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from ems import files
from ems.errors import ConfigError
from ems.files import WatchedFile, WatchedFiles
from tests.router.fakes import until


async def test_a_defect_does_not_end_the_looking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "POLL_SECONDS", 0.001)
    path = tmp_path / "file"
    read: list[str] = []

    def load() -> None:
        read.append(path.read_text())
        raise ZeroDivisionError

    watched = WatchedFiles()
    watched.watch(path, load, loaded=True)
    looking = asyncio.create_task(watched.run())
    for text in ("1", "22"):
        path.write_text(text)
        await until(lambda text=text: text in read)  # type: ignore[misc]
    looking.cancel()


def test_secrets_that_others_may_read_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    path.write_bytes(b"{}")
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        files.read(path, what="the file of API keys", secret=True)
    path.chmod(0o600)

    assert files.read(path, what="the file of API keys", secret=True) == b"{}"


def test_what_cannot_be_read_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the key set"):
        files.read(tmp_path / "none", what="the key set")
    with pytest.raises(ConfigError, match="the key set"):
        files.read(tmp_path, what="the key set")


def test_a_file_is_read_again_when_it_changed_and_a_mistake_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "file"
    path.write_text("1")
    loaded: list[str] = []

    def load() -> None:
        loaded.append(path.read_text())
        if loaded[-1] == "wrong":
            raise ConfigError("it makes no sense")

    watched = WatchedFile(path, load)
    watched.look()
    assert not loaded
    path.write_text("22")
    watched.look()
    watched.look()
    path.write_text("wrong")
    with caplog.at_level(logging.INFO, "ems.files"):
        watched.look()
        watched.look()

    assert loaded == ["22", "wrong"]
    assert [record.message for record in caplog.records] == ["it makes no sense; what was read before still counts"]
