"""``ModelServer``, ``ModelRoute`` and ``Pod`` as the router reads them: defaults first, then what must hold.

The checks are those of Kthena's schemas and webhooks, so that a manifest is refused here for what it is refused for
there.  Unknown fields of a specification are refused; of a ``Pod``, which others write, only what is needed is read.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime
from fractions import Fraction
from functools import lru_cache
from typing import Annotated, Any, Final, Literal, NamedTuple

import msgspec
import re2
from msgspec import Meta

from ems.errors import ConfigError
from ems.http.address import Address
from ems.router.admission.limits import RateLimit
from ems.router.handoff.kinds import BOOTSTRAP_PORT, HandoffKind

NETWORKING: Final = "networking.serving.volcano.sh/v1alpha1"

PORT_ANNOTATION: Final = "ems.router/port"
"""Of a ``Pod``: its own port instead of its ``ModelServer``'s, for several instances at one address."""

BOOTSTRAP_ANNOTATION: Final = "ems.router/bootstrap-port"
"""Of a ``Pod``: where the bootstrap server of an SGLang prefill listens, if not at SGLang's default."""

_UNITS: Final = {"ns": 1, "us": 10**3, "µs": 10**3, "ms": 10**6, "s": 10**9, "m": 60 * 10**9, "h": 3600 * 10**9}
_PART: Final = re.compile(r"([0-9]{1,12}(?:\.[0-9]{0,12})?)(ns|us|µs|ms|s|m|h)")
_NAME: Final = r"^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$"

Name = Annotated[str, Meta(pattern=_NAME)]
Labels = dict[str, str]

Asked = Callable[[str], str]
"""Gives a request's header by its name in lower case; one that is not there is empty."""


class ObjectName(NamedTuple):
    """Namespace and name: what tells objects of one kind apart."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


def parse_duration(text: str) -> float:
    """Seconds of a duration as Go writes it, such as ``10s``, ``1m30s`` and ``100ms``.

    :raises ValueError: anything else.
    """
    parts = _PART.findall(text)
    if text != "0" and (not parts or "".join(number + unit for number, unit in parts) != text):
        raise ValueError(f"{text[:40]!r} is no duration: expected one such as 10s, 1m30s or 100ms")
    return float(sum(Fraction(number) * _UNITS[unit] for number, unit in parts) / 10**9)


class Spec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """Base of everything that may have no other fields than those that are written down."""


class Metadata(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What the router reads of an object's ``metadata``; there may be more."""

    name: Name
    namespace: Name = "default"
    labels: Labels = {}
    annotations: Labels = {}
    creation_timestamp: Annotated[datetime, Meta(tz=True)] | None = None
    deletion_timestamp: str | None = None
    resource_version: str = ""


class PdGroup(Spec, frozen=True, kw_only=True):
    """Which of the selected pods prefill, which decode, and which label says that two belong together."""

    group_key: Annotated[str, Meta(min_length=1)]
    prefill_labels: Annotated[Labels, Meta(min_length=1)]
    decode_labels: Annotated[Labels, Meta(min_length=1)]


class WorkloadSelector(Spec, frozen=True, kw_only=True):
    """Labels that a pod must have, in the object's own namespace."""

    match_labels: Annotated[Labels, Meta(min_length=1)]
    pd_group: PdGroup | None = None


class WorkloadPort(Spec, frozen=True, kw_only=True):
    """Where instances listen."""

    port: Annotated[int, Meta(ge=1, le=65535)]
    protocol: Literal["http", "https"] = "http"


class Retry(Spec, frozen=True, kw_only=True):
    """How often and how soon a failed attempt is made again."""

    attempts: Annotated[int, Meta(ge=0, le=100)] = 0
    retry_interval: str = "100ms"

    def __post_init__(self) -> None:
        parse_duration(self.retry_interval)


class TrafficPolicy(Spec, frozen=True, kw_only=True):
    """Bounds of a request: ``timeout`` for all of it."""

    timeout: str | None = None
    retry: Retry | None = None

    def __post_init__(self) -> None:
        if self.timeout is not None and not parse_duration(self.timeout):
            raise ValueError("timeout is 0: expected more, or nothing for no bound")

    @property
    def seconds(self) -> float | None:
        return None if self.timeout is None else parse_duration(self.timeout)


