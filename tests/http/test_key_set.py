from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from aiohttp import web

from ems.errors import ConfigError
from ems.http import key_set
from ems.http.bearer import TokenRefused
from ems.http.key_set import KeySetUrl
from tests.http.test_bearer import KEY, OTHER, checker, signed

PUBLIC = {"keys": [OTHER.as_dict(private=False)]}


class Issuer:
    def __init__(self) -> None:
        self.asked = 0
        self.body = msgspec.json.encode(PUBLIC)
        self.status = 200

    async def answer(self, request: web.Request) -> web.Response:
        self.asked += 1
        return web.Response(body=self.body, status=self.status)


@asynccontextmanager
async def issuer() -> AsyncIterator[tuple[Issuer, str]]:
    here = Issuer()
    app = web.Application()
    app.router.add_get("/jwks", here.answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield here, f"http://127.0.0.1:{runner.addresses[0][1]}/jwks"
    finally:
        await runner.cleanup()


async def test_keys_come_from_a_url_and_are_not_asked_for_by_everybody() -> None:
    async with issuer() as (here, url):
        tokens = checker()
        source = KeySetUrl(url, tokens)

        assert await source.renew()
        assert tokens.recognise(signed(OTHER), 0.0).user == "alice"
        assert not await source.renew()
        assert here.asked == 1


@pytest.mark.parametrize(("status", "body"), [(500, b""), (200, b"<html>"), (200, b'{"keys": 1}')])
async def test_an_issuer_that_says_nonsense_changes_nothing(status: int, body: bytes) -> None:
    async with issuer() as (here, url):
        here.status, here.body = status, body
        tokens = checker()

        assert not await KeySetUrl(url, tokens).renew()
        assert tokens.recognise(signed(KEY), 0.0).user == "alice"


async def test_an_issuer_that_is_gone_changes_nothing() -> None:
    async with issuer() as (_, url):
        pass

    assert not await KeySetUrl(url, checker()).renew()


async def test_a_new_key_is_asked_for_again_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_set, "LEAST_SECONDS", 0.0)
    async with issuer() as (here, url):
        source = KeySetUrl(url, checker())
        assert await source.renew()
        assert await source.renew()
        assert here.asked == 2


async def test_keys_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "jwks.json"
    tokens = checker()
    with pytest.raises(ConfigError, match=f"^Cannot read the key set {path}: "):
        key_set.load(path, tokens)
    path.write_bytes(msgspec.json.encode(PUBLIC))
    key_set.load(path, tokens)

    assert tokens.recognise(signed(OTHER), 0.0).user == "alice"
    with pytest.raises(TokenRefused):
        tokens.recognise(signed(KEY), 0.0)
