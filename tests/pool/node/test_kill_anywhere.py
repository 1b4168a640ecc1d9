"""A real node is killed at every write and every step of the protocol in turn; what was committed is always there."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import pytest

from ems.errors import PoolError
from ems.pool.client.answers import Namespace
from ems.pool.client.pool_client import PoolClient
from ems.pool.keys import NO_PARENT, Tail
from ems.pool.layout import crc32c
from tests.kit.node import NodeProcess
from tests.pool.brain import chain
from tests.pool.conftest import PAGE, MakeClient, MakeNode
from tests.pool.dying_node import MOMENT
from tests.pool.stored_pages import back, content, load

MOST_MOMENTS = 200
FLAGS = ("--size", "8MB", "--segment-size", "64KB", "--verify", "always")


class Round:
    """One client's life on one node: what it was told is stored, and what it never committed."""

    def __init__(self, name: str) -> None:
        self.namespace = Namespace(f"test/{name}", PAGE)
        self.keys = chain(name, 4)
        tokens = hashlib.sha256(name.encode()).digest()[:8]
        self.tail = Tail(self.keys[-1], tokens)
        self.never = [chain(f"{name}/aborted", 2), chain(f"{name}/unfinished", 2)]
        self.stored = 0
        self.has_tail = False

    def live(self, client: PoolClient) -> None:
        """Save, load, give up, leave; raises when the node dies."""
        keys = self.keys
        reserved = client.reserve(self.namespace, NO_PARENT, keys)
        assert len(reserved.granted) == 4
        segments = client.segments(reserved.epoch)
        checksums = []
        for position, ref in sorted(reserved.granted.items()):
            page = segments.page(ref, PAGE)
            page[:] = content(keys[position])
            checksums.append(crc32c(page))
        for half in ([0, 1], [2, 3]):
            client.commit(reserved, half, checksums=[checksums[at] for at in half])
            self.stored += 2
        assert self.found(client, keys) == 4
        client.abort(client.reserve(self.namespace, keys[-1], self.never[0]))
        self._save_tail(client)
        client.reserve(self.namespace, NO_PARENT, self.never[1])

    def _save_tail(self, client: PoolClient) -> None:
        reserved = client.reserve(self.namespace, self.keys[-1], [self.tail.key], tails=[self.tail])
        page = client.segments(reserved.epoch).page(reserved.granted[0], PAGE)
        page[:] = content(self.tail.key)
        client.commit(reserved, [0], checksums=[crc32c(page)])
        self.has_tail = True

    def found(self, client: PoolClient, keys: Sequence[bytes]) -> int:
        """How many leading ``keys`` can be loaded; all that are promised, with their bytes."""
        promised, good = load(client, keys, self.namespace)
        assert promised == good
        return good

    def check(self, client: PoolClient) -> None:
        """All that was answered is there, and nothing that was never committed."""
        assert self.found(client, self.keys) >= self.stored
        assert [self.found(client, keys) for keys in self.never] == [0, 0]
        if self.has_tail:
            assert self.found(client, [self.tail.key]) == 1
            assert client.lookup_tail(self.namespace, self.tail).tokens == 2


def start(node: NodeProcess, moment: int) -> None:
    node.environment[MOMENT] = str(moment)
    node.start()


@pytest.mark.process
def test_a_node_killed_at_any_moment_has_all_that_was_committed(make_node: MakeNode, make_client: MakeClient) -> None:
    node = make_node(*FLAGS)
    node.wait_touched()
    node.stop()
    node.module = "tests.pool.dying_node"
    rounds: list[Round] = []
    client = make_client(node)
    for moment in range(MOST_MOMENTS):
        start(node, moment)
        rounds.append(Round(str(moment)))
        one = node.client(f"round {moment}")
        try:
            rounds[-1].live(one)
        except PoolError:
            assert node.wait() == -9
        else:
            one.close()
            break
        finally:
            one.close()
    else:
        pytest.fail("the node outlives no round")
    node.kill()
    node.module = "ems.cli"
    node.start()
    back(node, client)
    for past in rounds:
        past.check(client)
    assert len(rounds) > 40
    figures = node.figures()
    assert figures["counters"]["pages_corrupt"] == 0
    assert figures["leases"] == figures["reservations"] == 0
