"""What is compared: engines without a pool, and engines behind each pool that is installed.

Each contender gets the same share of memory for its pool, its default behaviour otherwise, and a clean start: no
contender sees what another one stored.
"""

from __future__ import annotations

import http.client
import importlib.metadata
import json
import sys
import urllib.error
import urllib.request
from contextlib import ExitStack
from http import HTTPStatus
from pathlib import Path

import psutil

from tests.kit.mooncake import MooncakeMaster
from tests.kit.node import NodeProcess
from tests.kit.process import ServerProcess, free_port

INSTALL = "python benchmarks/peers.py --install"
LOAD_FAILURE = {"kv_role": "kv_both", "kv_load_failure_policy": "recompute"}


class Contender:
    """One pool: ``start`` brings up what engines need, then each engine is started with what it says here.

    This one is no pool, to compare with.
    """

    name = "no pool"
    distribution: str | None = None
    """What must be installed; None where nothing must."""
    pooled = False

    def __init__(self, folder: Path, pool_gib: int) -> None:
        self._folder = folder / self.name.lower().replace(" ", "-")
        self._folder.mkdir(parents=True, exist_ok=True)
        self._pool_gib = pool_gib

    @classmethod
    def version(cls) -> str | None:
        """The installed version; None when it is not installed."""
        if cls.distribution is None:
            return ""
        try:
            return importlib.metadata.version(cls.distribution)
        except importlib.metadata.PackageNotFoundError:
            return None

    def start(self, stack: ExitStack) -> None:
        """Start the pool; ``stack`` ends it."""

    def transfer_config(self) -> dict[str, object] | None:
        """What one writes after ``--kv-transfer-config``; asked once for each engine."""
        return None

    def environment(self) -> dict[str, str]:
        """What an engine needs in its environment."""
        return {}

    def processes(self) -> list[psutil.Process]:
        """The processes of the pool itself."""
        return []


class Ems(Contender):
    """The pool of this project: one node a host, engines copy to and from its shared memory."""

    name = "EMS"
    pooled = True

    _node: NodeProcess

    def start(self, stack: ExitStack) -> None:
        self._node = stack.enter_context(NodeProcess("--size", f"{self._pool_gib}GiB"))
        self._node.wait_touched()

    def transfer_config(self) -> dict[str, object]:
        return {"kv_connector": "EmsStoreConnector", **LOAD_FAILURE}

    def environment(self) -> dict[str, str]:
        return {"EMS_SOCKET": str(self._node.socket), "EMS_DIR": str(self._node.directory), "EMS_AUTOSTART": "0"}

    def processes(self) -> list[psutil.Process]:
        return [psutil.Process(self._node.pid)]


class Mooncake(Contender):
    """Mooncake Store: a master, and each engine gives a half of the memory; over TCP on a machine without RDMA."""

    name = "Mooncake"
    pooled = True
    distribution = "mooncake-transfer-engine-non-cuda"

    _master: MooncakeMaster

    def start(self, stack: ExitStack) -> None:
        self._master = stack.enter_context(MooncakeMaster(self._folder))
        settings = {
            "metadata_server": "P2PHANDSHAKE",
            "protocol": "tcp",
            "device_name": "",
            "master_server_address": self._master.endpoint,
            "global_segment_size": f"{self._pool_gib * 512}MB",
            "local_buffer_size": "512MB",
        }
        (self._folder / "mooncake.json").write_text(json.dumps(settings, indent=2) + "\n")

    def transfer_config(self) -> dict[str, object]:
        # Two engines with the same number would take each other's lookups.
        extra = {"lookup_rpc_port": free_port()}
        return {"kv_connector": "MooncakeStoreConnector", **LOAD_FAILURE, "kv_connector_extra_config": extra}

    def environment(self) -> dict[str, str]:
        return {"MOONCAKE_CONFIG_PATH": str(self._folder / "mooncake.json"), "MC_FORCE_TCP": "1"}

    def processes(self) -> list[psutil.Process]:
        return self._master.processes()


class LMCacheServer(ServerProcess):
    """``lmcache server``, whose health is asked for under another path."""

    def is_healthy(self) -> bool:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(f"{self.url}/healthcheck", timeout=2) as answer:
                return bool(answer.status == HTTPStatus.OK)
        except (urllib.error.URLError, OSError, http.client.HTTPException):
            return False


class LMCache(Contender):
    """LMCache in its multi-process mode: one server a host."""

    name = "LMCache"
    pooled = True
    distribution = "lmcache"

    _server: ServerProcess
    _port: int

    def start(self, stack: ExitStack) -> None:
        self._port, http_port = free_port(), free_port()
        command = [
            str(Path(sys.executable).with_name("lmcache")), "server",
            "--port", str(self._port), "--http-port", str(http_port),
            "--chunk-size", "128", "--l1-size-gb", str(self._pool_gib), "--no-l1-use-lazy",
            "--eviction-policy", "LRU", "--supported-transfer-mode", "auto", "--disable-metrics",
        ]  # fmt: skip
        environment = {"LMCACHE_DISABLE_BANNER": "1", "LMCACHE_TRACK_USAGE": "false"}
        log = self._folder / "server.log"
        server = LMCacheServer(command, name="lmcache server", port=http_port, log=log, environment=environment)
        self._server = stack.enter_context(server)

    def transfer_config(self) -> dict[str, object]:
        extra = {"lmcache.mp.host": "tcp://localhost", "lmcache.mp.port": self._port}
        return {"kv_connector": "LMCacheMPConnector", **LOAD_FAILURE, "kv_connector_extra_config": extra}

    def environment(self) -> dict[str, str]:
        return {"LMCACHE_TRACK_USAGE": "false"}

    def processes(self) -> list[psutil.Process]:
        return self._server.processes()


CONTENDERS: dict[str, type[Contender]] = {"none": Contender, "ems": Ems, "mooncake": Mooncake, "lmcache": LMCache}
