"""vLLM's entry point into EMS: makes the connectors known by name.

vLLM calls :func:`register` in each of its processes, sometimes more than once.  It must be cheap, so the
connector's module is named here and imported only when a server asks for it.
"""

from __future__ import annotations

CONNECTORS = {"EmsStoreConnector": "ems.vllm.connector"}
"""Connector name and the module that has the class of the same name."""


def register() -> None:
    """Register every connector whose name is still free; one that another plugin took is left alone."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.logger import init_logger

    for name, module in CONNECTORS.items():
        try:
            KVConnectorFactory.register_connector(name, module, name)
        except ValueError:
            if not _is_ours(name):
                init_logger("vllm.ems").info("connector %s was registered by another plugin and is left alone", name)


def _is_ours(name: str) -> bool:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    module: str = KVConnectorFactory.get_connector_class_by_name(name).__module__
    return module.startswith("ems.")
