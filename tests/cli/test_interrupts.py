"""Ctrl-C and a reader that leaves, on real processes: an exit status, and nothing that looks like a defect."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.waiting import until

pytestmark = pytest.mark.process


@pytest.fixture
def silent_node(tmp_path: Path) -> Iterator[socket.socket]:
    """A socket that takes connections and never says a word."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "node.sock"))
        listener.listen()
        listener.settimeout(60)
        yield listener


def start(*arguments: str, **options: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "ems.cli", *arguments]
    return subprocess.Popen(command, text=True, stderr=subprocess.PIPE, **options)  # type: ignore[call-overload,no-any-return]


@pytest.mark.parametrize(
    "verb", ["status", "list", "health", "resize --cancel", "drain", "stop", "upgrade", "clear --all -y"]
)
def test_a_verb_that_waits_for_a_node_is_interrupted(verb: str, silent_node: socket.socket) -> None:
    process = start(*verb.split(), "--socket", silent_node.getsockname(), stdout=subprocess.PIPE)
    connection, _ = silent_node.accept()
    with connection:
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, "", "")


def test_a_benchmark_is_interrupted_and_leaves_nothing(tmp_path: Path) -> None:
    process = start("bench", "trace", "made:documents", "--requests", "100000", stdout=subprocess.PIPE)
    assert process.stderr is not None
    assert process.stderr.readline()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert "Traceback" not in err
    assert "Interrupt" not in err


def test_an_interrupt_while_modules_are_loaded_says_nothing(tmp_path: Path) -> None:
    """From the first line of ours on: a module that takes long to load stands for a slow disk."""
    (tmp_path / "cyclopts.py").write_text("import time\nopen('loading', 'w').close()\ntime.sleep(60)\n")
    path = os.pathsep.join([str(tmp_path), *sys.path])
    process = start("status", stdout=subprocess.PIPE, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path})
    until((tmp_path / "loading").exists, "a module is being loaded", 60)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, "", "")


@pytest.mark.parametrize(
    "arguments", [["--help"], ["completion", "bash"], ["bench", "trace", "made:loop", "--requests", "9"]]
)
def test_a_reader_that_leaves_hears_no_complaint(arguments: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    process = start(*arguments, stdout=writing)
    os.close(writing)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "Broken" not in err
    assert "Traceback" not in err


@pytest.mark.parametrize("arguments", ["--help", "completion bash", "doctor", "doctor -o json"])
def test_stdout_that_takes_nothing_is_one_sentence(arguments: str) -> None:
    with Path("/dev/full").open("w") as full:
        process = start(*arguments.split(), stdout=full)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (
        1,
        "error: cannot write (No space left on device), make room or send stdout elsewhere\n",
    )


def test_closed_streams_are_no_defect() -> None:
    command = [sys.executable, "-m", "ems.cli"]
    for closed in (">&-", "2>&-", ">&- 2>&-"):
        line = f"{shlex.join(command)} {{}} {closed}"
        done = [
            subprocess.run(["bash", "-c", line.format(verb)], capture_output=True, text=True, timeout=60, check=False)
            for verb in ("doctor", "completion tcsh")
        ]
        assert done[0].returncode in {0, 1}
        assert done[1].returncode == 2
        assert "Traceback" not in "".join(one.stdout + one.stderr for one in done)


def test_no_colour_where_none_is_wanted() -> None:
    environment = {**os.environ, "NO_COLOR": "1", "FORCE_COLOR": ""}
    process = start("--help", stdout=subprocess.PIPE, env=environment)
    out, err = process.communicate(timeout=60)
    assert "\x1b" not in out + err
