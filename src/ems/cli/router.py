"""``ems router``, also ``ems proxy``: an OpenAI-compatible router in front of prefill and decode servers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from ems.cli.router_flags import AdmissionFlags, ObserveFlags, TlsFlags, by_instance, event_source, paired, told_nodes

_Many = Parameter(consume_multiple=True, negative=())


def router(
    *,
    port: int = 8000,
    host: str = "127.0.0.1",
    workers: int = 1,
    prefiller_hosts: Annotated[list[str] | None, _Many] = None,
    prefiller_ports: Annotated[list[int] | None, _Many] = None,
    decoder_hosts: Annotated[list[str] | None, _Many] = None,
    decoder_ports: Annotated[list[int] | None, _Many] = None,
    config: Path | None = None,
    manifests: Path | None = None,
    kubeconfig: str | None = None,
    kube_context: str | None = None,
    in_cluster: bool = False,
    namespace: str | None = None,
    max_retries: int = 3,
    retry_delay: float = 0.001,
    connect_timeout: float = 3.0,
    prefill_timeout: float = 600.0,
    idle_timeout: float = 1800.0,
    drain_timeout: float = 30.0,
    prefill_above: int = 0,
    session_header: str = "X-Session-Id",
    session_lifetime: float = 600.0,
    kv_events: Annotated[list[str] | None, _Many] = None,
    tokenize_within: float = 0.0,
    pool_nodes: Annotated[list[str] | None, _Many] = None,
    pool_key: Path | None = None,
    max_body_mib: int = 64,
    admission: AdmissionFlags = AdmissionFlags(),  # noqa: B008  frozen
    observe: ObserveFlags = ObserveFlags(),  # noqa: B008
    tls: TlsFlags = TlsFlags(),  # noqa: B008
    log_level: Literal["debug", "info", "warning", "error"] = "info",
) -> int:
    """Run an OpenAI-compatible router in front of prefill and decode servers.

    Each request is prefilled on one server and decoded on another, where its first token is expected first.
    Without prefill servers it balances over the decode servers.

    Args:
        port: Port to listen on; 0 takes a free one.
        host: Address to listen on.
        workers: Processes that serve the port, and choose as one router would.
        prefiller_hosts: Hosts of the prefill servers.
        prefiller_ports: Ports of the prefill servers, as many as hosts.
        decoder_hosts: Hosts of the decode servers.
        decoder_ports: Ports of the decode servers, as many as hosts.
        config: The configuration file of Kthena's router, whose plugins then choose servers.
        manifests: Folder or file with Kthena's ModelServers and ModelRoutes, and pods, instead of hosts and ports.
        kubeconfig: A kubeconfig: these objects are followed on its API server.
        kube_context: The context of the kubeconfig, if not its current one.
        in_cluster: Follow these objects on the API server of the cluster in which the router runs as a pod.
        namespace: The namespace whose objects count, if not all.
        max_retries: How often a failed prefill or decode is tried again.
        retry_delay: Seconds before the first retry, doubled for each further one.
        connect_timeout: Seconds until a connection to a server stands.
        prefill_timeout: Seconds for a prefill; after them the decode server does the whole request.
        idle_timeout: Seconds of silence after which an answer is given up.
        drain_timeout: Seconds that running requests get to finish after SIGTERM.
        prefill_above: Tokens that must be left to compute for a prefill server to be asked; 0 always asks one.
        session_header: Header that names a conversation, whose turns stay on the same servers.
        session_lifetime: Seconds for which a conversation's servers are remembered after its last turn.
        kv_events: Where servers publish KV events: HOST:PORT=tcp://HOST:PORT, with ,tcp://HOST:PORT for replays.
        tokenize_within: Seconds for a server to say the token ids of a text, so that KV events count; 0 asks for none.
        pool_nodes: Pool nodes of servers' hosts, told of prompts that come: HOST:PORT=http://[TENANT@]HOST:PORT.
        pool_key: File with the token of these nodes, or the tenants' key.
        max_body_mib: Largest request body in MiB.
        admission: Who may send requests, and how much.
        observe: What is written of requests.
        tls: TLS towards clients and engines.
        log_level: What is logged to stderr.
    """
    from ems.errors import ConfigError
    from ems.kubernetes.access import ClusterAccess
    from ems.router.config import RouterConfig
    from ems.router.server import serve

    if kubeconfig is not None and in_cluster:
        raise ConfigError("--kubeconfig and --in-cluster were both given: expected one of them")
    followed = kubeconfig is not None or in_cluster
    if not followed and (namespace is not None or kube_context is not None):
        raise ConfigError("--namespace and --kube-context need --kubeconfig or --in-cluster")
    access = ClusterAccess(kubeconfig=kubeconfig, context=kube_context, namespace=namespace) if followed else None
    admitted = admission.settings()
    if config is not None and admitted.tokens is None:
        from ems.router.kthena.router_file import read

        admitted = read(config).admitted(admitted)
    settings = RouterConfig(
        router_file=config,
        prefills=paired("prefiller", prefiller_hosts or [], prefiller_ports or []),
        decodes=paired("decoder", decoder_hosts or [], decoder_ports or []),
        manifests=manifests,
        cluster=access,
        host=host,
        port=port,
        workers=workers,
        max_retries=max_retries,
        retry_delay=retry_delay,
        connect_timeout=connect_timeout,
        prefill_timeout=prefill_timeout,
        idle_timeout=idle_timeout,
        drain_timeout=drain_timeout,
        prefill_above=prefill_above,
        session_header=session_header.lower().encode(),
        session_lifetime=session_lifetime,
        kv_events=by_instance("kv-events", map(event_source, kv_events or [])),
        tokenize_within=tokenize_within,
        pool_nodes=told_nodes(pool_nodes or [], pool_key),
        pool_key=pool_key,
        max_body_bytes=max_body_mib << 20,
        admission=admitted,
        observe=observe.settings(),
        tls=tls.settings(),
    )
    return serve(settings, log_level=log_level)
