"""Starts a node on this host when none runs: one node, however many engines ask at the same moment.

The node is a process of its own that outlives whoever started it.  A lock file serialises the starters; the
losers find the winner's node listening.
"""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ems.errors import ConfigError, PoolUnavailable
from ems.pool.processes import process_lives

if TYPE_CHECKING:
    from ems.config import NodeConfig

START_SECONDS = 15.0
"""How long a new node may take to listen; it needs a fraction of a second unless the machine is very busy."""
_POLL_SECONDS = 0.02


def node_listens(path: Path) -> bool:
    """Whether something accepts connections on the socket ``path``."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True


def ensure_node(config: NodeConfig, timeout: float = START_SECONDS) -> bool:
    """Return once a node listens on ``config.socket``; True when this call started it.

    Raises:
        ConfigError: the node cannot start with these settings (its own sentence is in the message).
        PoolUnavailable: it did not listen within ``timeout`` seconds.
    """
    if node_listens(config.socket):
        return False
    try:
        config.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(config.directory / "start.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"cannot use {config.directory} for a pool node: {error.strerror}") from error
    deadline = time.monotonic() + timeout
    try:
        _lock_before(lock, deadline, config.directory)
        if node_listens(config.socket):
            return False
        _start(config, deadline)
        return True
    finally:
        os.close(lock)


def _lock_before(lock: int, deadline: float, directory: Path) -> None:
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise PoolUnavailable(f"another process has been starting a node in {directory} for too long") from None
            time.sleep(_POLL_SECONDS)
        else:
            return


_DETACH = 'log=$1; shift; "$@" </dev/null >>"$log" 2>&1 & echo $!'
"""Starts a command in the background and says its process id.

The shell in between ends at once, so the node is nobody's child: engines kill all their descendants when
they stop, and a node must outlive them.
"""


def _start(config: NodeConfig, deadline: float) -> None:
    log = config.directory / "node.log"
    log.touch(mode=0o600)
    begin = log.stat().st_size
    command = [sys.executable, "-m", "ems.cli", *_flags(config)]
    shell = subprocess.run(
        ["/bin/sh", "-c", _DETACH, "sh", str(log), *command],
        stdout=subprocess.PIPE,
        start_new_session=True,
        cwd="/",
        check=True,
    )
    pid = int(shell.stdout)
    while not node_listens(config.socket):
        if not process_lives(pid):
            said = log.read_bytes()[begin:].decode(errors="replace").strip().splitlines()
            reason = said[-1].removeprefix("error: ") if said else "it ended without a word"
            raise ConfigError(f"the pool node could not start: {reason}")
        if time.monotonic() >= deadline:
            os.kill(pid, signal.SIGKILL)
            raise PoolUnavailable(f"the pool node did not listen on {config.socket} in time, see {log}")
        time.sleep(_POLL_SECONDS)


def _flags(config: NodeConfig) -> list[str]:
    flags = ["node", "--dir", str(config.directory), "--socket", str(config.socket), "--autostarted"]
    flags += ["--high-watermark", str(config.high_watermark), "--eviction-ratio", str(config.eviction_ratio)]
    if config.size:
        flags += ["--size", str(config.size)]
    if config.segment_size:
        flags += ["--segment-size", str(config.segment_size)]
    if config.http_port is None:
        flags.append("--no-http")
    else:
        flags += ["--http-host", config.http_host, "--http-port", str(config.http_port)]
    return flags
