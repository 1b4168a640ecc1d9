"""Releases of vLLM before these classes have nothing that could be tested here."""

from importlib.util import find_spec

from ems.vllm.compat import REPORTS_FAILED_REQUESTS

collect_ignore_glob = [] if REPORTS_FAILED_REQUESTS and find_spec("vllm.v1.kv_offload.config") else ["test_*.py"]