class KvConnector(Spec, frozen=True, kw_only=True):
    """The hand-off that the engines are set up for."""

    type: HandoffKind = HandoffKind.HTTP

    def __post_init__(self) -> None:
        if self.type is HandoffKind.SGLANG:
            raise ValueError("type sglang cannot be written: leave out kvConnector, the engine SGLang implies it")


class ModelServerSpec(Spec, frozen=True, kw_only=True):
    """What serves one model: which pods, how they are spoken to, what the model is called there."""

    model: Annotated[str, Meta(max_length=256)] = ""
    inference_engine: Literal["vLLM", "SGLang"]
    workload_selector: WorkloadSelector
    workload_port: WorkloadPort
    traffic_policy: TrafficPolicy = TrafficPolicy()
    kv_connector: KvConnector | None = None

    @property
    def handoff(self) -> HandoffKind:
        """The hand-off; where vLLM's is not written, what its connectors have in common, the pool's included."""
        if self.kv_connector is not None:
            return self.kv_connector.type
        return HandoffKind.SGLANG if self.inference_engine == "SGLang" else HandoffKind.NIXL


@lru_cache(4096)
def pattern_of(regex: str) -> Any:
    """The compiled expression, in the syntax of RE2 as in Kthena; its time is linear in the text.

    :raises ValueError: it is none.
    """
    options = re2.Options()
    options.log_errors = False
    try:
        return re2.compile(regex, options)
    except re2.error as error:
        reason = b" ".join(error.args).decode("utf-8", "replace")
        raise ValueError(f"{regex[:80]!r} is no regular expression of RE2: {reason}") from None


class StringMatch(Spec, frozen=True, kw_only=True):
    """How a text must look; of several ways ``exact`` counts before ``prefix`` and ``prefix`` before ``regex``."""

    exact: str | None = None
    prefix: str | None = None
    regex: str | None = None

    def __post_init__(self) -> None:
        if self.exact is None and self.prefix is None and self.regex is None:
            raise ValueError("a match needs exact, prefix or regex")
        if self.regex is not None:
            pattern_of(self.regex)

    def matches(self, text: str) -> bool:
        if self.exact is not None:
            return text == self.exact
        if self.prefix is not None:
            return text.startswith(self.prefix)
        return self.regex is not None and pattern_of(self.regex).search(text) is not None


class BodyMatch(Spec, frozen=True, kw_only=True):
    """What must stand in a request's body."""

    model: str | None = None


class ModelMatch(Spec, frozen=True, kw_only=True):
    """All of what is given must hold."""

    headers: dict[str, StringMatch] = {}
    uri: StringMatch | None = None
    body: BodyMatch | None = None

    def takes(self, model: str, path: str, asked: Asked) -> bool:
        if self.body is not None and self.body.model and self.body.model != model:
            return False
        if not all(match.matches(asked(name.lower())) for name, match in self.headers.items()):
            return False
        return self.uri is None or self.uri.matches(path)


class TargetModel(Spec, frozen=True, kw_only=True):
    """One of the servers that a rule's requests are spread over."""

    model_server_name: Name | None = None
    external_model_provider_name: Name | None = None
    weight: Annotated[int, Meta(ge=0, le=100)] = 100

    def __post_init__(self) -> None:
        if (self.model_server_name is None) is (self.external_model_provider_name is None):
            raise ValueError("a target needs either modelServerName or externalModelProviderName")
        if self.model_server_name is None:
            raise ValueError("externalModelProviderName: this router serves no external providers, name a ModelServer")


class Rule(Spec, frozen=True, kw_only=True):
    """Which requests, and where they go."""

    name: str = ""
    model_match: ModelMatch | None = None
    target_models: Annotated[tuple[TargetModel, ...], Meta(min_length=1, max_length=16)]

    def __post_init__(self) -> None:
        if not sum(target.weight for target in self.target_models):
            raise ValueError("the weights of targetModels are all 0: give one of them more")


class Redis(Spec, frozen=True, kw_only=True):
    """Where routers count together."""

    address: Annotated[str, Meta(min_length=1)]


class GlobalLimit(Spec, frozen=True, kw_only=True):
    """That a limit counts for all routers together."""

    redis: Redis


