from __future__ import annotations

import asyncio
import ssl
from pathlib import Path
from typing import Any

import pytest

from ems.errors import ConfigError
from ems.router.admission.tls import TlsConfig, for_clients, for_engines, reload
from tests.kit.certificates import Authority


async def greet(server: ssl.SSLContext, client: ssl.SSLContext) -> tuple[str, bytes]:
    """What a client reads over TLS, and the server's certificate."""

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello")
        await writer.drain()
        writer.close()

    listening = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=server)
    async with listening:
        port = listening.sockets[0].getsockname()[1]
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=client)
        shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        text = (await reader.read()).decode()
        writer.close()
        await asyncio.sleep(0)
    return text, shown


def contexts(config: TlsConfig) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    server, client = for_clients(config), for_engines(config)
    assert server is not None
    assert client is not None
    return server, client


async def test_both_sides_know_each_other_by_their_authority(tmp_path: Path) -> None:
    ca = Authority(tmp_path)
    server, client = ca.sign("server"), ca.sign("client")
    config = TlsConfig(
        certificate=server[0],
        key=server[1],
        client_authority=str(ca.file),
        engine_tls=True,
        engine_authority=str(ca.file),
        engine_certificate=client[0],
        engine_key=client[1],
    )

    assert (await greet(*contexts(config)))[0] == "hello"


async def test_a_stranger_is_refused_unless_told_otherwise(tmp_path: Path) -> None:
    certificate, key = Authority(tmp_path, "unknown").sign("server")
    known = Authority(tmp_path, "known")
    config = TlsConfig(certificate=certificate, key=key, engine_tls=True, engine_authority=str(known.file))
    with pytest.raises(ssl.SSLCertVerificationError):
        await greet(*contexts(config))
    blind = TlsConfig(certificate=certificate, key=key, engine_tls=True, engine_insecure=True)

    assert (await greet(*contexts(blind)))[0] == "hello"


async def test_a_renewed_certificate_is_shown_without_a_restart(tmp_path: Path) -> None:
    ca = Authority(tmp_path)
    certificate, key = ca.sign("server")
    config = TlsConfig(certificate=certificate, key=key, engine_tls=True, engine_authority=str(ca.file))
    server, client = contexts(config)
    before = await greet(server, client)
    ca.sign("server")
    reload(config, server, client)
    after = await greet(server, client)
    Path(certificate).write_text("nonsense")  # noqa: ASYNC240  a test waits for nobody
    with pytest.raises(ConfigError):
        reload(config, server, client)

    assert before[1] != after[1]
    assert await greet(server, client) == after


def test_without_certificates_there_is_no_tls() -> None:
    assert for_clients(TlsConfig()) is None
    assert for_engines(TlsConfig()) is None
    assert TlsConfig().watched == []


def test_mistakes_are_said(tmp_path: Path) -> None:
    certificate, _ = Authority(tmp_path).sign("server")
    _, other = Authority(tmp_path, "other").sign("else")
    _, hidden = Authority(tmp_path, "third").sign("hidden", password=b"x")
    wrong: tuple[dict[str, Any], ...] = ({"certificate": "x"}, {"engine_key": "x"}, {"client_authority": "x"})
    for settings in wrong:
        with pytest.raises(ConfigError):
            TlsConfig(**settings)
    unused: tuple[dict[str, Any], ...] = (
        {"engine_authority": "x"},
        {"engine_certificate": "x", "engine_key": "x"},
        {"engine_insecure": True},
    )
    for settings in unused:  # engines would be spoken to in the clear
        with pytest.raises(ConfigError, match=r"give --engine-tls$"):
            TlsConfig(**settings)
    for key in (other, hidden, str(tmp_path / "none")):
        with pytest.raises(ConfigError, match="Cannot use the certificate"):
            for_clients(TlsConfig(certificate=certificate, key=key))
    with pytest.raises(ConfigError, match="Cannot use the certificates"):
        for_engines(TlsConfig(engine_tls=True, engine_authority=str(tmp_path / "none")))
