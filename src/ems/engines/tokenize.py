"""What ``/tokenize`` of an engine takes and says: the token ids that a prompt of text becomes.

An engine renders a chat there as it does for an answer, but takes fewer fields.  What else its chat template sees of a
request goes into ``chat_template_kwargs``, where vLLM puts it by itself for an answer; what an assistant thought is
given the name that vLLM knows it by.

What always holds: nothing is asked for a prompt whose token ids do not say all of it, such as one with images.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta, Raw

_OF_COMPLETIONS: Final = ("model", "add_special_tokens")
_OF_CHATS: Final = (
    *("model", "messages", "tools", "add_generation_prompt", "continue_final_message", "add_special_tokens"),
    *("chat_template", "chat_template_kwargs"),
)
_OF_TEMPLATES: Final = ("documents", "reasoning_effort")
_BESIDE_TOKENS: Final = ("cache_salt", "prompt_embeds", "truncate_prompt_tokens", "suffix")
"""Fields by which a prompt's KV is not that of all its tokens, or not of them alone."""
_NULL: Final = Raw(b"null")
_MOST_READ: Final = 2 << 20
"""Bytes of a list of token ids; nobody looks at what comes behind, which would take ten times its size in memory."""
_MOST_ASKED: Final = 2 << 20
"""Bytes of a prompt of text: some half a million tokens, more than an engine can say in time."""


TokenId = Annotated[int, Meta(ge=0, lt=2**32)]


class _Part(msgspec.Struct):
    type: Literal["text", "input_text", "output_text", "refusal", "thinking"]


class _Message(msgspec.Struct):
    content: str | list[_Part] | None = None
    reasoning_content: Raw = _NULL


class _Tokenized(msgspec.Struct):
    tokens: Annotated[list[TokenId], Meta(min_length=1)]


_messages = msgspec.json.Decoder(list[_Message])
_one_text = msgspec.json.Decoder(tuple[Raw])
_object = msgspec.json.Decoder(dict[str, Raw])
_objects = msgspec.json.Decoder(list[dict[str, Raw]])
_tokenized = msgspec.json.Decoder(_Tokenized)
_ids = msgspec.json.Decoder(list[TokenId])
_encode = msgspec.json.Encoder().encode


def tokenize_body(path: str, fields: dict[str, Raw]) -> bytes | None:
    """Return what an engine is asked for the token ids of a request to ``path``; None where that makes no sense."""
    if not tokens_say_all(fields):
        return None
    body = None
    try:
        if path == "/v1/completions" and "prompt" in fields:
            body = _of_completion(fields)
        elif path == "/v1/chat/completions" and "messages" in fields:
            body = _of_chat(fields)
    except (ValueError, RecursionError):
        pass  # nothing that an engine takes, or no text alone
    return None if body is None or len(body) > _MOST_ASKED else body


def tokens_say_all(fields: Mapping[str, Raw]) -> bool:
    """Whether nothing but the tokens of its prompt says what KV a request has."""
    return all(_is_null(fields.get(name)) for name in _BESIDE_TOKENS)


def token_ids_of(answer: bytes) -> list[int]:
    """Return the token ids of an answer.

    :raises ValueError: it has none.
    """
    try:
        return _tokenized.decode(answer).tokens
    except RecursionError:
        raise ValueError("nested too deeply") from None


def first_ids(prompt: bytes) -> list[int]:
    """Return the token ids of a prompt that is a list of these, or the first 170,000 and more of a longer one.

    :raises ValueError: it is something else.
    """
    if len(prompt) > _MOST_READ:
        prompt = prompt[: prompt.rfind(b",", 0, _MOST_READ)] + b"]"
    return _ids.decode(prompt)


def _of_completion(fields: dict[str, Raw]) -> bytes | None:
    prompt = fields["prompt"]
    if bytes(prompt).startswith(b"["):
        (prompt,) = _one_text.decode(prompt)
    if not bytes(prompt).startswith(b'"'):
        return None
    return _encode({name: fields[name] for name in _OF_COMPLETIONS if name in fields} | {"prompt": prompt})


def _of_chat(fields: dict[str, Raw]) -> bytes:
    messages = _messages.decode(fields["messages"])
    asked = {name: fields[name] for name in _OF_CHATS if name in fields}
    if not all(_is_null(message.reasoning_content) for message in messages):
        asked["messages"] = Raw(_encode([_with_reasoning(one) for one in _objects.decode(fields["messages"])]))
    seen = {name: fields[name] for name in _OF_TEMPLATES if not _is_null(fields.get(name))}
    if seen:
        given = fields.get("chat_template_kwargs", _NULL)
        kwargs = {} if _is_null(given) else _object.decode(given)
        if "reasoning_effort" in seen:
            thinks = bytes(seen["reasoning_effort"]) != b'"none"'
            kwargs.setdefault("enable_thinking", Raw(b"true" if thinks else b"false"))
        asked["chat_template_kwargs"] = Raw(_encode(kwargs | seen))
    return _encode(asked)


def _with_reasoning(message: dict[str, Raw]) -> dict[str, Raw]:
    """A message without ``reasoning_content``, which vLLM renames for an answer and passes over here."""
    named = message.pop("reasoning_content", _NULL)
    if _is_null(message.get("reasoning")) and not _is_null(named):
        message["reasoning"] = named
    return message


def _is_null(value: Raw | None) -> bool:
    return value is None or bytes(value) == b"null"
