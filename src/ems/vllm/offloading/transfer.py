"""What the manager in the scheduler tells the workers: pages by group, as plain data that is pickled."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.v1.kv_offload.base import LoadStoreSpec


@dataclass(slots=True)
class PagesToStore(LoadStoreSpec):
    """Keys of chunks and of the chunk before each, packed, for each group in the order of its blocks."""

    keys: list[bytes]
    parents: list[bytes]


@dataclass(slots=True)
class PagesToLoad(LoadStoreSpec):
    """Keys of chunks, packed, for each group; where their pages lie on the node ``node``, for each rank and group."""

    node: str
    keys: list[bytes]
    refs: list[list[bytes]]
