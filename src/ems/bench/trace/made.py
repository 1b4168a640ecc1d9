"""Traffic that is made up: what a policy must bear beside the trace that it was looked at with.

Each kind is a simple picture of something that happens; all are drawn from a seed alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from ems.bench.trace.files import TraceRequest, block_key


class _Names:
    """Fresh names of blocks."""

    def __init__(self) -> None:
        self._next = 0

    def take(self, count: int) -> list[bytes]:
        first, self._next = self._next, self._next + count
        return [block_key(name) for name in range(first, self._next)]


def conversations(count: int, seed: int) -> Iterator[list[bytes]]:
    """Conversations side by side that grow turn by turn and end by chance, behind one of a few system prompts."""
    draw, names = random.Random(seed), _Names()
    prompts = [names.take(draw.randint(1, 6)) for _ in range(5)]
    talks: list[list[bytes]] = []
    for _ in range(count):
        if len(talks) < 40 or draw.random() < 0.35:
            talks.append(draw.choice(prompts) + names.take(draw.randint(1, 12)))
            yield list(talks[-1])
            continue
        talk = draw.choice(talks)
        talk += names.take(draw.randint(1, 4))
        yield list(talk)
        if draw.random() < 0.25:
            talks.remove(talk)


def documents(count: int, seed: int) -> Iterator[list[bytes]]:
    """Questions about documents, few of which are asked about often (Zipf)."""
    draw, names = random.Random(seed), _Names()
    shelf = [names.take(draw.randint(4, 30)) for _ in range(1500)]
    weights = [1 / rank for rank in range(1, len(shelf) + 1)]
    for document in draw.choices(shelf, weights, k=count):
        yield document + names.take(1)


def shifting(count: int, seed: int) -> Iterator[list[bytes]]:
    """Documents of which others are popular every few hundred requests."""
    draw, names = random.Random(seed), _Names()
    shelf = [names.take(draw.randint(4, 20)) for _ in range(2000)]
    weights = [1 / rank for rank in range(1, 201)]
    for number in range(count):
        first = number // 400 * 150 % (len(shelf) - 200)
        yield shelf[first + draw.choices(range(200), weights)[0]] + names.take(1)


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
    draw, names = random.Random(seed), _Names()
    ring = [names.take(draw.randint(5, 15)) for _ in range(400)]
    for number in range(count):
        yield ring[number % len(ring)]


KINDS: dict[str, Callable[[int, int], Iterator[list[bytes]]]] = {
    "conversations": conversations,
    "documents": documents,
    "shifting": shifting,
    "scans": scans,
    "loop": loop,
}
"""Kinds of made-up traffic by name."""


def made_trace(kind: str, count: int, seed: int = 0, rate: float = 5.0) -> list[TraceRequest]:
    return [TraceRequest(at / rate, keys) for at, keys in enumerate(KINDS[kind](count, seed))]
