"""vLLM's entry point into EMS: makes the connectors known by name and deployed configurations acceptable.

vLLM calls :func:`register` in each of its processes, sometimes more than once, before it reads a configuration.  It
must be cheap, so connectors' modules are named here and imported only when a server asks for one.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

CONNECTORS = {
    "EmsStoreConnector": "ems.vllm.connector",
    "AscendStoreConnector": "ems.vllm.connector",
    "MooncakeConnectorStoreV1": "ems.vllm.connector",
    "MooncakeConnectorV1": "ems.vllm.peer.connector",
}
"""Connector name and the module that has the class of the same name."""

_ASCEND_PLUGIN = "vllm_ascend"
"""A plugin that registers all names but the first itself, and cannot start where one of them is taken."""

_loaders: dict[str, Callable[[], Any]] = {}
"""What vLLM's registry holds for the names that are ours in this process."""


def register() -> None:
    """Register every connector whose name is still free; one that another plugin has is left alone."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.logger import init_logger

    from ems.vllm.hooks import admit_deployed_files, allow_matrix_tiles, fill_head_dim, share_cores

    registry = KVConnectorFactory._registry  # noqa: SLF001 - there is no other way to see who has a name
    others_come = importlib.util.find_spec(_ASCEND_PLUGIN) is not None
    left: list[str] = []
    for name, module in CONNECTORS.items():
        if name in registry:
            if registry[name] is not _loaders.get(name):
                left.append(name)
        elif others_come and name != "EmsStoreConnector":
            left.append(name)
        else:
            KVConnectorFactory.register_connector(name, module, name)
            _loaders[name] = registry[name]
    if left:
        init_logger("vllm.ems").info("another plugin registers %s, which EMS leaves alone", " and ".join(left))
    admit_deployed_files(frozenset(CONNECTORS).difference(left))
    fill_head_dim()
    allow_matrix_tiles()
    share_cores()
