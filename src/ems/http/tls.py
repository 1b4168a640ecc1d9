"""TLS of a server and of a client.

What always holds: TLS 1.2 or newer, HTTP/1.1; a renewed certificate is for connections to come, and one that makes no
sense changes nothing.
"""

from __future__ import annotations

import ssl

from ems.errors import ConfigError


def server_context(certificate: str, key: str | None, client_authority: str | None = None) -> ssl.SSLContext:
    """Show a certificate; with ``client_authority`` ask clients for one that it signed.  All are files in PEM form.

    :raises ConfigError: a file cannot be used.
    """
    context = _context(ssl.Purpose.CLIENT_AUTH, client_authority)
    load_certificate(context, certificate, key)
    if client_authority is not None:
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def client_context(authority: str | None = None, *, verify: bool = True) -> ssl.SSLContext:
    """Believe servers that ``authority``, or one of the system's, signed for; ``verify`` off: all of them.

    :raises ConfigError: the file cannot be used.
    """
    context = _context(ssl.Purpose.SERVER_AUTH, authority)
    if not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def load_certificate(context: ssl.SSLContext, certificate: str, key: str | None) -> None:
    """Show this certificate from now on.

    :raises ConfigError: a file cannot be used.
    """
    try:
        # A probe first: a context that took a certificate and then refuses its key would be of no use.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password=_no_password)
        context.load_cert_chain(certificate, key, password=_no_password)
    except (OSError, ssl.SSLError, ValueError) as error:
        raise ConfigError(f"Cannot use the certificate {certificate} with the key {key}: {_said(error)}") from None


def _context(purpose: ssl.Purpose, authority: str | None) -> ssl.SSLContext:
    context = ssl.create_default_context(purpose)
    context.set_alpn_protocols(["http/1.1"])
    if authority is not None:
        try:
            context.load_verify_locations(authority)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"Cannot use the certificates of {authority}: {_said(error)}") from None
    return context


def _no_password() -> str:
    raise ConfigError("the key has a password, which nobody could type when it is renewed: store it without one")


def _said(error: Exception) -> str:
    return getattr(error, "strerror", None) or getattr(error, "reason", None) or str(error)
