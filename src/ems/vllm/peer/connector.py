"""``MooncakeConnectorV1``: the hand-off from peer to peer, by a transport connector that vLLM ships.

NIXL carries it where it is installed, Mooncake's transfer engine otherwise.  Deployed files keep their form: what they
say is translated, the transport does the work.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

from ems.errors import ConfigError


def _imports(module: str) -> bool:
    try:
        importlib.import_module(module)
    except ImportError:
        return False
    return True


# As vLLM does before it imports NIXL for the first time; afterwards is too late.
os.environ.setdefault("UCX_RCACHE_MAX_UNRELEASED", "1024")

if TYPE_CHECKING:
    _HandOff: Any = object
elif _imports("nixl._api"):
    from ems.vllm.peer.nixl import NixlHandOff as _HandOff
elif _imports("mooncake.engine"):
    from ems.vllm.peer.mooncake import MooncakeHandOff as _HandOff
else:
    raise ConfigError(
        "MooncakeConnectorV1 hands over from peer to peer and found neither nixl nor mooncake on this machine; "
        "install one of them (pip install nixl), or hand over through the pool with EmsStoreConnector"
    )


class MooncakeConnectorV1(_HandOff):
    """One side of a hand-off from peer to peer."""
