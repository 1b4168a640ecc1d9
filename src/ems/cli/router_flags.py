"""Flags of ``ems router`` that go together: instances, who may send requests, what is written of them, TLS."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeVar

from cyclopts import Parameter

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from ems.http.address import Address
    from ems.kthena.rate_limit import RateLimit
    from ems.pool.http.prefetch_hints import PoolNode
    from ems.router.admission.settings import AdmissionConfig
    from ems.router.admission.tls import TlsConfig
    from ems.router.config import EventSource
    from ems.router.observe.settings import ObserveConfig

Unit = Literal["second", "minute", "hour", "day", "month"]
Told = TypeVar("Told")


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class AdmissionFlags:
    """Who may send requests, and how much."""

    api_keys: str | None = None
    """File of API keys; with it a request needs one of them, or a token."""
    jwt_issuer: str | None = None
    """Issuer whose JSON Web Tokens count."""
    jwt_audience: str | None = None
    """Audience that tokens must be for."""
    jwt_key_set: str | None = None
    """URL or file of the issuer's JWKS."""
    jwt_models_claim: str | None = None
    """Claim of a token with the models that its bearer may use; all when not given."""
    forward_credentials: bool = False
    """Let engines have the credentials that clients send to the router."""
    engine_key: str | None = None
    """File with the key that engines get from the router."""
    input_tokens_per_unit: int | None = None
    """Tokens of prompts that the router takes in a unit of time."""
    output_tokens_per_unit: int | None = None
    """Tokens of answers that it takes in a unit of time."""
    rate_limit_unit: Unit = "minute"
    """That unit."""
    limits_redis: str | None = None
    """URL of a Redis through which routers share their limits."""
    max_running: int = 0
    """Requests that run at once, others wait; 0 has no bound."""
    queue_size: int = 1024
    """Requests that wait at once, others are refused."""
    queue_timeout: float = 60.0
    """Seconds that a request waits at most."""
    fair_half_life: float = 300.0
    """Seconds after which what a user used counts half."""
    session_boost: float = 0.0
    """Seconds after an answer in which the next request of its conversation goes first; 0 never."""

    def settings(self) -> AdmissionConfig:
        from ems.errors import ConfigError
        from ems.router.admission.settings import AdmissionConfig, TokenSettings

        if not self.max_running:
            for name in ("queue_size", "queue_timeout", "fair_half_life", "session_boost"):
                if getattr(self, name) != getattr(type(self), name):
                    raise ConfigError(f"--{name.replace('_', '-')} is for a queue, which takes --max-running")
        tokens = None
        if self.jwt_issuer is not None or self.jwt_key_set is not None:
            audiences = () if self.jwt_audience is None else (self.jwt_audience,)
            tokens = TokenSettings(
                issuer=self.jwt_issuer or "",
                audiences=audiences,
                key_set=self.jwt_key_set or "",
                models_claim=self.jwt_models_claim,
            )
        elif self.jwt_audience is not None or self.jwt_models_claim is not None:
            raise ConfigError("--jwt-audience and --jwt-models-claim take --jwt-issuer and --jwt-key-set")
        return AdmissionConfig(
            api_keys=self.api_keys,
            tokens=tokens,
            forward_credentials=self.forward_credentials,
            engine_key=self.engine_key,
            limit=self._limit(),
            limits_redis=self.limits_redis,
            max_running=self.max_running,
            queue_size=self.queue_size,
            queue_timeout=self.queue_timeout,
            fair_half_life=self.fair_half_life,
            session_boost=self.session_boost,
        )

    def _limit(self) -> RateLimit | None:
        from ems.errors import ConfigError
        from ems.kthena.rate_limit import RateLimit, Unit

        if self.input_tokens_per_unit is None and self.output_tokens_per_unit is None:
            return None
        for tokens in (self.input_tokens_per_unit, self.output_tokens_per_unit):
            if tokens is not None and tokens < 1:
                raise ConfigError(f"A limit of {tokens} tokens lets nothing through: expected 1 or more")
        return RateLimit(
            input_tokens_per_unit=self.input_tokens_per_unit,
            output_tokens_per_unit=self.output_tokens_per_unit,
            unit=Unit(self.rate_limit_unit),
        )


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ObserveFlags:
    """What is written of requests."""

    access_log: Literal["off", "text", "json"] = "off"
    """How a line for each request is written."""
    access_log_output: str = "stdout"
    """Where these lines go: stdout, or a file."""
    debug_requests: int = 1024
    """Requests that can be asked for at /debug/requests/ID after they ended."""
    otlp_traces_endpoint: str | None = None
    """Where spans go, by OTLP over HTTP."""

    def settings(self) -> ObserveConfig:
        from ems.router.observe.settings import Format, ObserveConfig

        return ObserveConfig(
            access_log=Format(self.access_log),
            access_log_output=self.access_log_output,
            decisions=self.debug_requests,
            otlp_traces_endpoint=self.otlp_traces_endpoint,
        )


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class TlsFlags:
    """TLS; all files are PEM."""

    tls_cert: str | None = None
    """Certificate that clients are shown; with it the router speaks HTTPS."""
    tls_key: str | None = None
    """Its key."""
    tls_client_ca: str | None = None
    """Who signs the certificates that clients must show."""
    engine_tls: bool = False
    """Speak HTTPS to engines."""
    engine_tls_ca: str | None = None
    """Who signs the engines' certificates, when not the system's authorities."""
    engine_tls_cert: str | None = None
    """Certificate that engines are shown."""
    engine_tls_key: str | None = None
    """Its key."""
    engine_tls_insecure: bool = False
    """Take any certificate of an engine."""

    def settings(self) -> TlsConfig:
        from ems.router.admission.tls import TlsConfig

        return TlsConfig(
            certificate=self.tls_cert,
            key=self.tls_key,
            client_authority=self.tls_client_ca,
            engine_tls=self.engine_tls,
            engine_authority=self.engine_tls_ca,
            engine_certificate=self.engine_tls_cert,
            engine_key=self.engine_tls_key,
            engine_insecure=self.engine_tls_insecure,
        )


