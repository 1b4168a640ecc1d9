"""Engine tensors as rows: which bytes of which tensors make a page, wherever the engine has them.

- :class:`BlockRows`: a row is what one block has of some heads; a page has, for each tensor and head, what several
  blocks have of it, one after the other, so that it depends on no block size where a block has its tokens in order.
- :class:`TokenRows`: tensors ``[num_blocks, block_size, heads, head_size]`` with any strides; a row is a token, and a
  page has the tokens of each tensor side by side, so that its bytes depend on what is stored and on nothing else.

Ownership: the engine owns its tensors and keeps the blocks untouched while a copy runs; the pool owns pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch

from ems.errors import ConfigError
from ems.transfers.plan import ALL, CopyPlan, Numbers, Piece, PieceTable, Rows, Slots, TokenSpan, numbers, runs

PART_ALIGN = 8
"""Each tensor's part of a token page begins at a multiple of this many bytes."""


class PageBlocks(NamedTuple):
    """What is copied of one page: its blocks from number ``first`` on, in the engine ``blocks``, heads of ``shard``."""

    blocks: Sequence[int]
    shard: int = 0
    first: int = 0


class PartsOfPages(NamedTuple):
    """:class:`PageBlocks` of many pages: of the n-th ``counts[n]`` blocks are copied, from ``blocks[begins[n]]`` on."""

    blocks: Numbers
    begins: Numbers
    counts: Numbers
    shards: Numbers
    firsts: Numbers

    @classmethod
    def of(cls, parts: Sequence[PageBlocks]) -> PartsOfPages:
        blocks = numbers(chain.from_iterable(part.blocks for part in parts))
        counts = numbers(len(part.blocks) for part in parts)
        shards, firsts = numbers(part.shard for part in parts), numbers(part.first for part in parts)
        return cls(blocks, np.cumsum(counts) - counts, counts, shards, firsts)

    def span(self, begin: int, end: int) -> PartsOfPages:
        return PartsOfPages(self.blocks, *(column[begin:end] for column in self[1:]))


def _pieces(tensor: torch.Tensor, inner: torch.Tensor, strides: tuple[int, int], offset: int) -> list[Piece]:
    """Of rows that ``strides`` lead to in ``tensor`` and that are shaped as ``inner``; parts of pages at ``offset``."""
    size = tensor.element_size()
    places, run = runs(inner.shape, [stride * size for stride in inner.stride()], size)
    pitch = inner.numel() * size
    base = tensor.data_ptr()
    return [
        Piece(base + place, strides[0] * size, strides[1] * size, offset + number * run, pitch, run)
        for number, place in enumerate(places.tolist())
    ]


def _check_rows(rows: Numbers, end: int, what: str) -> None:
    if rows.size and not 0 <= int(rows.min()) <= int(rows.max()) < end:
        raise IndexError(f"{what} {int(rows.min())} to {int(rows.max())} were named, but there are 0 to {end - 1}")


class BlockRows:
    """Row ``(b, s)`` of tensor ``i`` is what its block ``b`` has of shard ``s``'s heads.

    ``tensors`` are shaped ``[num_blocks, heads, ...]`` with any strides; each is cut into ``shards`` along its heads.
    A page holds, tensor by tensor and head by head, what ``page_blocks`` blocks have, with the values in the order of
    the dimensions: its bytes depend on neither the strides nor on how many heads the engine keeps.

    Raises:
        ConfigError: the tensors disagree in their number of blocks, or their heads cannot be cut so.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        names: Sequence[str] | None = None,
        *,
        shards: int = 1,
        page_blocks: int = 1,
    ) -> None:
        if not tensors:
            raise ConfigError("no KV cache tensors were given, expected at least one a layer")
        names = names or [str(position) for position in range(len(tensors))]
        counts = {tensor.shape[0] for tensor in tensors}
        if len(counts) != 1:
            raise ConfigError(f"KV cache tensors have {sorted(counts)} blocks, expected the same number in all of them")
        self.tensors = [tensor.detach() for tensor in tensors]
        self.num_blocks = counts.pop()
        self.shards = shards
        self.page_blocks = page_blocks
        self.page_bytes = 0
        pieces = []
        for tensor, name in zip(self.tensors, names, strict=True):
            shape = tuple(tensor.shape)
            if tensor.dim() < 2 or 0 in shape or shape[1] % shards:
                raise ConfigError(
                    f"KV cache tensor {name} has shape {shape}, expected [num_blocks, heads, ...] with heads a "
                    f"multiple of {shards}"
                )
            heads = shape[1] // shards
            strides = (tensor.stride(0), heads * tensor.stride(1))
            # With one block a page all heads may be one piece.
            cuts = [tensor[0, :heads]] if page_blocks == 1 else [tensor[0, head] for head in range(heads)]
            own: list[Piece] = []
            for cut in cuts:
                own += _pieces(cut, cut, strides, self.page_bytes)
                self.page_bytes += cut.numel() * tensor.element_size() * page_blocks
            pieces.append(own)
        self._table = PieceTable(pieces)
        self.page_copies = sum(map(len, pieces)) * page_blocks
        """Most copies that one page takes."""

    def plan(self, parts: Sequence[PageBlocks], slots: Slots, *, out: bool, tensors: slice = ALL) -> CopyPlan:
        """:meth:`plan_many` of a few."""
        return self.plan_many(PartsOfPages.of(parts), slots, out=out, tensors=tensors)

    def plan_many(self, parts: PartsOfPages, slots: Slots, *, out: bool, tensors: slice = ALL) -> CopyPlan:
        """Copies between each of ``parts`` and the slot with the same position in ``slots``.

        Raises:
            IndexError: there is no such block or shard, or a page has not so many blocks.
        """
        _, begins, counts, shards, firsts = parts
        owners = np.repeat(np.arange(len(counts)), counts)
        within = np.arange(len(owners)) - (np.cumsum(counts) - counts)[owners]
        blocks = parts.blocks[begins[owners] + within]
        _check_rows(blocks, self.num_blocks, "blocks")
        _check_rows(shards, self.shards, "shards")
        _check_rows(firsts, self.page_blocks, "places in a page")
        _check_rows(firsts + counts, self.page_blocks + 1, "ends in a page")
        if slots.size < self.page_bytes:
            raise IndexError(f"a page is smaller than {self.page_bytes} bytes")
        rows = Rows(blocks, shards[owners], firsts[owners] + within, owners)
        return self._table.plan(rows, slots, out=out, tensors=tensors)


class Part(NamedTuple):
    """Where one tensor's tokens lie in a token page, and what they are."""

    start: int
    token_bytes: int
    dtype: str
    heads: int
    head_size: int


