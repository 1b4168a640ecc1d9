"""TLS towards clients and towards engines.

What always holds: a certificate that is renewed on disk is taken for new connections, without a restart.
"""

from __future__ import annotations

import ssl
from pathlib import Path

import msgspec

from ems.errors import ConfigError
from ems.http.tls import client_context, load_certificate, server_context


class TlsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Files in PEM form.

    :raises ConfigError: a certificate without its key, or the other way round; files for a side that speaks no TLS.
    """

    certificate: str | None = None
    """What the router shows its clients, with what is between it and the root."""
    key: str | None = None
    client_authority: str | None = None
    """Who signs the certificates that clients must show; none asks for none."""
    engine_authority: str | None = None
    """Who signs the engines' certificates; those of the system when not given."""
    engine_certificate: str | None = None
    """What the router shows to engines."""
    engine_key: str | None = None
    engine_tls: bool = False
    """Whether engines are spoken to by TLS."""
    engine_insecure: bool = False
    """Whether any certificate of an engine will do."""

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise ConfigError("TLS takes both a certificate and its key: give --tls-cert and --tls-key")
        if (self.engine_certificate is None) != (self.engine_key is None):
            raise ConfigError("TLS to engines takes both: give --engine-tls-cert and --engine-tls-key")
        if self.client_authority is not None and self.certificate is None:
            raise ConfigError("--tls-client-ca asks clients for certificates, which takes --tls-cert and --tls-key")
        if not self.engine_tls and (self.engine_authority or self.engine_certificate or self.engine_insecure):
            raise ConfigError(
                "--engine-tls-ca, -cert, -key and -insecure say how engines are spoken to by TLS: give --engine-tls"
            )

    @property
    def watched(self) -> list[Path]:
        named = (self.certificate, self.key, self.engine_certificate, self.engine_key)
        return [Path(name) for name in named if name is not None]


def for_clients(config: TlsConfig) -> ssl.SSLContext | None:
    """What the listening socket speaks; None is plain HTTP.

    :raises ConfigError: a file cannot be used.
    """
    if config.certificate is None:
        return None
    return server_context(config.certificate, config.key, config.client_authority)


def for_engines(config: TlsConfig) -> ssl.SSLContext | None:
    """What connections to engines speak; None is plain HTTP.

    :raises ConfigError: a file cannot be used.
    """
    if not config.engine_tls:
        return None
    context = client_context(config.engine_authority, verify=not config.engine_insecure)
    if config.engine_certificate is not None:
        load_certificate(context, config.engine_certificate, config.engine_key)
    return context


def reload(config: TlsConfig, clients: ssl.SSLContext | None, engines: ssl.SSLContext | None) -> None:
    """Take renewed certificates for connections to come.

    :raises ConfigError: a file cannot be used.
    """
    if clients is not None and config.certificate is not None:
        load_certificate(clients, config.certificate, config.key)
    if engines is not None and config.engine_certificate is not None:
        load_certificate(engines, config.engine_certificate, config.engine_key)
