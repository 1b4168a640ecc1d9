"""Which API server, and which of its objects."""

from __future__ import annotations

import msgspec


class ClusterAccess(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a Kubernetes API server is reached: by a kubeconfig, or without one as the pod that we run in."""

    kubeconfig: str | None = None
    context: str | None = None
    namespace: str | None = None
    """Whose objects count; None is all namespaces."""
