"""One rank's planes in its worker: engine tensors, page sizes, and which of a request's pages are this rank's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ems.errors import ConfigError
from ems.pool.client.answers import Namespace
from ems.pool.keys import KEY_BYTES, Tail, page_key, page_keys
from ems.pool.layout import REF_BYTES
from ems.transfers.rows import BlockRows, PageBlocks, PartsOfPages
from ems.vllm.token_order import in_order

if TYPE_CHECKING:
    import torch

    from ems.vllm.model import LocalPlane
    from ems.vllm.requests import LoadPart, Save


class StoredPage(NamedTuple):
    """A page to be stored: its blocks, its key, and the tail by whose tokens it is found, too."""

    part: PageBlocks
    key: bytes
    tail: Tail | None


class PlaneRows:
    """A plane's engine tensors, cut into this rank's shards: of each layer as many as the engine has."""

    def __init__(self, local: LocalPlane, layers: Sequence[Sequence[torch.Tensor]], page_blocks: int = 1) -> None:
        self.local = local
        names = [name for name, tensors in zip(local.layers, layers, strict=True) for _ in tensors]
        tensors = [tensor for of_layer in layers for tensor in of_layer]
        self.rows = BlockRows(tensors, names, shards=local.portion.count, page_blocks=page_blocks)
        ends = list(accumulate(map(len, layers)))
        self.layers = [slice(begin, end) for begin, end in pairwise([0, *ends])]
        """Which tensors are each layer's."""
        self.namespace = Namespace(local.plane.namespace, self.rows.page_bytes)

    @property
    def block_bytes(self) -> int:
        return int(self.rows.page_bytes * self.local.portion.count // self.rows.page_blocks)

    @property
    def windowed(self) -> bool:
        """Whether the engine drops blocks of this plane while their request runs."""
        return self.local.plane.window > 0

    def loaded(self, part: LoadPart) -> tuple[PartsOfPages, bytes, bytes]:
        """The pages of ``part`` that are this rank's: into which of its blocks they go, packed references, keys."""
        shards, mine, size = self.local.plane.shards, self.local.portion, self.rows.page_blocks
        blocks = np.array(part.block_ids, np.int64)
        ends = np.minimum(np.arange(1, len(part.keys) // KEY_BYTES + 1) * size - part.skip, len(blocks))
        begins = np.concatenate(([0], ends[:-1]))
        chunks = np.flatnonzero(blocks[begins] != 0) if self.windowed else np.arange(len(ends))
        pages = (chunks[:, np.newaxis] * shards + mine.first + np.arange(mine.count)).ravel()
        chunks = np.repeat(chunks, mine.count)
        of_shards = np.tile(np.arange(mine.count), len(pages) // mine.count)
        parts = PartsOfPages(
            blocks, begins[chunks], (ends - begins)[chunks], of_shards, np.where(chunks == 0, part.skip, 0)
        )
        refs = np.frombuffer(part.packed_refs, f"V{REF_BYTES}")[pages]
        keys = np.frombuffer(page_keys(part.keys, shards), f"V{KEY_BYTES}")[pages]
        return parts, refs.tobytes(), keys.tobytes()

    def stored(self, save: Save) -> tuple[bytes, list[StoredPage]]:
        """The parent of this rank's pages of ``save``, and the pages."""
        mine, size = self.local.portion, self.rows.page_blocks
        blocks = save.block_ids[self.local.plane.group]
        pages: list[StoredPage] = []
        for position, tail in enumerate(save.tails):
            of_page = blocks[position * size : (position + 1) * size]
            missing = not of_page or (self.windowed and not of_page[0])
            if missing or not mine.stores(save.first + position):
                continue
            # The first shard comes last, because the others are looked for when it is found by its tokens.
            for shard in reversed(range(mine.count)):
                first = not (shard or mine.first)
                named = tail if first and not self.local.number else None
                pages.append(StoredPage(PageBlocks(of_page, shard), page_key(tail.key, mine.first + shard), named))
        return page_key(save.parent, mine.first), pages


def plane_rows(
    planes: Sequence[LocalPlane], kv_caches: Mapping[str, Any], num_blocks: int, page_blocks: int
) -> list[PlaneRows]:
    """The tensors that the engine registered, plane by plane; a page has the state of ``page_blocks`` blocks.

    Raises ConfigError: the tensors are not what the engine's configuration says.
    """
    found = []
    for local in planes:
        missing = [name for name in local.layers if name not in kv_caches]
        if missing:
            raise ConfigError(f"the engine registered no KV cache for layer {missing[0]}, expected all of its group")
        layers = []
        for name, heads in zip(local.layers, local.heads, strict=True):
            tensors = _by_heads(kv_caches[name], num_blocks, heads, local.portion.count, name)
            layers.append([part for tensor in tensors for part in in_order(tensor, local.plane.order)])
        found.append(PlaneRows(local, layers, page_blocks))
    return found


def _by_heads(cache: Any, num_blocks: int, heads: int, shards: int, name: str) -> list[torch.Tensor]:
    """What a layer has, as ``[num_blocks, heads, ...]``, or for each of its ``shards`` what that one's heads have.

    On Ascend these are tensors of their own for keys and values (two parts and perhaps an indexer's with MLA), each
    ``[num_blocks, tokens, heads, values]``; elsewhere it is one, ``[num_blocks, heads, tokens, values]``.  A page has
    the order of the engine's memory, so that the heads of a shard are copied together.
    """
    if not isinstance(cache, (tuple, list)):
        return [_whole(cache, num_blocks, heads, name)]
    parts = [
        _whole(part.transpose(1, 2) if part.dim() == 4 else part, num_blocks, heads, f"{name} (part {number})")
        for number, part in enumerate(cache)
    ]
    return [part.unflatten(1, (shards, -1)).movedim(2, -2) for part in parts]


def _whole(tensor: torch.Tensor, num_blocks: int, heads: int, name: str) -> torch.Tensor:
    """Put a block together again that the kernels cut in pieces."""
    shape = tuple(tensor.shape)
    if tensor.dim() == 3:
        tensor = tensor.unsqueeze(1)
    if tensor.dim() != 4 or not shape[0] or shape[0] % num_blocks or tensor.shape[1] != heads:
        raise ConfigError(
            f"the engine registered a KV cache of shape {shape} for layer {name}, expected [{num_blocks} blocks, "
            f"{heads} heads, tokens, values], so this release of vLLM is not served"
        )
    whole: torch.Tensor = tensor if shape[0] == num_blocks else tensor.unflatten(0, (num_blocks, -1)).transpose(1, 2)
    return whole
