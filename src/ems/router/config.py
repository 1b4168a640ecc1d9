"""What the router was told, checked once so that everything behind may trust it."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from ems.errors import ConfigError
from ems.http.address import Address
from ems.kubernetes.access import ClusterAccess
from ems.pool.http.prefetch_hints import PoolNode
from ems.router.admission.settings import AdmissionConfig
from ems.router.admission.tls import TlsConfig
from ems.router.observe.settings import ObserveConfig

MOST_WORKERS: Final = 64


class EventSource(NamedTuple):
    """Where an engine publishes its KV events, and where it is asked for those that were missed, if anywhere."""

    endpoint: str
    replay: str = ""


class RouterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one router process; the constructor refuses what cannot work.

    :raises ConfigError: a value out of its range, an instance named twice, no decode instance at all.
    """

    decodes: tuple[Address, ...] = ()
    """Instances that decode; at least one, unless there are ``manifests``.  Without prefill instances they do all."""
    prefills: tuple[Address, ...] = ()
    """Instances that prefill; none makes the router a plain balancer."""
    manifests: Path | None = None
    """Folder or file of Kthena's objects, which then say what instances there are, and for which models."""
    router_file: Path | None = None
    """The configuration file of Kthena's router: which plugins choose instances."""
    cluster: ClusterAccess | None = None
    """A Kubernetes API server that has these objects."""
    host: str = "127.0.0.1"
    """The address to listen on."""
    port: int = 8000
    """The port to listen on; 0 takes any free one."""
    max_retries: int = 3
    """How often a failed prefill, and apart from it a failed decode, is tried again."""
    retry_delay: float = 0.001
    """Seconds before the first retry; doubled for each further one, at most :data:`~ems.router.dispatch.DELAY_CAP`."""
    connect_timeout: float = 3.0
    """Seconds until a connection to an instance stands."""
    prefill_timeout: float = 600.0
    """Seconds for the whole prefill of one request, retries included; then decode goes on without it."""
    idle_timeout: float = 1800.0
    """Seconds without a byte from the decode instance, or without the client taking one, until a request is given up.
    A non-streamed answer arrives at its end only, so this also bounds how long such an answer may take."""
    request_timeout: float | None = None
    """Seconds for a request as a whole; None is no bound but the others."""
    body_timeout: float = 60.0
    """Seconds for the client to send its request's body."""
    probe_timeout: float = 5.0
    """Seconds for an instance to answer ``/health``, ``/metrics``, ``/v1/models`` or ``/reset_prefix_cache``."""
    drain_timeout: float = 30.0
    """Seconds that running requests get to finish after SIGTERM."""
    prefill_above: int = 0
    """Tokens that must be left to compute for a prefill instance to be asked; fewer are computed by decode itself."""
    session_header: bytes = b"x-session-id"
    """The header, in lower case, that names a conversation, whose turns go to the same instances."""
    session_lifetime: float = 600.0
    """Seconds for which a conversation's instances are remembered after its last turn."""
    workers: int = 1
    """Processes that serve the port."""
    kv_events: dict[Address, EventSource] = {}
    """Where instances publish their KV events."""
    tokenize_within: float = 0.0
    """Seconds for an instance to say the token ids of a prompt of text, which events tell of; 0 asks for none."""
    pool_nodes: dict[Address, PoolNode] = {}
    """The pool node of an instance's host, which is told of prompts that go there."""
    pool_key: Path | None = None
    """File with the nodes' token, or the tenants' key."""
    max_body_bytes: int = 64 << 20
    """Largest request body; what is larger is refused with 413."""
    admission: AdmissionConfig = AdmissionConfig()
    observe: ObserveConfig = ObserveConfig()
    tls: TlsConfig = TlsConfig()

    def __post_init__(self) -> None:
        given = (self.decodes or self.prefills, self.manifests is not None, self.cluster is not None)
        if sum(map(bool, given)) > 1:
            ways = "--decoder-hosts, --manifests, --kubeconfig and --in-cluster"
            raise ConfigError(f"What is served was given twice: expected one of {ways}")
        if not any(given[1:]) and not self.decodes:
            ways = "--decoder-hosts with --decoder-ports, or --manifests, --kubeconfig or --in-cluster"
            raise ConfigError(f"No decode instance was given: expected {ways}")
        for role, addresses in (("prefill", self.prefills), ("decode", self.decodes)):
            twice = {str(address) for address in addresses if addresses.count(address) > 1}
            if twice:
                raise ConfigError(f"The {role} instance {min(twice)} was given twice: name each instance once")
        if self.tokenize_within and not self.kv_events and not self.pool_nodes:
            raise ConfigError("--tokenize-within is for KV events and pool nodes: add --kv-events or --pool-nodes")
        self._check_numbers()
        self._check_workers()
        if not re.fullmatch(rb"[a-z0-9!#$%&'*+.^_`|~-]+", self.session_header):
            raise ConfigError("--session-header is no header's name: expected one such as X-Session-Id")

    @property
    def takes_limits(self) -> bool:
        """Whether limits of tokens hold for the router as a whole; those of several workers do with a Redis alone."""
        return self.workers == 1 or self.admission.limits_redis is not None

    def share(self, number: int) -> AdmissionConfig:
        """Return what holds in one worker, which has its share of the places."""
        whole, count = self.admission, self.workers
        return msgspec.structs.replace(
            whole,
            max_running=whole.max_running // count + (number < whole.max_running % count),
            queue_size=math.ceil(whole.queue_size / count),
        )

    def _check_workers(self) -> None:
        if not 1 <= self.workers <= MOST_WORKERS:
            raise ConfigError(f"--workers {self.workers} is out of range: expected 1 to {MOST_WORKERS}")
        if self.admission.limit is not None and not self.takes_limits:
            raise ConfigError(f"--workers {self.workers} would each take the whole limit of tokens: add --limits-redis")
        if 0 < self.admission.max_running < self.workers:
            raise ConfigError(
                f"--max-running {self.admission.max_running} gives some of --workers {self.workers} nothing to run: "
                "expected at least 1 a worker"
            )

    def _check_numbers(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port {self.port} is out of range: expected 0 (any free port) to 65535")
        if not 0 <= self.max_retries <= 100:
            raise ConfigError(f"--max-retries {self.max_retries} is out of range: expected 0 to 100")
        if not 0 <= self.retry_delay < math.inf:
            raise ConfigError(f"--retry-delay {self.retry_delay} is not a delay: expected seconds, 0 or more")
        if self.prefill_above < 0:
            raise ConfigError(f"--prefill-above {self.prefill_above} is no number of tokens: expected 0 or more")
        for name in ("session_lifetime", "tokenize_within"):
            if not 0 <= getattr(self, name) < math.inf:
                given = f"--{name.replace('_', '-')} {getattr(self, name)}"
                raise ConfigError(f"{given} is no time: expected seconds, 0 or more")
        if self.max_body_bytes < 1:
            raise ConfigError("--max-body-mib must be at least 1")
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if name.endswith("_timeout") and value is not None and not 0 < value < math.inf:
                given = f"--{name.replace('_', '-')} {getattr(self, name)}"
                raise ConfigError(f"{given} is not a time-out: expected seconds, more than 0")
