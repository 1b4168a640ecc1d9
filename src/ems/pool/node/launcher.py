"""Starts a node on this host when none runs: one node, however many engines ask at the same moment.

The node is a process of its own that outlives whoever started it.  A lock on the node's folder serialises the
starters; the losers find the winner's node listening.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING

from ems.config import default_directory
from ems.errors import ConfigError, PoolUnavailable
from ems.pool.processes import foreign_owner, process_lives, stranger
from ems.pool.segments.folder import LOG_BEGINS, LOG_NAME, refuse_disk, starting
from ems.pool.tiers.settings import absolute_tier

if TYPE_CHECKING:
    from collections.abc import Callable

    from ems.config import NodeConfig

START_SECONDS = 15.0
"""How long a new node may take to listen; it needs a fraction of a second unless the machine is very busy."""
_POLL_SECONDS = 0.02
_LOG_BYTES = 64 << 10


def node_listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True


def ensure_node(config: NodeConfig, timeout: float = START_SECONDS) -> bool:
    """Return once a node listens on ``config.socket``; True when this call started it.

    One that it did not start may be anybody's: whoever connects to it finds out (:mod:`ems.pool.client.introduction`).

    Raises ConfigError: the node cannot start with these settings (its own sentence is in the message).
    PoolUnavailable: it did not listen within ``timeout`` seconds.  Unauthorised: nobody listens there, and the place is
    somebody else's.
    """
    deadline = time.monotonic() + timeout
    while not node_listens(config.socket):
        owner = foreign_owner(config.socket)
        if owner is not None:
            raise stranger(config.socket, owner)
        _refuse_other_folder(config)
        if not config.allow_disk:
            refuse_disk(config.directory)
        with starting(config.directory) as mine:
            # Another one may have started it since; a node that stops may take its folder along.
            if mine and not node_listens(config.socket) and _start(config, deadline):
                return True
        if time.monotonic() >= deadline:
            raise PoolUnavailable(f"no pool node listened on {config.socket} within {timeout:.0f} s")
        time.sleep(_POLL_SECONDS)  # bounded by the deadline of this loop
    return False


def _refuse_other_folder(config: NodeConfig) -> None:
    """A socket that was named alone is that of a node with a folder of its own, whose pages another would hide."""
    named = "EMS_DIR" in os.environ or config.directory != default_directory()
    if not named and config.socket.absolute().parent != config.directory:
        raise PoolUnavailable(
            f"no pool node listens on {config.socket}, and which folder it is to have is not known: start it with "
            "'ems node', or name its folder by EMS_DIR"
        )


_DETACH = '"$@" </dev/null >&2 & echo $!'
"""Starts a command in the background and says its process id.

The shell in between ends at once, so the node is nobody's child: engines kill all their descendants when
they stop, and a node must outlive them.
"""


def _start(config: NodeConfig, deadline: float) -> bool:
    """Start a node and wait until it listens; False, with nothing started, when the folder vanished."""
    path = config.directory.absolute() / LOG_NAME
    try:
        # Open for as long as it takes: a node that leaves, or that cannot start, takes the file along.
        log = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600), "r+b", buffering=0)
    except FileNotFoundError:
        return False
    with log:
        begin = os.fstat(log.fileno()).st_size
        if not begin:
            begin = log.write(LOG_BEGINS)
        pid = _detach([sys.executable, "-m", "ems.cli", *_flags(config)], log)
        try:
            _wait_until_it_listens(config, pid, deadline, lambda: _last_words(log, begin))
        except BaseException:
            # Nobody else has it yet: a node that nobody waits for any more must not stay.
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
            raise
    return True


def _wait_until_it_listens(config: NodeConfig, pid: int, deadline: float, last_words: Callable[[], str]) -> None:
    while not node_listens(config.socket):
        if not process_lives(pid):
            raise ConfigError(f"the pool node could not start: {last_words()}")
        if time.monotonic() >= deadline:
            os.kill(pid, signal.SIGKILL)
            log = config.directory / LOG_NAME
            raise PoolUnavailable(f"the pool node did not listen on {config.socket} in time, see {log}")
        time.sleep(_POLL_SECONDS)  # bounded by the deadline of this loop


def _detach(command: list[str], log: IO[bytes]) -> int:
    shell = subprocess.run(
        ["/bin/sh", "-c", _DETACH, "sh", *command],
        stdout=subprocess.PIPE,
        stderr=log,
        start_new_session=True,
        cwd="/",
        check=True,
    )
    return int(shell.stdout)


def _last_words(log: IO[bytes], begin: int) -> str:
    lines = os.pread(log.fileno(), _LOG_BYTES, begin).decode(errors="replace").strip().splitlines()
    return lines[-1].removeprefix("error: ") if lines else "it ended without a word"


def _flags(config: NodeConfig) -> list[str]:
    # The node runs in another folder than the one who starts it.
    directory, socket_path = config.directory.absolute(), config.socket.absolute()
    flags = ["node", "--dir", str(directory), "--socket", str(socket_path), "--autostarted"]
    flags += ["--high-watermark", str(config.high_watermark), "--eviction-ratio", str(config.eviction_ratio)]
    flags += ["--verify", config.verify]
    sizes = {"--size": config.size, "--segment-size": config.segment_size}
    flags += [word for flag, size in sizes.items() if size for word in (flag, str(size))]
    if config.http_port is None:
        flags.append("--no-http")
    else:
        flags += ["--http-host", config.http_host, "--http-port", str(config.http_port)]
    switches = {"--fresh": config.fresh, "--allow-disk": config.allow_disk, "--no-prefault": not config.prefault}
    flags += [flag for flag, given in switches.items() if given]
    for tier in config.tiers or os.environ.get("EMS_TIER", "").split():
        flags += ["--tier", absolute_tier(tier, Path())]
    return flags
