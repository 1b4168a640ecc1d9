"""Completion requests: what is read out of a client's body.

A body is decoded once, into its top-level fields with each value's own bytes, so that nothing but what the router
owns is ever encoded again: numbers keep their digits, strings their escapes.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Final, Self

import msgspec
from msgspec import Raw

from ems.engines.tokenize import first_ids, tokens_say_all
from ems.http.message import Refusal
from ems.router.choosing.prefix_index import MOST_PIECES, block_hashes, prefix_hashes
from ems.router.choosing.prompt import Prompt

DEFAULT_OUTPUT: Final = 256
"""Tokens assumed for an answer whose length the client did not bound."""

OUTPUT_CAP: Final = 4096
"""Most tokens counted for an answer: bounds are often far above what is used."""

REQUEST_OVERHEAD: Final = 64
"""Tokens that every request costs on top of its own, so that many small ones count."""

IMAGE_TOKENS: Final = 1024
"""Tokens assumed for an inlined image, audio or video, whatever its size in base64."""

MOST_OF_A_NAME: Final = 256
"""Characters of a model's name, as in Kthena; names are kept for logs and metrics."""

_fields = msgspec.json.Decoder(dict[str, Raw])
_list = msgspec.json.Decoder(list[Raw])
_text = msgspec.json.Decoder(str)
_number = msgspec.json.Decoder(int)
_encode = msgspec.json.Encoder().encode

_NULL = b"null"
_BEFORE_THE_PROMPT = ("model", "cache_salt", "tools")
"""Fields that change the KV of everything behind them."""
_PROMPTS = ("messages", "prompt", "input")
"""Where prompts stand; each endpoint takes one and passes over the others, so the largest counts."""
_RENDERED = ("tools", "instructions", "documents")
"""Fields that become part of the prompt."""
_MEDIA = re.compile(rb'url"\s*:\s*"data:[^"]{0,128}?;base64,')
_IDS = re.compile(rb"\[\s*\d")
_BATCH = re.compile(rb'\[\s*["\[\]]')  # not a list of tokens, which is one prompt


class CompletionRequest:
    """A client's request: its bytes, its top-level fields, its estimated tokens."""

    __slots__ = ("_ids", "_text", "body", "fields", "model", "output_tokens", "prompt_tokens", "single")

    def __init__(self, body: bytes, fields: dict[str, Raw]) -> None:
        self.body = body
        self.fields = fields
        self._text = max([bytes(fields[name]) for name in _PROMPTS if name in fields], key=len, default=b"")
        rendered = sum([len(bytes(fields[name])) for name in _RENDERED if name in fields])
        self.prompt_tokens = _prompt_tokens(self._text) + rendered // 4
        self.output_tokens = _output_tokens(fields)
        self.single = _is_single(fields)
        """Whether it is for one sequence."""
        try:
            self.model = _text.decode(fields.get("model", b'""'))
        except ValueError:
            self.model = ""
        """The model that is asked for; empty where none is named."""
        self._ids: Sequence[int] = ()

    @property
    def priority(self) -> int:
        given = self.fields.get("priority")
        try:
            return 0 if given is None else _number.decode(given)
        except ValueError:
            return 0  # null, or something the engine will refuse

    @classmethod
    def of(cls, fields: dict[str, Raw]) -> Self:
        return cls(_encode(fields), fields)

    def renamed(self, model: str) -> CompletionRequest:
        """The same request for another model."""
        if model == self.model:
            return self
        return CompletionRequest.of({**self.fields, "model": Raw(_encode(model))})

    def tokenized(self, ids: Sequence[int]) -> None:
        """Take the token ids that an engine makes of the prompt."""
        self._ids = ids
        self.prompt_tokens = len(ids)

    def prompt(self, session: bytes = b"", block_tokens: int = 0, adapters: Collection[str] = ()) -> Prompt:
        """Return what matters for choosing; with known token ids and ``block_tokens`` a piece has so many of these."""
        salt = b"\0".join(bytes(self.fields.get(name, b"")) for name in _BEFORE_THE_PROMPT)
        blocks = self._blocks(block_tokens, adapters) if block_tokens else None
        text = prefix_hashes(self._text, salt) if blocks is None or self._ids else []
        if blocks is None:
            return Prompt(self.prompt_tokens, len(self._text), text, session)
        return Prompt(self.prompt_tokens, len(self._text), blocks, session, block_tokens, text)

    def _blocks(self, block_tokens: int, adapters: Collection[str]) -> list[int] | None:
        ids = self.token_ids()[: MOST_PIECES * block_tokens]
        adapter = self.model if adapters and self.model in adapters else ""
        return block_hashes(ids, block_tokens, adapter) if ids else None

    def token_ids(self) -> Sequence[int]:
        """The prompt's token ids; none where they are not known, or do not say by themselves what its KV is."""
        if not self._ids and not (_IDS.match(self._text) and tokens_say_all(self.fields)):
            return ()
        try:
            return self._ids or first_ids(self._text)
        except msgspec.DecodeError:
            return ()  # the engine will refuse it

    @property
    def decode_cost(self) -> int:
        return self.prompt_tokens + self.output_tokens + REQUEST_OVERHEAD


def parse(body: bytes) -> CompletionRequest:
    """Read a client's body.

    :raises Refusal: 400: not JSON, or not an object; 404: no model has such a name.
    """
    try:
        request = CompletionRequest(body, _fields.decode(body))
    except msgspec.ValidationError:
        raise Refusal(400, "The request body must be a JSON object", code="invalid_body") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise Refusal(400, f"The request body is not valid JSON: {reason}", code="invalid_json") from None
    if len(request.model) > MOST_OF_A_NAME:
        message = f"The model's name has more than {MOST_OF_A_NAME} characters: there is none of that name"
        raise Refusal(404, message, code="model_not_found", param="model")
    return request


def _is_single(fields: dict[str, Raw]) -> bool:
    for name in ("n", "best_of"):
        number = fields.get(name)
        if number is not None and bytes(number) not in (b"1", _NULL):
            return False
    beams = fields.get("use_beam_search")
    if beams is not None and bytes(beams) not in (b"false", _NULL):
        return False
    return not any(_is_batch(fields.get(name)) for name in ("prompt", "prompt_embeds"))


def _is_batch(prompt: Raw | None) -> bool:
    """Whether a prompt is a list of texts or of token lists, with other than one entry."""
    return prompt is not None and _BATCH.match(bytes(prompt)) is not None and len(_list.decode(prompt)) != 1


def _prompt_tokens(text: bytes) -> int:
    """Estimate from sizes alone: 4 bytes of text a token, or one an integer where the prompt is token ids."""
    if text.startswith(b"[") and b'"' not in text:
        return text.count(b",") + 1
    inlined, media = _inline_media(text)
    return (len(text) - inlined) // 4 + media * IMAGE_TOKENS


def _inline_media(text: bytes) -> tuple[int, int]:
    """Return how many bytes are inlined media, and how many pieces those are; each ends with its JSON string."""
    size = pieces = 0
    at = _MEDIA.search(text)
    while at is not None:
        end = text.find(b'"', at.end())
        size += end - at.end()
        pieces += 1
        at = _MEDIA.search(text, end)
    return size, pieces


def _output_tokens(fields: dict[str, Raw]) -> int:
    bound = fields.get("max_completion_tokens") or fields.get("max_tokens") or fields.get("max_output_tokens")
    if bound is None:
        return DEFAULT_OUTPUT
    try:
        return max(0, min(_number.decode(bound), OUTPUT_CAP))
    except ValueError:
        return DEFAULT_OUTPUT  # null, or something the engine will refuse
