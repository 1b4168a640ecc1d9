"""Who lives: also a process whose main thread has ended while another thread goes on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ems.pool.processes import process_lives
from tests.kit.waiting import until

WITHOUT_MAIN_THREAD = """
import ctypes, sys, threading
threading.Thread(target=lambda: (print("ready", flush=True), sys.stdin.read())).start()
ctypes.CDLL(None).pthread_exit(None)
"""


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_zombie_is_dead_and_so_is_who_never_was() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    until(lambda: state_of(process.pid) == "Z", "it ends")
    assert not process_lives(process.pid)
    process.wait()
    assert not process_lives(process.pid)
    assert not process_lives(2**22 + 1)


@pytest.mark.parametrize("pid", [0, -1])
def test_what_cannot_be_seen_is_taken_to_live(pid: int) -> None:
    assert process_lives(pid)


def test_a_process_lives_as_long_as_one_of_its_threads() -> None:
    command = [sys.executable, "-c", WITHOUT_MAIN_THREAD]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        until(lambda: state_of(process.pid) == "Z", "its main thread ends")
        assert process_lives(process.pid)
        process.kill()
        until(lambda: not process_lives(process.pid), "it ends")
