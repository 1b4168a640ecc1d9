"""A client of OpenAI-compatible servers that times the first token; knows nothing of what is measured with it."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from http import HTTPStatus

import aiohttp
import msgspec

from ems.errors import ConfigError, EmsError


class ServerError(EmsError):
    """A server does not answer, or not as an OpenAI-compatible server does."""


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """One answered request; times in seconds since it was sent."""

    first_token: float
    whole: float
    text: str


class _Choice(msgspec.Struct):
    text: str = ""


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    error: msgspec.Raw = msgspec.Raw(b"")


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


_CHUNK = msgspec.json.Decoder(_Chunk)
_MODELS = msgspec.json.Decoder(_Models)


def base_url(name: str, text: str) -> str:
    url = text if "://" in text else f"http://{text}"
    scheme, _, rest = url.partition("://")
    host, _, port = rest.partition("/")[0].partition(":")
    if scheme not in {"http", "https"} or not host or " " in rest or (port and not port.isdigit()):
        raise ConfigError(f"{name} is {text!r}, expected something like http://127.0.0.1:8000")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


class CompletionClient:
    """Asks one server; many requests may be under way at the same time in the given session."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self.url = url

    async def models(self) -> list[str]:
        address = f"{self.url}/v1/models"
        try:
            async with self._session.get(address) as answer:
                body = await answer.read()
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise ServerError(f"{self.url} does not answer: {_reason(error)}") from error
        try:
            return [model.id for model in _MODELS.decode(body).data]
        except msgspec.DecodeError:
            answered = f"{address} answers with status {answer.status} and no list of models"
            raise ServerError(f"{answered}, expected an OpenAI-compatible server") from None

    async def complete(self, model: str, prompt: Sequence[int], max_tokens: int) -> Completion:
        """Send a prompt of token ids and read the stream of exactly ``max_tokens`` tokens, chosen greedily."""
        options = {"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        body = msgspec.json.encode({"model": model, "prompt": prompt, **options})
        try:
            return await self._stream(body)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ServerError(f"{self.url} broke off a completion ({_reason(error)})") from error

    async def _stream(self, body: bytes) -> Completion:
        sent = time.perf_counter()
        first: float | None = None
        text: list[str] = []
        headers = {"Content-Type": "application/json"}
        async with self._session.post(f"{self.url}/v1/completions", data=body, headers=headers) as answer:
            if answer.status != HTTPStatus.OK:
                reason = " ".join((await answer.text(errors="replace"))[:200].split())
                raise ServerError(f"{self.url} refuses a completion with status {answer.status}: {reason}")
            async for line in answer.content:
                if not line.startswith(b"data:") or line[5:].strip() == b"[DONE]":
                    continue
                chunk = self._chunk(line[5:])
                if chunk.choices:
                    first = time.perf_counter() - sent if first is None else first
                    text.append(chunk.choices[0].text)
        if first is None:
            raise ServerError(f"{self.url} answers a completion without a token, expected a stream of events")
        return Completion(first_token=first, whole=time.perf_counter() - sent, text="".join(text))

    def _chunk(self, data: bytes) -> _Chunk:
        try:
            chunk = _CHUNK.decode(data)
        except msgspec.DecodeError as error:
            raise ServerError(f"{self.url} streams something else than completions: {error}") from error
        if bytes(chunk.error) not in {b"", b"null"}:
            reason = bytes(chunk.error)[:200].decode(errors="replace")
            raise ServerError(f"{self.url} breaks off a completion: {reason}")
        return chunk


def _reason(error: BaseException) -> str:
    if isinstance(error, aiohttp.ClientConnectorError):
        number = error.os_error.errno or 0
        return os.strerror(number).lower() if number > 0 else str(error.os_error.strerror)
    return " ".join(str(error).split()) or type(error).__name__