def event_source(text: str) -> tuple[Address, EventSource]:
    """Read ``HOST:PORT=tcp://HOST:PORT`` with an optional second endpoint for replays behind a comma.

    :raises ConfigError: anything else.
    """
    from ems.errors import ConfigError
    from ems.http.address import Address
    from ems.router.config import EventSource

    instance, _, endpoints = text.partition("=")
    parts = [part.strip() for part in endpoints.split(",")]
    if not 1 <= len(parts) <= 2 or not all(map(_is_endpoint, parts)):
        raise ConfigError(
            f"{text!r} is no source of KV events: expected HOST:PORT=tcp://HOST:PORT, "
            "with ,tcp://HOST:PORT behind it where replays are had"
        )
    return Address.parse(instance), EventSource(*parts)


def told_nodes(texts: list[str], key: Path | None) -> dict[Address, PoolNode]:
    """Read what :meth:`PoolNode.parse` reads, which takes a key: nodes listen to nobody without.

    :raises ConfigError: anything else, or one of the two is missing.
    """
    from ems.errors import ConfigError
    from ems.pool.http.prefetch_hints import PoolNode

    if (key is None) != (not texts):
        raise ConfigError("--pool-nodes and --pool-key go together: nodes listen to nobody without a key")
    return by_instance("pool-nodes", map(PoolNode.parse, texts))


def by_instance(flag: str, pairs: Iterable[tuple[Address, Told]]) -> dict[Address, Told]:
    """Join what was said of instances.

    :raises ConfigError: an instance comes twice.
    """
    from ems.errors import ConfigError

    found: dict[Address, Told] = {}
    for instance, what in pairs:
        if instance in found:
            raise ConfigError(f"--{flag} names {instance} twice: expected each server once")
        found[instance] = what
    return found


def _is_endpoint(text: str) -> bool:
    """Whether one can connect to it; ``tcp://*:PORT`` says where to listen, and a socket's path has 107 bytes."""
    from ems.errors import ConfigError
    from ems.http.address import Address

    if text.startswith("tcp://"):
        try:
            Address.parse(text.removeprefix("tcp://"))
        except ConfigError:
            return False
        return True
    return re.fullmatch(r"ipc://\S{1,107}", text) is not None


def paired(role: str, hosts: list[str], ports: list[int]) -> tuple[Address, ...]:
    """Join the parallel lists of hosts and ports of one role (``prefiller``, ``decoder``).

    :raises ConfigError: the lists differ in length, or a host or a port is wrong.
    """
    from ems.errors import ConfigError
    from ems.http.address import Address

    if len(hosts) != len(ports):
        raise ConfigError(
            f"--{role}-hosts has {_count(hosts, 'host')} and --{role}-ports has {_count(ports, 'port')}: "
            "expected as many ports as hosts"
        )
    return tuple(Address.of(host, port) for host, port in zip(hosts, ports, strict=True))


def _count(items: list[str] | list[int], noun: str) -> str:
    return f"{len(items)} {noun}{'' if len(items) == 1 else 's'}"
