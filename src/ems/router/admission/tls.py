"""TLS towards clients and towards engines.

What always holds: TLS 1.2 or newer; a certificate that is renewed on disk is taken for new connections, without a
restart, and one that makes no sense changes nothing.
"""

from __future__ import annotations

import ssl
from pathlib import Path

import msgspec

from ems.errors import ConfigError


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
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.set_alpn_protocols(["http/1.1"])
    _load(context, config.certificate, config.key)
    if config.client_authority is not None:
        _trust(context, config.client_authority)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def for_engines(config: TlsConfig) -> ssl.SSLContext | None:
    """What connections to engines speak; None is plain HTTP.

    :raises ConfigError: a file cannot be used.
    """
    if not config.engine_tls:
        return None
    context = ssl.create_default_context(ssl.Purpose.SERVER_AUTH)
    context.set_alpn_protocols(["http/1.1"])
    if config.engine_authority is not None:
        _trust(context, config.engine_authority)
    if config.engine_certificate is not None:
        _load(context, config.engine_certificate, config.engine_key)
    if config.engine_insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def reload(config: TlsConfig, clients: ssl.SSLContext | None, engines: ssl.SSLContext | None) -> None:
    """Take renewed certificates for connections to come.

    :raises ConfigError: a file cannot be used.
    """
    if clients is not None and config.certificate is not None:
        _load(clients, config.certificate, config.key)
    if engines is not None and config.engine_certificate is not None:
        _load(engines, config.engine_certificate, config.engine_key)


def _load(context: ssl.SSLContext, certificate: str, key: str | None) -> None:
    try:
        # A probe first: a context that took a certificate and then refuses its key would be of no use.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password=_no_password)
        context.load_cert_chain(certificate, key, password=_no_password)
    except (OSError, ssl.SSLError, ValueError) as error:
        raise ConfigError(f"Cannot use the certificate {certificate} with the key {key}: {_said(error)}") from None


def _trust(context: ssl.SSLContext, authority: str) -> None:
    try:
        context.load_verify_locations(authority)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"Cannot use the certificates of {authority}: {_said(error)}") from None


def _no_password() -> str:
    raise ConfigError("the key has a password, which nobody could type when it is renewed: store it without one")


def _said(error: Exception) -> str:
    return getattr(error, "strerror", None) or getattr(error, "reason", None) or str(error)
