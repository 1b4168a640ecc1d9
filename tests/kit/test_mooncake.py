"""Masters come up, are killed, and a standby takes over."""

from __future__ import annotations

import urllib.request
from pathlib import Path

import pytest

from tests.kit.mooncake import Etcd, MooncakeMaster
from tests.kit.waiting import until

TAKEOVER_SECONDS = 60.0


@pytest.mark.process
def test_a_master_comes_up_and_is_killed(tmp_path: Path) -> None:
    with MooncakeMaster(tmp_path) as master:
        assert master.is_healthy()
        master.kill()
        assert not master.is_healthy()


def role(master: MooncakeMaster) -> str:
    with urllib.request.urlopen(f"{master.url}/role", timeout=5) as answer:  # noqa: S310 - a server of our own
        return bytes(answer.read()).decode()


@pytest.mark.process
def test_a_standby_takes_over(tmp_path: Path) -> None:
    with Etcd(tmp_path) as etcd, MooncakeMaster(tmp_path, etcd=etcd, name="first") as first:
        assert first.endpoint == f"etcd://{etcd.endpoint}"
        until(lambda: "leader" in role(first).lower(), "the first leads", TAKEOVER_SECONDS)
        with MooncakeMaster(tmp_path, etcd=etcd, name="second") as second:
            assert "leader" not in role(second).lower()
            first.kill()
            until(lambda: "leader" in role(second).lower(), "the standby leads", TAKEOVER_SECONDS)
