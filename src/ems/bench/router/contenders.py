"""Which routers are measured, and how each is started: as users start it, by its command line."""

from __future__ import annotations

import asyncio
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Final, Self

import msgspec
import psutil

from ems.bench.router.load import LoadFailed, connect, request_of
from ems.errors import ConfigError

START_SECONDS: Final = 60.0
_STOP_SECONDS = 10.0
_VLLM_ROUTER = (
    "--host 127.0.0.1 --port {port} --vllm-pd-disaggregation --kv-connector nixl --prefill http://127.0.0.1:{prefill} "
    "--decode http://127.0.0.1:{decode} --policy round_robin --log-level error --prometheus-port {free}"
)
_EMS = (
    "-m ems.cli router --port {port} --prefiller-hosts 127.0.0.1 --prefiller-ports {prefill} "
    "--decoder-hosts 127.0.0.1 --decoder-ports {decode}"
)


class Contender(msgspec.Struct, frozen=True):
    """A router: its name, and its command with ``{port}``, ``{prefill}``, ``{decode}`` and ``{free}`` (ports)."""

    name: str
    command: tuple[str, ...]


def installed() -> list[Contender]:
    """EMS's router, and ``vllm-router`` where it is installed."""
    found = [Contender("ems", (sys.executable, *_EMS.split()))]
    other = shutil.which("vllm-router", path=str(Path(sys.executable).parent)) or shutil.which("vllm-router")
    if other is not None:
        found.append(Contender("vllm-router", (other, *_VLLM_ROUTER.split())))
    return found


def parse_command(text: str) -> Contender:
    """Read ``NAME=COMMAND``.

    :raises ConfigError: no name, or no place for the port to listen on.
    """
    name, equals, command = text.partition("=")
    if not equals or not name.strip() or "{port}" not in command:
        raise ConfigError(
            f"--proxy-command {text!r} is not NAME=COMMAND, expected {{port}}, {{prefill}}, {{decode}} in it"
        )
    return Contender(name.strip(), tuple(shlex.split(command)))


class Running:
    """A router that runs for the time of a ``with``; its figures count its child processes too."""

    def __init__(self, contender: Contender, prefill: int, decode: int) -> None:
        self.name = contender.name
        self.port = free_port()
        ports = {"port": self.port, "prefill": prefill, "decode": decode, "free": free_port()}
        self._command = [part.format_map(ports) for part in contender.command]
        self._said: IO[bytes]
        self._process: subprocess.Popen[bytes]

    def __enter__(self) -> Self:
        self._said = TemporaryFile()
        try:
            self._process = subprocess.Popen(self._command, stdout=self._said, stderr=subprocess.STDOUT)
        except OSError as error:
            self._said.close()
            raise ConfigError(f"cannot start {self._command[0]} for {self.name}: {error.strerror}") from error
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._said.close()

    async def ready(self) -> None:
        """Wait until it answers a request.

        :raises ConfigError: it ended, or gives no answer for :data:`START_SECONDS` seconds.
        """
        reason = "it takes no connection"
        try:
            async with asyncio.timeout(START_SECONDS):
                while self._process.poll() is None:
                    try:
                        client = await connect(self.port)
                        await client.ask(request_of())
                        client.close()
                    except (LoadFailed, OSError) as error:
                        reason = str(error)
                        await asyncio.sleep(0.2)
                    else:
                        return
        except TimeoutError:
            pass
        self._said.seek(0)
        said = self._said.read()[-2000:].decode(errors="replace").strip()
        raise ConfigError(f"{self.name} does not serve ({reason}), it said: {said or 'nothing'}")

    def cpu(self) -> float:
        """Seconds of user and system time so far."""
        return sum(one.cpu_times().user + one.cpu_times().system for one in self._everyone())

    def memory(self) -> int:
        """Resident bytes."""
        return sum(one.memory_info().rss for one in self._everyone())

    def _everyone(self) -> list[psutil.Process]:
        process = psutil.Process(self._process.pid)
        return [process, *process.children(recursive=True)]


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port
