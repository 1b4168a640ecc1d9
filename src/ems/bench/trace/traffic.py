"""Traffic to be replayed: traces as they are published, and what is made up beside them.

A trace has the form of the Mooncake traces, one JSON object a line: ``timestamp`` in milliseconds, ``hash_ids`` the
names of the prompt's blocks in order, equal names meaning an equal prefix; whatever else a line has does not matter.
Each kind of made-up traffic is a simple picture of something that a policy must bear; all are drawn from a seed alone.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Iterator
from pathlib import Path

import msgspec

from ems.errors import ConfigError
from ems.pool.keys import KEY_BYTES

MOST_BLOCKS = 65536
MADE = "made:"
"""Before the kind of a trace that is made up."""


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


def _fresh(names: Iterator[int], count: int) -> list[bytes]:
    return [block_key(name) for name in itertools.islice(names, count)]


def conversations(count: int, seed: int) -> Iterator[list[bytes]]:
    """Conversations side by side that grow turn by turn and end by chance, behind one of a few system prompts."""
    draw, names = random.Random(seed), itertools.count()
    prompts = [_fresh(names, draw.randint(1, 6)) for _ in range(5)]
    talks: list[list[bytes]] = []
    for _ in range(count):
        if len(talks) < 40 or draw.random() < 0.35:
            talks.append(draw.choice(prompts) + _fresh(names, draw.randint(1, 12)))
            yield list(talks[-1])
            continue
        talk = draw.choice(talks)
        talk += _fresh(names, draw.randint(1, 4))
        yield list(talk)
        if draw.random() < 0.25:
            talks.remove(talk)


def documents(count: int, seed: int) -> Iterator[list[bytes]]:
    """Questions about documents, few of which are asked about often (Zipf)."""
    draw, names = random.Random(seed), itertools.count()
    shelf = [_fresh(names, draw.randint(4, 30)) for _ in range(1500)]
    weights = [1 / rank for rank in range(1, len(shelf) + 1)]
    for document in draw.choices(shelf, weights, k=count):
        yield document + _fresh(names, 1)


def shifting(count: int, seed: int) -> Iterator[list[bytes]]:
    """Documents of which others are popular every few hundred requests."""
    draw, names = random.Random(seed), itertools.count()
    shelf = [_fresh(names, draw.randint(4, 20)) for _ in range(2000)]
    weights = [1 / rank for rank in range(1, 201)]
    for number in range(count):
        first = number // 400 * 150 % (len(shelf) - 200)
        yield shelf[first + draw.choices(range(200), weights)[0]] + _fresh(names, 1)


def scans(count: int, seed: int) -> Iterator[list[bytes]]:
    """Conversations, with long runs of prompts between them that nobody asks again."""
    talk = conversations(count, seed)
    for number in range(count):
        if number % 500 < 150:
            yield [block_key(-(number * 20 + at) - 1) for at in range(20)]
        else:
            yield next(talk)


def loop(count: int, seed: int) -> Iterator[list[bytes]]:
    """The same prompts round and round, as in an evaluation that runs again and again."""
    draw, names = random.Random(seed), itertools.count()
    ring = [_fresh(names, draw.randint(5, 15)) for _ in range(400)]
    for number in range(count):
        yield ring[number % len(ring)]


KINDS = {kind.__name__: kind for kind in (conversations, documents, shifting, scans, loop)}
"""Kinds of made-up traffic by name."""


def made_trace(kind: str, count: int, seed: int = 0, rate: float = 5.0) -> list[TraceRequest]:
    return [TraceRequest(at / rate, keys) for at, keys in enumerate(KINDS[kind](count, seed))]


def read_or_make(file: str, count: int) -> list[TraceRequest]:
    """The trace in ``file``, or ``count`` requests of the kind that it names behind ``made:``."""
    if count < 1:
        raise ConfigError(f"--requests is {count}, expected 1 or more")
    if not file.startswith(MADE):
        return read_trace(Path(file))
    kind = file.removeprefix(MADE)
    if kind not in KINDS:
        raise ConfigError(f"there is no made-up traffic called {kind!r}, expected one of {', '.join(KINDS)}")
    return made_trace(kind, count)
