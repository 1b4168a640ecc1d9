"""The objects that the router reads; of a ``Pod``, which others write, only what it needs."""

from __future__ import annotations

import re
from typing import Final

from ems.engines.handoff import BOOTSTRAP_PORT, HandoffKind
from ems.errors import ConfigError
from ems.http.address import Address
from ems.kthena.networking import NETWORKING, ModelRoute, ModelServer, ModelServerSpec
from ems.kubernetes.objects import Pod, Resource

PORT_ANNOTATION: Final = "ems.router/port"
"""Of a ``Pod``: its own port instead of its ``ModelServer``'s, for several instances at one address."""

BOOTSTRAP_ANNOTATION: Final = "ems.router/bootstrap-port"
"""Of a ``Pod``: where the bootstrap server of an SGLang prefill listens, if not at SGLang's default."""


class ServedRoute(ModelRoute, frozen=True, kw_only=True):
    """A route to nothing but ``ModelServer`` objects."""

    def __post_init__(self) -> None:
        targets = (target for rule in self.spec.rules for target in rule.target_models)
        if any(target.model_server_name is None for target in targets):
            raise ValueError("externalModelProviderName: this router serves no external providers, name a ModelServer")


class EnginePod(Pod, frozen=True, kw_only=True):
    """A pod: an instance, once a ``ModelServer`` selects it."""

    def __post_init__(self) -> None:
        for name in (PORT_ANNOTATION, BOOTSTRAP_ANNOTATION):
            port = self.metadata.annotations.get(name, "1")
            if not (re.fullmatch("[0-9]{1,5}", port) and 1 <= int(port) <= 65535):
                raise ValueError(f"{name} is {port[:20]!r}, expected a port from 1 to 65535")
        try:
            Address.of(self.status.pod_ip or "localhost", 1)
        except ConfigError as error:
            raise ValueError(f"status.podIP: {error}") from None

    @property
    def port(self) -> int | None:
        """Its own port, if it has one."""
        text = self.metadata.annotations.get(PORT_ANNOTATION)
        return None if text is None else int(text)

    @property
    def bootstrap_port(self) -> int:
        """Where SGLang's decodes meet it."""
        return int(self.metadata.annotations.get(BOOTSTRAP_ANNOTATION, BOOTSTRAP_PORT))


RESOURCES: Final = (
    Resource("modelservers", NETWORKING, "ModelServer", ModelServer),
    Resource("modelroutes", NETWORKING, "ModelRoute", ServedRoute),
    Resource("pods", "v1", "Pod", EnginePod),
)


def handoff_of(spec: ModelServerSpec) -> HandoffKind:
    """The hand-off; where vLLM's is not written, what its connectors have in common, the pool's included."""
    if spec.kv_connector is not None:
        return HandoffKind(spec.kv_connector.type)
    return HandoffKind.SGLANG if spec.inference_engine == "SGLang" else HandoffKind.NIXL
