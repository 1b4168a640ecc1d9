"""How many leading blocks the pool has: the question behind ``exists``."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from ems.errors import PoolNotTried, PoolUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ems.cc_v1.names import BlockNames
    from ems.pool.client.answers import Namespace
    from ems.pool.client.pool_client import PoolClient

LOOKUP_KEYS = 1 << 14
"""Keys of one question to the pool; a prompt hardly has more."""

_Answer = TypeVar("_Answer")


def twice(call: Callable[[], _Answer]) -> _Answer:
    """Call again if the node went away: a node that was restarted since is only noticed by the failure.

    For calls that promise nothing, or whose promises end with the connection.
    """
    try:
        return call()
    except PoolUnavailable as first:
        try:
            return call()
        except PoolNotTried:
            raise first from None


def count_present(
    client: PoolClient,
    namespace: Namespace,
    names: BlockNames,
    hashes: Sequence[int],
    remaining: Callable[[], float],
) -> int:
    """How many leading ``hashes`` have a page, of a whole block or of the beginning of one.

    Raises:
        PoolError: the pool did not answer.
    """

    def leading(keys: Sequence[bytes]) -> int:
        joined = b"".join(keys)
        return twice(lambda: client.lookup(namespace, joined, timeout=remaining()).count)

    position = 0
    while position < len(hashes):
        keys = [names.whole(value) for value in hashes[position : position + LOOKUP_KEYS]]
        count = leading(keys)
        position += count
        if count < len(keys):
            if not leading([names.beginning(hashes[position])]):
                break
            position += 1
    return position
