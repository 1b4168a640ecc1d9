"""Traces as they are published: one JSON object a line, blocks named by ``hash_ids``.

The form is that of the Mooncake traces: ``timestamp`` in milliseconds, ``hash_ids`` the names of the prompt's blocks in
order, equal names meaning an equal prefix; whatever else a line has does not matter.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec

from ems.errors import ConfigError
from ems.pool.keys import KEY_BYTES

MOST_BLOCKS = 65536


class _Line(msgspec.Struct):
    timestamp: float
    hash_ids: list[int]


class TraceRequest(msgspec.Struct, frozen=True):
    """A prompt that came at ``at`` seconds, as the keys of its blocks."""

    at: float
    keys: list[bytes]


def block_key(name: int) -> bytes:
    return hashlib.sha256(b"%d" % name).digest()[:KEY_BYTES]


def read_trace(path: Path) -> list[TraceRequest]:
    """All requests of the trace in ``path`` that have a block, in the order of their time."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"cannot read the trace {path}: {error.strerror}") from error
    decoder = msgspec.json.Decoder(_Line)
    known: dict[int, bytes] = {}
    requests = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            read = decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"line {number} of {path} is not a request of a trace ({error}), expected a JSON object with timestamp "
                "(milliseconds) and hash_ids (a list of numbers)"
            ) from error
        if len(read.hash_ids) > MOST_BLOCKS:
            raise ConfigError(
                f"line {number} of {path} has {len(read.hash_ids)} blocks, expected {MOST_BLOCKS} or fewer"
            )
        if read.hash_ids:
            keys = [known.get(name) or known.setdefault(name, block_key(name)) for name in read.hash_ids]
            requests.append(TraceRequest(read.timestamp / 1000, keys))
    if not requests:
        raise ConfigError(f"{path} has no requests, expected one JSON object a line")
    requests.sort(key=lambda request: request.at)
    return requests
