"""The pool as the memory below vLLM's own ``OffloadingConnector``: ``spec_module_path`` of ``EmsOffloadingSpec``.

vLLM decides which blocks to store and to load and keeps the order of copies; EMS is where they are, shared, surviving
and checked.
"""

from ems.vllm.offloading.spec import EmsOffloadingSpec

__all__ = ["EmsOffloadingSpec"]
