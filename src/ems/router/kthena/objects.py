"""Kthena's networking objects and the pods that they select, as manifests have them.

Defaults are those of Kthena's schemas, and what its webhooks refuse is refused here.  What always holds: a field of a
``spec`` that Kthena does not know is refused by name; metadata and status are an API server's, of which only what
matters here is read.
"""

from __future__ import annotations

import re
from datetime import datetime
from typing import Annotated, Final, Literal

import msgspec

from ems.errors import ConfigError

GROUP: Final = "networking.serving.volcano.sh/v1alpha1"

_DURATION = re.compile(r"(?:\d+(?:\.\d+)?(?:h|m(?!s)|s|ms|us|ns))+")
_PART = re.compile(r"(\d+(?:\.\d+)?)(h|ms|m|s|us|ns)")
_UNITS: Final = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}

Labels = dict[str, str]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=253)]


class Loose(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What an API server adds to freely."""


class Strict(msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """What a person writes."""


class Metadata(Loose, frozen=True):
    """Of any object."""

    name: Name
    namespace: str = "default"
    labels: Labels = {}
    creation_timestamp: datetime | None = None
    deletion_timestamp: datetime | None = None

    @property
    def path(self) -> str:
        return f"{self.namespace}/{self.name}"


# ---------------------------------------------------------------------------------------------------------------- pods


class Condition(Loose, frozen=True):
    """Of a pod's status."""

    type: str
    status: str


class PodStatus(Loose, frozen=True):
    """Where a pod is, and how."""

    pod_ip: str = msgspec.field(default="", name="podIP")
    conditions: tuple[Condition, ...] = ()


class Pod(Loose, frozen=True):
    """A pod as ``kubectl get pods -o yaml`` prints it; on a plain host a person writes labels and ``podIP``."""

    metadata: Metadata
    status: PodStatus = PodStatus()

    @property
    def serves(self) -> bool:
        """Whether it may get requests: it has an address, is not leaving, and is ready where that is said."""
        ready = next((one.status == "True" for one in self.status.conditions if one.type == "Ready"), True)
        return bool(self.status.pod_ip) and ready and self.metadata.deletion_timestamp is None


# -------------------------------------------------------------------------------------------------------- model servers


class PdGroup(Strict, frozen=True):
    """How prefill and decode pods find together."""

    group_key: Name
    prefill_labels: Annotated[Labels, msgspec.Meta(min_length=1)]
    decode_labels: Annotated[Labels, msgspec.Meta(min_length=1)]


class WorkloadSelector(Strict, frozen=True):
    """Which pods of the same namespace."""

    match_labels: Annotated[Labels, msgspec.Meta(min_length=1)]
    pd_group: PdGroup | None = None


class WorkloadPort(Strict, frozen=True):
    """Where they listen."""

    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    protocol: Literal["http", "https"] = "http"


class Retry(Strict, frozen=True):
    """How often a failed request is tried again."""

    attempts: Annotated[int, msgspec.Meta(ge=0, le=100)] = 0
    retry_interval: str = "100ms"


class TrafficPolicy(Strict, frozen=True):
    """Time and tries of a request."""

    timeout: str | None = None
    retry: Retry | None = None


class KvConnector(Strict, frozen=True):
    """How KV comes from prefill to decode."""

    type: Literal["http", "lmcache", "nixl", "mooncake"] = "http"


class ModelServerSpec(Strict, frozen=True):
    """See :class:`ModelServer`."""

    inference_engine: Literal["vLLM", "SGLang"]
    workload_selector: WorkloadSelector
    workload_port: WorkloadPort
    model: Annotated[str, msgspec.Meta(max_length=256)] = ""
    traffic_policy: TrafficPolicy = TrafficPolicy()
    kv_connector: KvConnector | None = None


class ModelServer(Loose, frozen=True):
    """The engines of one model: their pods, their port, how KV is handed over."""

    metadata: Metadata
    spec: ModelServerSpec

    def __post_init__(self) -> None:
        policy = self.spec.traffic_policy
        if policy.timeout is not None:
            seconds(policy.timeout, "spec.trafficPolicy.timeout")
        if policy.retry is not None:
            seconds(policy.retry.retry_interval, "spec.trafficPolicy.retry.retryInterval")
        if self.spec.workload_port.protocol == "https":
            raise ConfigError("spec.workloadPort.protocol https is not spoken to engines yet: expected http")
        if self.spec.inference_engine == "SGLang" and self.spec.workload_selector.pd_group is not None:
            raise ConfigError("spec.inferenceEngine SGLang with a pdGroup is not served yet: expected vLLM")


# --------------------------------------------------------------------------------------------------------- model routes


class StringMatch(Strict, frozen=True):
    """One of three ways to match a text; the first that is given counts."""

    exact: str | None = None
    prefix: str | None = None
    regex: str | None = None

    def __post_init__(self) -> None:
        if self.regex is not None:
            try:
                re.compile(self.regex)
            except re.error as error:
                raise ConfigError(f"the regular expression {self.regex[:80]!r} is wrong: {error}") from error

    def matches(self, text: str) -> bool:
        if self.exact is not None:
            return text == self.exact
        if self.prefix is not None:
            return text.startswith(self.prefix)
        return self.regex is not None and re.search(self.regex, text) is not None


class BodyMatch(Strict, frozen=True):
    """On the request's body."""

    model: str | None = None


class ModelMatch(Strict, frozen=True):
    """What a rule is for; all that is given must match."""

    headers: dict[str, StringMatch] = {}
    uri: StringMatch | None = None
    body: BodyMatch | None = None


class TargetModel(Strict, frozen=True):
    """A model server and its share of a rule's requests."""

    model_server_name: str | None = None
    external_model_provider_name: str | None = None
    weight: Annotated[int, msgspec.Meta(ge=0, le=100)] = 100

    def __post_init__(self) -> None:
        if self.external_model_provider_name is not None:
            raise ConfigError("externalModelProviderName is not served here: expected modelServerName")
        if not self.model_server_name:
            raise ConfigError("a target needs modelServerName")


class Rule(Strict, frozen=True):
    """Where requests go that match."""

    target_models: Annotated[tuple[TargetModel, ...], msgspec.Meta(min_length=1, max_length=16)]
    name: str = ""
    model_match: ModelMatch | None = None

    def __post_init__(self) -> None:
        if not sum(target.weight for target in self.target_models):
            raise ConfigError(f"the weights of the rule {self.name!r} are all 0, expected one above it")


class Redis(Strict, frozen=True):
    """Where limits are shared."""

    address: str


class GlobalLimit(Strict, frozen=True):
    """Limits of all routers together."""

    redis: Redis


class RateLimit(Strict, frozen=True):
    """Tokens in a unit of time."""

    input_tokens_per_unit: Annotated[int, msgspec.Meta(ge=1)] | None = None
    output_tokens_per_unit: Annotated[int, msgspec.Meta(ge=1)] | None = None
    unit: Literal["second", "minute", "hour", "day", "month"] = "second"
    shared: GlobalLimit | None = msgspec.field(default=None, name="global")


class ModelRouteSpec(Strict, frozen=True):
    """See :class:`ModelRoute`."""

    rules: Annotated[tuple[Rule, ...], msgspec.Meta(min_length=1, max_length=16)]
    model_name: str = ""
    lora_adapters: Annotated[tuple[Name, ...], msgspec.Meta(max_length=10)] = ()
    parent_refs: tuple[dict[str, object], ...] = ()
    rate_limit: RateLimit | None = None


class ModelRoute(Loose, frozen=True):
    """Which requests, by model and rules, go to which model servers."""

    metadata: Metadata
    spec: ModelRouteSpec

    def __post_init__(self) -> None:
        if not self.spec.model_name and not self.spec.lora_adapters:
            raise ConfigError("spec.modelName is empty, expected a name, or spec.loraAdapters with one")


def seconds(text: str, name: str) -> float:
    """Return the time that a Kubernetes duration such as ``1m30s`` or ``100ms`` means.

    :raises ConfigError: it is none.
    """
    if not _DURATION.fullmatch(text):
        raise ConfigError(f"{name} is {text[:40]!r}, expected a duration such as 10s, 100ms or 1m30s")
    return sum(float(number) * _UNITS[unit] for number, unit in _PART.findall(text))
