"""vLLM knows the connectors by name as soon as its plugins are loaded, in whatever process and however often."""

from __future__ import annotations

from importlib.metadata import entry_points

import pytest
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from ems.vllm import plugin


@pytest.fixture(autouse=True)
def _registry(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = {name: loader for name, loader in KVConnectorFactory._registry.items() if name not in plugin.CONNECTORS}
    monkeypatch.setattr(KVConnectorFactory, "_registry", registry)


def test_the_entry_point_is_installed() -> None:
    found = [entry for entry in entry_points(group="vllm.general_plugins") if entry.name == "ems"]

    assert [entry.load() for entry in found] == [plugin.register]


def test_registering_twice_is_harmless() -> None:
    plugin.register()
    plugin.register()

    assert KVConnectorFactory.get_connector_class_by_name("EmsStoreConnector").__module__ == "ems.vllm.connector"


def test_a_name_that_another_plugin_took_is_left_alone() -> None:
    KVConnectorFactory.register_connector("EmsStoreConnector", "collections", "OrderedDict")
    plugin.register()

    assert KVConnectorFactory.get_connector_class_by_name("EmsStoreConnector").__module__ == "collections"
