"""KV events as vLLM publishes them: maps of newer releases, and the lists that releases before 0.21 sent.

What is not known is left out: a field, a whole event.  What always holds: a batch that cannot be read is a
:class:`~ems.errors.ProtocolError`.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from ems.errors import ProtocolError

BlockHash = bytes | int


class BlockStored(msgspec.Struct, frozen=True):
    """Blocks that follow each other are now in ``medium``."""

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None


class BlockRemoved(msgspec.Struct, frozen=True):
    """Blocks are no longer in ``medium``."""

    block_hashes: list[BlockHash]
    medium: str | None = None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True):
    """The engine has emptied its own cache."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class _Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[Any]


_KINDS: Final[dict[str, type[Event]]] = {kind.__name__: kind for kind in (BlockStored, BlockRemoved, AllBlocksCleared)}
_batch = msgspec.msgpack.Decoder(_Batch)


def read_batch(payload: bytes) -> list[Event]:
    """Return the events of a batch.

    :raises ProtocolError: not a batch of KV events.
    """
    try:
        return [read for event in _batch.decode(payload).events if (read := _event(event)) is not None]
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"A batch is not one of KV events ({error}), expected what vLLM publishes") from error


def _event(raw: Any) -> Event | None:
    if isinstance(raw, list) and raw:  # the kind, then the fields in their order
        kind = _KINDS.get(str(raw[0]))
        raw = dict(zip(kind.__struct_fields__, raw[1:], strict=False)) if kind is not None else {}
    elif isinstance(raw, dict):
        kind = _KINDS.get(str(raw.get("type")))
    else:
        kind = None
    return None if kind is None else msgspec.convert(raw, kind)
