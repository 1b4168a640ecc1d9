"""How a prefill's KV reaches decode, and the fields in which both are told of it.

- ``nixl`` and ``mooncake``: the prefill is asked to keep its blocks; decode gets ``kv_transfer_params`` of its answer.
  A hand-off through the pool takes the same way, with an answer that says what will be stored, or that has none.
- ``http`` and ``lmcache``: decode finds the KV in a store that both engines share; nothing is asked for or passed on.
- ``sglang``: both are asked at once and meet by themselves, at the prefill's bootstrap server, under one number.

``kv_transfer_params`` name the blocks of one sequence.  A request for several (a list of prompts, ``n``, beams) must
not be given one prompt's blocks for all, so none are asked for: its prefill only fills the pool.  SGLang numbers the
sequences of a request by itself.

What always holds: only the fields of the hand-off differ from the client's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Final, NamedTuple

import msgspec
from msgspec import Raw

from ems.engines.first_token import first_token_fields

KV_TRANSFER_PARAMS: Final = "kv_transfer_params"

BOOTSTRAP_PORT: Final = 8998
"""Where an SGLang prefill's bootstrap server listens unless told otherwise."""

ROOM_BITS: Final = 62
"""Of the number of a request's first sequence; those of its others follow, and SGLang's numbers have 63."""

CLIENTS_PARAMS: Final = ("ems_", "lmcache.")
"""How names begin of what a client may say in ``kv_transfer_params``.

The others name hosts, ports and blocks, with which an engine would fetch what is not this client's, from wherever the
client likes.
"""

_OF_CLIENTS: Final[dict[str, Callable[[str], bool]]] = {
    KV_TRANSFER_PARAMS: lambda name: name.startswith(CLIENTS_PARAMS),
    "ec_transfer_params": lambda _: False,
    "vllm_xargs": lambda name: not name.endswith("_transfer_params"),
}
"""Fields in which an engine is told of a hand-off, and which names a client may use there."""

_encode = msgspec.json.Encoder().encode
_fields = msgspec.json.Decoder(dict[str, Raw])
_NULL = b"null"
_PREFILL_PARAMS = Raw(
    b'{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,'
    b'"remote_host":null,"remote_port":null}'
)


class HandoffKind(StrEnum):
    """The types of a ``kvConnector``; ``sglang`` follows from the engine and cannot be written."""

    HTTP = "http"
    LMCACHE = "lmcache"
    NIXL = "nixl"
    MOONCAKE = "mooncake"
    SGLANG = "sglang"

    @property
    def passes_params(self) -> bool:
        """Whether ``kv_transfer_params`` go from the prefill's answer to decode."""
        return self in {HandoffKind.NIXL, HandoffKind.MOONCAKE}


class Bootstrap(NamedTuple):
    """Where the two engines of one attempt meet, and under which number."""

    host: str
    port: int
    room: int

    def fields(self) -> dict[str, Raw]:
        host = f"[{self.host}]" if ":" in self.host else self.host
        values = {"bootstrap_host": host, "bootstrap_port": self.port, "bootstrap_room": self.room}
        return {name: Raw(_encode(value)) for name, value in values.items()}


def clients_fields(fields: dict[str, Raw]) -> dict[str, Raw]:
    """Return a client's fields without what only the router may say of a hand-off; the same object if there is none."""
    if _OF_CLIENTS.keys().isdisjoint(fields):
        return fields
    given, fields = fields, dict(fields)
    for name, allows in _OF_CLIENTS.items():
        if name not in fields:
            continue
        params = _object(fields[name])
        kept = {key: value for key, value in params.items() if allows(key)}
        if not kept:
            del fields[name]
        elif len(kept) < len(params):
            fields[name] = Raw(_encode(kept))
    return given if fields == given else fields


def names_blocks(params: Raw) -> bool:
    """Whether ``kv_transfer_params`` name blocks of an engine, which are others' once they have been fetched."""
    return not all(name.startswith(CLIENTS_PARAMS) for name in _object(params))


def _object(value: Raw) -> dict[str, Raw]:
    try:
        return _fields.decode(value)
    except (ValueError, RecursionError):  # no object
        return {}


def prefill_fields(
    fields: dict[str, Raw], kind: HandoffKind, bootstrap: Bootstrap | None, *, single: bool
) -> dict[str, Raw]:
    """Return what makes an engine compute a prompt's KV and one token, and let decode have the KV."""
    if bootstrap is not None:
        return _sglang_fields(fields) | bootstrap.fields()
    fields = first_token_fields(fields)
    if kind.passes_params:
        fields.pop(KV_TRANSFER_PARAMS, None)
        if single:
            fields[KV_TRANSFER_PARAMS] = _PREFILL_PARAMS
    return fields


def _sglang_fields(fields: dict[str, Raw]) -> dict[str, Raw]:
    """The fields for a prefill whose token is the answer's first one: what shapes the answer has to stay.

    The engine bounds itself to one token.  It is told so too, but not where it would find that below ``min_tokens``.
    """
    kept = {name: value for name, value in fields.items() if name != "stream_options"}
    if "min_tokens" not in fields:
        bounded = first_token_fields(fields)
        kept |= {name: bounded[name] for name in bounded if name.startswith("max_")}
    kept["stream"] = Raw(b"false")
    return kept


def params_of(answer: bytes) -> Raw | None:
    """Return ``kv_transfer_params`` of a prefill's answer; None when it has none, as where no connector gives any.

    :raises ValueError: the answer is not a JSON object.
    """
    try:
        value = _fields.decode(answer).get(KV_TRANSFER_PARAMS)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return None if value is None or bytes(value) == _NULL else value


def body_with(body: bytes, fields: Mapping[str, Raw], ours: Mapping[str, Raw]) -> bytes:
    """Return the body of a request, whose ``fields`` are given, with ours put in."""
    if ours.keys() & fields.keys():  # the client's own would stand beside ours: write the object anew
        return _encode({**fields, **ours})
    after_brace = body.index(b"{") + 1
    comma = b"," if fields else b""
    return b"".join((body[:after_brace], _encode(ours)[1:-1], comma, body[after_brace:]))
