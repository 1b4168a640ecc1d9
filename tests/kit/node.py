"""A real pool node in a folder of its own in shared memory, to be used, hurt and stopped."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ems.config import NodeConfig
from ems.pool.client.pool_client import PoolClient
from ems.pool.node.launcher import node_listens
from ems.pool.tenants.scram import Credentials
from tests.kit.prepared import PreparedProgram, start_node
from tests.kit.waiting import until

START_SECONDS = 180.0
"""How long a node may take to listen on a machine that has other things to do."""
STOP_SECONDS = 20.0
TOUCH_SECONDS = 60.0


class NodeProcess:
    """``ems node`` with ``flags``, without HTTP unless these name a port.

    Use it as a context manager: at the end the process is gone and so is its memory, whatever happened.
    """

    forked = False
    """Whether its process is forked, as tests have it: in a tenth of the time that the command takes to start."""

    def __init__(self, *flags: str, parent: Path = Path("/dev/shm")) -> None:
        self._home = Path(tempfile.mkdtemp(prefix="ems-test-", dir=parent))
        self._flags = flags
        self._process: subprocess.Popen[bytes] | PreparedProgram | None = None
        self.module = "ems.cli"
        """What is run; another one behaves like it, and does something besides."""
        self.environment: dict[str, str] = {}
        """Variables that the process gets beside those of this one, of which none of EMS's own."""
        self.directory = self._home / "pool"
        self.socket = self.directory / "node.sock"
        self.seconds_to_listen = 0.0
        """From the start of the process until its socket answered."""

    @property
    def config(self) -> NodeConfig:
        """The settings with which :func:`~ems.pool.node.launcher.ensure_node` finds this node, or starts it."""
        return NodeConfig(directory=self.directory, socket=self.socket, http_port=None)

    @property
    def pid(self) -> int:
        assert self._process is not None, "the node was not started"
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        assert self._process is not None, "the node was not started"
        return self._process.poll()

    @property
    def log(self) -> str:
        return (self._home / "log").read_text(errors="replace")

    def spawn(self) -> None:
        http = [] if any(flag.startswith("--http") for flag in self._flags) else ["--no-http"]
        flags = ["--dir", str(self.directory), *http, *self._flags]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("EMS_")}
        environment.update(self.environment)
        with (self._home / "log").open("ab") as log:
            if self.forked:
                self._process = start_node(*flags, output=log, environment=environment, module=self.module)
            else:
                command = [sys.executable, "-m", self.module, "node", *flags]
                self._process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)

    def start(self) -> None:
        """Start the process and return when its socket answers.

        Raises:
            AssertionError: it ended, or did not listen in time; its log is in the message.
        """
        begin = time.monotonic()
        self.spawn()
        until(lambda: node_listens(self.socket) or self.returncode is not None, "the node listens", START_SECONDS)
        self.seconds_to_listen = time.monotonic() - begin
        assert self.returncode is None, f"the node ended with status {self.returncode}: {self.log}"

    def client(self, name: str = "test", credentials: Credentials | None = None, **options: Any) -> PoolClient:
        return PoolClient(self.socket, name, credentials=credentials, **options)

    def figures(self) -> dict[str, Any]:
        """The node's figures, asked over a connection of their own."""
        client = PoolClient(self.socket, "test figures", administers=True)
        try:
            return client.stats(timeout=START_SECONDS)
        finally:
            client.close()

    def wait_touched(self) -> None:
        """Wait until all of the pool's memory was touched, so that no page is refused for that reason."""

        def touched() -> bool:
            figures = self.figures()
            return bool(figures["bytes_touched"] == figures["bytes_total"])

        until(touched, "all memory was touched", TOUCH_SECONDS)

    def send(self, number: signal.Signals) -> None:
        assert self._process is not None, "the node was not started"
        self._process.send_signal(number)

    def upgrade(self) -> None:
        """Let the node restart in its own process, and return when it is back."""
        before = self.figures()["node"]
        self.send(signal.SIGHUP)
        until(lambda: self.figures()["node"] != before, "the node has restarted", 2 * START_SECONDS)

    def stop(self) -> int:
        self.send(signal.SIGTERM)
        return self.wait()

    def kill(self) -> None:
        """End the node at once, as a crash would."""
        self.send(signal.SIGKILL)
        self.wait()

    def wait(self) -> int:
        assert self._process is not None, "the node was not started"
        return self._process.wait(STOP_SECONDS)

    def close(self) -> None:
        """End the node, if it runs, and remove what is left of it."""
        if self._process is not None and self.returncode is None:
            self.send(signal.SIGCONT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.stop()
            if self.returncode is None:
                self.kill()
        shutil.rmtree(self._home, ignore_errors=True)

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
