"""vLLM knows the connectors by name as soon as its plugins are loaded, in whatever process and however often."""

from __future__ import annotations

import importlib.util
import logging
import platform
import subprocess
import sys
from importlib.metadata import entry_points

import pytest
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from ems.vllm import plugin
from ems.vllm.connector import EmsStoreConnector


@pytest.fixture(autouse=True)
def _registry(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = {name: loader for name, loader in KVConnectorFactory._registry.items() if name not in plugin.CONNECTORS}
    monkeypatch.setattr(KVConnectorFactory, "_registry", registry)
    monkeypatch.setattr(plugin, "_loaders", {})


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "vllm.ems")
    return caplog


def test_the_entry_point_is_installed() -> None:
    found = [entry for entry in entry_points(group="vllm.general_plugins") if entry.name == "ems"]

    assert [entry.load() for entry in found] == [plugin.register]


def test_registering_twice_is_harmless_and_silent(said: pytest.LogCaptureFixture) -> None:
    plugin.register()
    plugin.register()

    assert KVConnectorFactory.get_connector_class_by_name("EmsStoreConnector") is EmsStoreConnector
    assert said.messages == []


@pytest.mark.parametrize("name", ["AscendStoreConnector", "MooncakeConnectorStoreV1"])
def test_the_names_that_people_have_are_the_same_connector(name: str) -> None:
    plugin.register()

    connector = KVConnectorFactory.get_connector_class_by_name(name)
    assert issubclass(connector, EmsStoreConnector)
    assert connector.__name__ == name  # vLLM finds metrics by it


def test_the_hand_off_from_peer_to_peer_is_a_transport_of_vllm() -> None:
    pytest.importorskip("nixl")
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlConnector

    plugin.register()

    connector = KVConnectorFactory.get_connector_class_by_name("MooncakeConnectorV1")
    assert issubclass(connector, NixlConnector)
    assert connector.__name__ == "MooncakeConnectorV1"


@pytest.mark.parametrize("name", list(plugin.CONNECTORS))
def test_a_name_that_another_plugin_took_is_left_alone(name: str, said: pytest.LogCaptureFixture) -> None:
    KVConnectorFactory.register_connector(name, "collections", "OrderedDict")
    plugin.register()

    assert KVConnectorFactory.get_connector_class_by_name(name).__module__ == "collections"
    assert said.messages == [f"another plugin registers {name}, which EMS leaves alone"]
    assert set(plugin.CONNECTORS) <= set(KVConnectorFactory._registry)


def test_a_plugin_that_could_not_start_with_its_names_taken_finds_them_free(
    monkeypatch: pytest.MonkeyPatch, said: pytest.LogCaptureFixture
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: found("json") if name == "vllm_ascend" else found(name)
    )
    plugin.register()

    ours = set(KVConnectorFactory._registry) & set(plugin.CONNECTORS)
    assert ours == {"EmsStoreConnector"}
    (line,) = said.messages
    assert line == (
        "another plugin registers AscendStoreConnector and MooncakeConnectorStoreV1 and MooncakeConnectorV1, "
        "which EMS leaves alone"
    )


TILES = """
import ctypes, torch
from vllm.platforms import current_platform
from ems.vllm import plugin

def granted():
    features = ctypes.c_uint64()
    assert ctypes.CDLL(None).syscall(158, 0x1022, ctypes.byref(features)) == 0  # arch_prctl, ARCH_GET_XCOMP_PERM
    return bool(features.value >> 18 & 1)

before = granted()
plugin.register()
print(before, granted(), current_platform.is_cpu() and torch.cpu._is_amx_tile_supported())
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="a matter of one processor's instructions")
@pytest.mark.process
def test_every_process_of_an_engine_may_use_the_tiles_that_its_processor_has() -> None:
    """A process of its own: what was granted once is never taken back."""
    told = subprocess.run([sys.executable, "-c", TILES], capture_output=True, text=True, check=True).stdout.split()

    before, after, has = told[-3:]
    assert before == "False"
    assert after == has


@pytest.mark.parametrize(("asked", "yields"), [("1", False), ("true", False), ("0", True), ("", True)])
def test_engines_rest_between_looks_where_they_are_asked_to(
    monkeypatch: pytest.MonkeyPatch, asked: str, yields: bool
) -> None:
    from vllm.distributed import utils

    monkeypatch.setattr(utils, "USE_SCHED_YIELD", True)
    monkeypatch.setenv("EMS_SHARE_CORES", asked)

    plugin.register()

    assert utils.USE_SCHED_YIELD is yields


def test_a_release_that_cannot_share_cores_says_so(
    monkeypatch: pytest.MonkeyPatch, said: pytest.LogCaptureFixture
) -> None:
    from vllm.distributed import utils

    monkeypatch.delattr(utils, "USE_SCHED_YIELD")
    monkeypatch.setenv("EMS_SHARE_CORES", "1")

    plugin.register()

    assert said.messages == ["EMS cannot make this release of vLLM share its cores, EMS_SHARE_CORES is ignored"]


def test_a_wish_that_is_not_understood_is_named(
    monkeypatch: pytest.MonkeyPatch, said: pytest.LogCaptureFixture
) -> None:
    from vllm.distributed import utils

    monkeypatch.setattr(utils, "USE_SCHED_YIELD", True)
    monkeypatch.setenv("EMS_SHARE_CORES", "perhaps")

    plugin.register()

    assert utils.USE_SCHED_YIELD
    assert said.messages == ["EMS: EMS_SHARE_CORES is 'perhaps', expected 1 or 0, and is ignored"]
