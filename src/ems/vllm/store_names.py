"""The pool connector under the names that people have in their files already; keys and behaviour are the same.

Classes of their own, because vLLM finds a connector's metrics by the name of its class.
"""

from __future__ import annotations

from ems.vllm.connector import EmsStoreConnector


class AscendStoreConnector(EmsStoreConnector):
    """The pool of this host behind one engine."""


class MooncakeConnectorStoreV1(EmsStoreConnector):
    """The same under its oldest name."""