class RouteLimit(RateLimit, frozen=True, kw_only=True):
    """``rateLimit`` of a route, which may also limit nothing."""

    global_: GlobalLimit | None = msgspec.field(default=None, name="global")

    def __post_init__(self) -> None: ...


class ModelRouteSpec(Spec, frozen=True, kw_only=True):
    """Which model names a route stands for, and its rules in their order."""

    model_name: str = ""
    lora_adapters: Annotated[tuple[Annotated[str, Meta(min_length=1)], ...], Meta(max_length=10)] = ()
    parent_refs: tuple[dict[str, Any], ...] = ()
    rules: Annotated[tuple[Rule, ...], Meta(min_length=1, max_length=16)]
    rate_limit: RouteLimit | None = None

    def __post_init__(self) -> None:
        if not self.model_name and not self.lora_adapters:
            raise ValueError("a ModelRoute needs modelName, loraAdapters or both")


class _Object(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    api_version: str
    kind: str
    metadata: Metadata

    @property
    def key(self) -> ObjectName:
        return ObjectName(self.metadata.namespace, self.metadata.name)


class ModelServer(_Object, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A ``ModelServer`` object."""

    spec: ModelServerSpec
    status: Any = None


class ModelRoute(_Object, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A ``ModelRoute`` object."""

    spec: ModelRouteSpec
    status: Any = None


class Condition(msgspec.Struct, frozen=True):
    """One of a pod's conditions."""

    type: str
    status: str


class PodStatus(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What of a pod's state counts."""

    pod_ip: str = msgspec.field(default="", name="podIP")
    conditions: tuple[Condition, ...] = ()


class Pod(_Object, frozen=True, kw_only=True):
    """A pod: an instance, once a ``ModelServer`` selects it."""

    status: PodStatus = PodStatus()

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
    def ready(self) -> bool:
        """Whether it may get requests; one without any conditions, as people write them into files, may."""
        if self.metadata.deletion_timestamp is not None or not self.status.pod_ip:
            return False
        conditions = self.status.conditions
        return not conditions or any(one.type == "Ready" and one.status == "True" for one in conditions)

    @property
    def port(self) -> int | None:
        """Its own port, if it has one."""
        text = self.metadata.annotations.get(PORT_ANNOTATION)
        return None if text is None else int(text)

    @property
    def bootstrap_port(self) -> int:
        """Where SGLang's decodes meet it."""
        return int(self.metadata.annotations.get(BOOTSTRAP_ANNOTATION, BOOTSTRAP_PORT))


Object = ModelServer | ModelRoute | Pod

KINDS: Final[dict[tuple[str, str], type[Object]]] = {
    (NETWORKING, "ModelServer"): ModelServer,
    (NETWORKING, "ModelRoute"): ModelRoute,
    ("v1", "Pod"): Pod,
}


def _placed(message: str) -> str:
    """The field first, then what is wrong with it."""
    text, at, path = message.rpartition(" - at `$")
    text = text.replace("Object contains", "there is an").replace("Object missing", "there is no")
    return f"{path.rstrip('`').lstrip('.') or 'the object'}: {text}" if at else message


def decode(document: object, *, source: str) -> Object | None:
    """Return what a document is; None when it is of a kind that does not concern the router.

    :raises ConfigError: it is no object, or not as it must be.
    """
    if not isinstance(document, dict):
        raise ConfigError(f"{source}: a document is no object: expected apiVersion, kind, metadata and spec")
    version, kind = document.get("apiVersion"), document.get("kind")
    wanted = KINDS.get((str(version), str(kind)))
    if wanted is None:
        if kind in ("ModelServer", "ModelRoute"):
            raise ConfigError(f"{source}: {kind} has apiVersion {version!r}, expected {NETWORKING}")
        if not kind or not version:
            raise ConfigError(f"{source}: a document has no kind or no apiVersion")
        return None
    try:
        return msgspec.convert(document, wanted)
    except (msgspec.ValidationError, RecursionError) as error:
        metadata = document.get("metadata")
        name = metadata.get("name") if isinstance(metadata, dict) else None
        what = f"{kind} {name}" if isinstance(name, str) else f"a {kind} without a name"
        raise ConfigError(f"{source}: {what}: {_placed(str(error))}") from None