class TokenRows:
    """Engine tensors seen token by token: ``layers`` of tensors ``[num_blocks, block_size, heads, head_size]``.

    Strides may be anything but zero.  A token page holds, tensor by tensor, ``[block_size][heads][head_size]``
    values without gaps; of a block that has fewer tokens only the first ones of each part mean something.
    The last :data:`COUNT_BYTES` of a page are free for a note in such a block.

    Raises:
        ConfigError: there are no tensors, or their shapes, strides, types or devices cannot be served.
    """

    COUNT_BYTES = 4

    def __init__(self, layers: Sequence[Sequence[torch.Tensor]]) -> None:
        named = [(f"{n}.{i}", tensor) for n, layer in enumerate(layers) for i, tensor in enumerate(layer)]
        if not named or not all(len(layer) for layer in layers):
            raise ConfigError("kv_caches lacks tensors, expected a list of layers with at least one tensor each")
        for name, tensor in named:
            _check_tokens(tensor, name)
        self.tensors = [tensor.detach() for _, tensor in named]
        for what, values in (
            ("numbers of blocks", {tensor.shape[0] for tensor in self.tensors}),
            ("block sizes", {tensor.shape[1] for tensor in self.tensors}),
            ("devices", {str(tensor.device) for tensor in self.tensors}),
        ):
            if len(values) != 1:
                raise ConfigError(f"KV cache tensors have different {what} {sorted(values)}, expected one for all")
        self.num_blocks, self.block_size = self.tensors[0].shape[:2]
        self.layers = [len(layer) for layer in layers]
        self.parts: list[Part] = []
        pieces = []
        end = 0
        for tensor in self.tensors:
            heads, head_size = tensor.shape[2:]
            start = -(-end // PART_ALIGN) * PART_ALIGN
            dtype = str(tensor.dtype).removeprefix("torch.")
            part = Part(start, heads * head_size * tensor.element_size(), dtype, heads, head_size)
            self.parts.append(part)
            pieces.append(_pieces(tensor, tensor[0, 0], (tensor.stride(0), tensor.stride(1)), start))
            end = start + self.block_size * part.token_bytes
        # The note lies in the place of a token that a partial block does not have, where one token is large enough.
        self.page_bytes = end if self.parts[-1].token_bytes >= self.COUNT_BYTES else end + self.COUNT_BYTES
        self._table = PieceTable(pieces)
        self.page_copies = sum(map(len, pieces)) * self.block_size
        """Most copies that one page takes."""
        self._dense = all(len(own) == 1 and own[0].size == own[0].minor_stride for own in pieces)
        """Whether tokens that follow each other in a block do so in memory, in all tensors."""

    def plan(self, spans: Sequence[TokenSpan], slots: Slots, *, out: bool) -> CopyPlan:
        """Copies between the tokens of each of ``spans`` and the beginnings of the parts of a page in ``slots``.

        Raises:
            IndexError: there is no such token.
        """
        counts = [len(span.blocks) for span in spans]
        blocks = np.concatenate([span.blocks for span in spans])
        positions = np.concatenate([span.positions for span in spans])
        places = np.concatenate([np.arange(count) for count in counts])
        _check_rows(blocks, self.num_blocks, "blocks")
        _check_rows(positions, self.block_size, "positions in a block")
        if max(counts) > self.block_size or slots.size < self.page_bytes:
            raise IndexError(f"a page has room for {self.block_size} tokens in {self.page_bytes} bytes")
        kept = np.ones(len(blocks), bool)
        if self._dense:
            kept[1:] = (blocks[1:] != blocks[:-1]) | (positions[1:] != positions[:-1] + 1) | (places[1:] == 0)
        starts = np.flatnonzero(kept)
        owners = np.repeat(np.arange(len(spans)), counts)[starts]
        rows = Rows(blocks[starts], positions[starts], places[starts], owners, np.diff(starts, append=len(blocks)))
        return self._table.plan(rows, slots, out=out)


def _check_tokens(tensor: Any, name: str) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise ConfigError(f"KV cache {name} (layer.tensor) is a {type(tensor).__name__}, expected a tensor")
    if tensor.dim() != 4 or 0 in tensor.shape:
        raise ConfigError(
            f"KV cache tensor {name} (layer.tensor) has shape {tuple(tensor.shape)}, "
            "expected [num_blocks, block_size, num_heads, head_size]"
        )
    if any(stride == 0 for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1):
        raise ConfigError(
            f"KV cache tensor {name} (layer.tensor) is an expanded view (strides {tensor.stride()}): several of its "
            "values share one place in memory, so nothing can be loaded into it"
        )
    if tensor.is_complex() or tensor.is_quantized or tensor.layout != torch.strided:
        raise ConfigError(
            f"KV cache tensor {name} (layer.tensor) has values of type {tensor.dtype}, expected plain numbers"
        )
