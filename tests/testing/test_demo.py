"""The demonstration: it shows what it says, and leaves nothing behind however it ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

DEMO = Path(__file__).parent.parent.parent / "examples" / "demo.py"
SHARED_MEMORY = Path("/dev/shm")


@pytest.fixture
def demo() -> Iterator[Callable[[], subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []

    def start() -> subprocess.Popen[str]:
        environment = {**os.environ, "COLUMNS": "120", "PYTHONUNBUFFERED": "1"}
        process = subprocess.Popen(
            [sys.executable, str(DEMO)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def descendants(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def nothing_is_left(pid: int, processes: list[psutil.Process]) -> bool:
    alive = [one for one in processes if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
    return not alive and not list(SHARED_MEMORY.glob(f"ems-demo-{pid}-*"))


@pytest.mark.e2e
@pytest.mark.timeout(1800)
def test_it_shows_what_it_says(demo: Callable[[], subprocess.Popen[str]]) -> None:
    process = demo()
    out, err = process.communicate()

    assert process.returncode == 0, out + err
    loaded = re.search(r"decode server: (\d+) of (\d+) prompt tokens came from the pool", out)
    assert loaded is not None
    assert int(loaded[1]) >= 0.7 * int(loaded[2]) > 0
    rows = re.findall(r"^([123])  .*? ([\d,]+) +[\d,]+ +([\d.,]+) +(\d+)/\d+ +(\d+) *$", out, re.MULTILINE)
    assert [(row[0], row[3], row[4]) for row in rows] == [("1", "12", "0"), ("2", "12", "0"), ("3", "12", "0")]
    assert rows[0][2] == "1.0"
    # Medians: a machine that stands still for seconds holds up a few of the requests.
    cold, *warm = (float(row[1].replace(",", "")) for row in rows)
    assert cold > min(warm)
    assert "no process, no shared memory, no port is left" in out
    assert nothing_is_left(process.pid, [])


@pytest.mark.e2e
@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["interrupt", "terminate"])
def test_a_signal_ends_all_of_it(demo: Callable[[], subprocess.Popen[str]], number: signal.Signals) -> None:
    process = demo()
    assert process.stdout is not None
    for line in process.stdout:
        if "starting a prefill server" in line:
            break
    processes = descendants(process.pid)
    assert processes
    process.send_signal(number)
    _, err = process.communicate()

    assert process.returncode == 130
    assert err.strip().endswith("interrupted, all is stopped")
    assert nothing_is_left(process.pid, processes)


def test_too_little_shared_memory() -> None:
    program = (
        "import runpy, shutil, collections, sys\n"
        "usage = collections.namedtuple('usage', 'total used free')\n"
        "shutil.disk_usage = lambda path: usage(64 << 20, 0, 64 << 20)\n"
        f"runpy.run_path({str(DEMO)!r}, run_name='__main__')\n"
    )
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)

    assert finished.returncode == 1
    assert finished.stderr.startswith("error: /dev/shm has 64 MiB free and the demonstration needs 576; free some")
    assert "Traceback" not in finished.stderr
