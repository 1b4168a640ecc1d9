"""How the clients of a history name blocks and talk to the node, as steps say it by numbers."""

from __future__ import annotations

from typing import TypeVar

from ems.errors import EmsError
from ems.pool.keys import NO_PARENT, Tail
from ems.pool.protocol import messages
from tests.faults.settings import NAMESPACES, block_key
from tests.faults.simulated_clients import SimulatedClient
from tests.faults.world import World

_T = TypeVar("_T")


PATHS = ["a", "ab", "abc", "abcd", "abx", "abxy", "k", "kl", "klm", "q", "qr"]
"""Chains of blocks: each continues its beginning, some share theirs."""


def name_of(number: int) -> str:
    return ("small", "small", "small", "large", "other")[number % 5]


def seat_of(world: World, number: int) -> SimulatedClient:
    return world.clients[number % len(world.clients)]


def run_of(number: int) -> tuple[list[bytes], bytes, Tail | None]:
    """Keys of consecutive blocks, the key before them, and the tail if the last is not full."""
    path = PATHS[number % len(PATHS)]
    first = max(number // len(PATHS) % 12 - 8, 0) % len(path)
    keys = [block_key(path[: end + 1]) for end in range(first, len(path))]
    parent = block_key(path[:first]) if first else bytes(NO_PARENT)
    if number // (len(PATHS) * 12) % 4:
        return keys, parent, None
    before = keys[-2] if len(keys) > 1 else parent
    tail = Tail(before, path.encode().ljust(8, b"\1"))
    return [*keys[:-1], tail.key], parent, tail


def ask(world: World, client: SimulatedClient, request: messages.Request, kind: type[_T]) -> _T | None:
    """The node's answer; None when it refuses, or has ended the connection."""
    if client.gone:
        world.counts["asked on a connection that has ended"] += 1
        return None
    asked = world.times.passed
    try:
        answer = world.node.answer(client.client_id, request)
    except EmsError as error:
        world.counts[f"refused: {type(error).__name__}"] += 1
        return None
    assert isinstance(answer, kind)
    assert world.times.passed == asked, "a client was held up"
    return answer


def tell(world: World, client: SimulatedClient, request: messages.Request) -> None:
    """Say something that has no answer."""
    if not client.gone:
        world.node.answer(client.client_id, request)


def opened_namespace(world: World, client: SimulatedClient, name: str) -> int | None:
    """The number of what the client calls ``name``."""
    opened = ask(world, client, messages.Open(name, NAMESPACES[name]), messages.Opened)
    return None if opened is None else opened.namespace
