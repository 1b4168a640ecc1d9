"""vLLM knows the connectors by name as soon as its plugins are loaded, in whatever process and however often."""

from __future__ import annotations

import importlib.util
import logging
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
