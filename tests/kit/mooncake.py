"""Mooncake's master, and the etcd by which several of them agree on who leads, as processes.

Masters of one etcd find their leader there, and clients name that etcd in place of a master.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.kit.process import ServerProcess, free_port


class Etcd(ServerProcess):
    """One etcd that lives in ``folder``, reached at ``address``."""

    def __init__(self, folder: Path, *, address: str = "127.0.0.1") -> None:
        port, peers = free_port(), free_port()
        self.endpoint = f"{address}:{port}"
        command = [
            "etcd",
            f"--data-dir={folder / 'etcd'}",
            f"--listen-client-urls=http://0.0.0.0:{port}",
            f"--advertise-client-urls=http://{address}:{port}",
            f"--listen-peer-urls=http://127.0.0.1:{peers}",
            f"--initial-advertise-peer-urls=http://127.0.0.1:{peers}",
            f"--initial-cluster=default=http://127.0.0.1:{peers}",
        ]
        super().__init__(command, name="etcd", port=port, log=folder / "etcd.log")


class MooncakeMaster(ServerProcess):
    """``mooncake_master`` that clients reach at ``address``; ``flags`` are further ones, as on a command line.

    With an ``etcd`` the first that starts leads and the others stand by; they keep a log of changes there, by which a
    new leader knows what the old one knew.
    """

    def __init__(
        self, folder: Path, *flags: str, address: str = "127.0.0.1", etcd: Etcd | None = None, name: str = "master"
    ) -> None:
        rpc_port, http_port = free_port(), free_port()
        self.endpoint = f"{address}:{rpc_port}" if etcd is None else f"etcd://{etcd.endpoint}"
        """What clients write as ``master_server_address``."""
        command = [
            sys.executable, "-m", "mooncake.cli",
            f"--rpc_address={address}", f"--rpc_port={rpc_port}", f"--metrics_port={http_port}", *flags,
        ]  # fmt: skip
        if etcd is not None:
            command += ["--enable_ha=true", f"--etcd_endpoints={etcd.endpoint}", "--enable_oplog=true"]
        super().__init__(command, name="mooncake_master", port=http_port, log=folder / f"{name}.log")
