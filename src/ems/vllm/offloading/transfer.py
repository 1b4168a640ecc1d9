"""What the manager in the scheduler tells the workers, as plain data that is pickled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from vllm.v1.kv_offload.base import LoadStoreSpec

from ems.pool.keys import Tail


class ChunkRun(NamedTuple):
    """Consecutive chunks of a request from number ``first`` on, behind the one of the key ``parent``, in ``groups``."""

    first: int
    parent: bytes
    tails: Sequence[Tail]
    groups: tuple[int, ...]


class PlanePages(NamedTuple):
    """Chunks in one plane: their keys, and where their pages lie, packed, all shards of each chunk."""

    plane: int
    keys: bytes
    packed_refs: bytes


@dataclass(slots=True)
class PagesToStore(LoadStoreSpec):
    """Runs of chunks; in each group they come in the order of its blocks."""

    runs: list[ChunkRun]


@dataclass(slots=True)
class PagesToLoad(LoadStoreSpec):
    """For each of the groups that vLLM offloads, pages that lie on the node ``node``, in the order of its blocks."""

    node: str
    groups: list[list[PlanePages]]
