"""Programs that are forked: they are what the command would be, and leave as little behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from ems.pool.processes import process_lives
from tests.e2e.engines import wait_for
from tests.kit.hosts import Namespace
from tests.kit.prepared import Parent, PreparedProgram

pytestmark = pytest.mark.process

PROGRAM = """
import json, multiprocessing, os, sys

def child(pipe):
    pipe.send(["a program of its own" in globals(), os.environ["EMS_WORD"], os.getsid(0)])

if __name__ == "__main__":
    globals()["a program of its own"] = True
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=child, args=(theirs,))
    process.start()
    seen = {"arguments": sys.argv[1:], "folder": os.getcwd(), "session": os.getsid(0), "child": ours.recv()}
    seen["network"] = os.stat("/proc/self/ns/net").st_ino
    process.join()
    print(json.dumps(seen))
    sys.exit(3)
"""

WAITS = """
import subprocess, sys
print(subprocess.Popen(["sleep", "600"]).pid, flush=True)
sys.stdin.read() or __import__("signal").pause()
"""


@pytest.fixture(scope="module")
def parent() -> Iterator[Parent]:
    parent = Parent(["json"], os.environ)
    yield parent
    parent.close()


@pytest.fixture
def start(
    parent: Parent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., tuple[PreparedProgram, Path]]]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "waits.py").write_text(WAITS)
    started: list[PreparedProgram] = []

    def start(module: str, *arguments: str) -> tuple[PreparedProgram, Path]:
        log = tmp_path / f"{len(started)}.log"
        with log.open("wb") as output:
            environment = {**os.environ, "EMS_WORD": "said"}
            program = PreparedProgram(module, arguments, output=output, environment=environment, parent=parent)
        started.append(program)
        return program, log

    yield start
    for program in started:
        program.terminate()
        program.wait(60)


def seen_by(program: PreparedProgram, log: Path) -> dict[str, Any]:
    assert program.wait(60) == 3, log.read_text()
    return dict(json.loads(log.read_text()))


def test_it_is_what_the_command_would_be(start: Callable[..., tuple[PreparedProgram, Path]], tmp_path: Path) -> None:
    program, log = start("program", "--flag", "value")

    seen = seen_by(program, log)

    assert seen["arguments"] == ["--flag", "value"]
    assert seen["folder"] == str(tmp_path)
    assert seen["session"] == program.pid
    assert seen["child"] == [True, "said", program.pid], "its children are forks, too"
    assert program.poll() == program.returncode == 3


def test_it_has_the_network_of_who_starts_it(start: Callable[..., tuple[PreparedProgram, Path]]) -> None:
    here, _ = start("program"), None
    assert seen_by(*here)["network"] == Path("/proc/self/ns/net").stat().st_ino
    other = Namespace()
    try:
        with other.entered():
            inode = Path("/proc/thread-self/ns/net").stat().st_ino
            there = start("program")
        assert seen_by(*there)["network"] == inode
    finally:
        other.close()


def test_who_waits_is_told_of_its_end(start: Callable[..., tuple[PreparedProgram, Path]]) -> None:
    program, log = start("waits")
    other, _ = start("waits")
    wait_for(lambda: bool(log.read_text()), "the program runs")
    with pytest.raises(subprocess.TimeoutExpired):
        program.wait(0.01)
    assert program.poll() is None

    program.terminate()

    assert program.wait(60) == -signal.SIGTERM
    assert other.poll() is None
    os.kill(int(log.read_text()), signal.SIGKILL)  # what has its session is ended by servers


def test_what_only_a_process_that_starts_anew_reads_is_refused(parent: Parent, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    with (tmp_path / "log").open("wb") as output, pytest.raises(ValueError, match="PYTHONHASHSEED means something"):
        PreparedProgram("json.tool", [], output=output, environment=environment, parent=parent)


def test_it_ends_with_who_started_it(tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text(WAITS)
    text = f"""
import os, signal, sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from tests.kit.prepared import Parent, PreparedProgram
with open("log", "wb") as output:
    parent = Parent([], os.environ)
    program = PreparedProgram("waits", [], output=output, environment=os.environ, parent=parent)
print(program.pid, flush=True)
signal.pause()
"""
    with subprocess.Popen([sys.executable, "-c", text], cwd=tmp_path, stdout=subprocess.PIPE) as starter:
        try:
            assert starter.stdout is not None
            program = psutil.Process(int(starter.stdout.readline()))
            wait_for(lambda: bool((tmp_path / "log").read_text()), "the program runs")
        finally:
            starter.kill()
        wait_for(lambda: not process_lives(program.pid), "the program has ended")
    os.kill(int((tmp_path / "log").read_text()), signal.SIGKILL)
