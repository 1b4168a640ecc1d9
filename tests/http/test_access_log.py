from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import pytest

from ems.errors import ConfigError
from ems.http import access_log
from ems.http.access_log import AccessLog
from tests.router.fakes import until


async def test_lines_come_in_order_and_none_is_lost_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "access.log"
    log = AccessLog(str(path))
    for number in range(1000):
        log.add(b"%d\n" % number)
    log.close()

    assert path.read_bytes().split() == [b"%d" % number for number in range(1000)]
    assert path.stat().st_mode & 0o007 == 0


async def test_a_file_that_was_rotated_is_opened_anew(tmp_path: Path) -> None:
    path, old = tmp_path / "access.log", tmp_path / "access.log.1"
    log = AccessLog(str(path))
    log.add(b"one\n")
    await until(lambda: path.read_bytes() == b"one\n")
    path.rename(old)
    log.add(b"two\n")
    log.close()

    assert (old.read_bytes(), path.read_bytes()) == (b"one\n", b"two\n")


async def test_what_nobody_takes_is_dropped_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access_log, "MOST_LINES", 3)
    log = AccessLog(str(tmp_path / "access.log"))
    for _ in range(5):
        log.add(b"line\n")
    log.close()

    assert log.dropped == 2


def test_a_file_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Cannot write the access log"):
        AccessLog(str(tmp_path))


async def test_what_several_processes_write_stays_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A short line that is one write goes into a pipe or a socket as a whole; files take any write as a whole."""
    pipe, file = tmp_path / "pipe", tmp_path / "file"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    ours, journal = socket.socketpair()
    monkeypatch.setattr(sys, "stdout", ours)
    written: list[bytes] = []
    write = os.write

    def writes(descriptor: int, data: bytes) -> int:
        written.append(bytes(data))
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", writes)
    for output in (str(pipe), "stdout", str(file)):
        log = AccessLog(output, shared=True)
        for line in (b"one\n", b"two\n"):
            log.add(line)
        log.close()

    assert written == [b"one\n", b"two\n"] * 2 + [b"one\ntwo\n"]
    assert file.read_bytes() == b"one\ntwo\n"
    os.close(reader)
    ours.close()
    journal.close()
