"""The pool as the memory below vLLM's own ``OffloadingConnector``: ``spec_module_path`` of ``EmsOffloadingSpec``.

vLLM decides which blocks to store and to load and keeps the order of copies; EMS is where they are, shared, surviving
and checked.
"""

from importlib.util import find_spec

import vllm

from ems.errors import ConfigError
from ems.vllm.compat import REPORTS_FAILED_REQUESTS

if not REPORTS_FAILED_REQUESTS or find_spec("vllm.v1.kv_offload.config") is None:
    raise ConfigError(
        f"EmsOffloadingSpec needs vLLM 0.32, and this is {vllm.__version__}; name EmsStoreConnector instead"
    )

from ems.vllm.offloading.spec import EmsOffloadingSpec

__all__ = ["EmsOffloadingSpec"]
