"""``ModelServer`` and ``ModelRoute``: ``networking.serving.volcano.sh``.

The checks are those of Kthena's schemas and webhooks, so that a manifest is refused here for what it is refused for
there.  Unknown fields are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Annotated, Any, Final, Literal

import msgspec
import re2
from msgspec import Meta

from ems.kthena.rate_limit import RateLimit
from ems.kubernetes.objects import Labels, Name, Object, parse_duration

NETWORKING: Final = "networking.serving.volcano.sh/v1alpha1"


Asked = Callable[[str], str]
"""Gives a request's header by its name in lower case; one that is not there is empty."""


class Spec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """Base of everything that may have no other fields than those that are written down."""


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
    """The hand-off that the engines are set up for; SGLang's own follows from the engine and is not written."""

    type: Literal["http", "lmcache", "nixl", "mooncake"] = "http"


class ModelServerSpec(Spec, frozen=True, kw_only=True):
    """What serves one model: which pods, how they are spoken to, what the model is called there."""

    model: Annotated[str, Meta(max_length=256)] = ""
    inference_engine: Literal["vLLM", "SGLang"]
    workload_selector: WorkloadSelector
    workload_port: WorkloadPort
    traffic_policy: TrafficPolicy = TrafficPolicy()
    kv_connector: KvConnector | None = None


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
    """One of the servers, or external providers, that a rule's requests are spread over."""

    model_server_name: Name | None = None
    external_model_provider_name: Name | None = None
    weight: Annotated[int, Meta(ge=0, le=100)] = 100

    def __post_init__(self) -> None:
        if (self.model_server_name is None) is (self.external_model_provider_name is None):
            raise ValueError("a target needs either modelServerName or externalModelProviderName")


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


class ModelServer(Object, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A ``ModelServer`` object."""

    spec: ModelServerSpec
    status: Any = None


class ModelRoute(Object, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A ``ModelRoute`` object."""

    spec: ModelRouteSpec
    status: Any = None
