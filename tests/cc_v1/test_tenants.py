"""The SDK on a node with tenants: with a key, without, and after the key is gone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ems import Ems, EmsConfig, EmsErrorCode, EmsException
from ems.cc_v1.cc_config import CcKvOption
from ems.pool.client.health import HealthRules
from ems.pool.tenants import registry as tenancy
from tests.cc_v1.conftest import rank_config
from tests.kit.node import NodeProcess
from tests.kit.waiting import until
from tests.pool.tenants.people import ANN, BOB, registry_of, save

QUICK = HealthRules(check_seconds=0.05, good_checks=1)
OPTION = CcKvOption(write_rcache=True, read_local_only=False, timeout=5000)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save(tmp_path / "tenants.json", registry_of(ANN, BOB))
    return tmp_path / "tenants.json"


@pytest.fixture
def node(path: Path) -> Iterator[NodeProcess]:
    with NodeProcess("--size", "16MB", "--segment-size", "1MB", "--tenants", str(path)) as running:
        running.wait_touched()
        yield running
    Ems.close()


def init(node: NodeProcess, access_id: str, access_key: str) -> None:
    Ems.init(
        EmsConfig(
            access_id=access_id,
            access_key=access_key,
            cc_config_v1=rank_config("tenants"),
            autostart=False,
            node=node.config,
            health=QUICK,
        )
    )


def stored() -> int:
    cc = Ems.get_cc()
    cc.register_kvcache([[torch.zeros(4, 2, 1, 8), torch.zeros(4, 2, 1, 8)]])
    return int(cc.exists([1], OPTION).success)


def test_a_key_opens_its_tenants_pages_only(node: NodeProcess) -> None:
    init(node, ANN.access_id, ANN.access_key)
    cc = Ems.get_cc()
    cc.register_kvcache([[torch.ones(4, 2, 1, 8), torch.ones(4, 2, 1, 8)]])
    assert cc.get_result(cc.async_save([0, 1], [1], [2], OPTION)).success == 1
    assert stored() == 1
    init(node, BOB.access_id, BOB.access_key)
    assert stored() == 0
    init(node, ANN.access_id, ANN.access_key)
    assert stored() == 1


@pytest.mark.parametrize(("who", "key"), [("ann", ""), ("ann", "wrong"), ("", ""), ("nobody", "wrong")])
def test_without_a_good_key_init_is_unauthorised(node: NodeProcess, who: str, key: str) -> None:
    with pytest.raises(EmsException) as refused:
        init(node, who, key)
    assert refused.value.status_code() is EmsErrorCode.EMS_UNAUTHORISED
    assert "wrong" not in str(refused.value)
    assert Ems.check_health() is False


def test_a_revoked_key_closes_the_gate_with_one_line(
    node: NodeProcess, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    init(node, ANN.access_id, ANN.access_key)
    assert stored() == 0
    save(path, tenancy.revoke_key(registry_of(ANN, BOB), "ann", "all"))

    def lines() -> list[str]:
        warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
        return [message for message in warnings if "EMS" in message]

    until(lambda: not Ems.check_health() and lines(), "the gate closes and says so")
    for _ in range(20):
        assert Ems.get_cc().exists([1], OPTION).success == 0
    assert len(lines()) == 1
    assert ANN.access_key not in caplog.text
