"""The one place where engine memory meets pool memory: tensors on one side, bytes of a page on the other.

A :class:`Device` is the seam in front of an accelerator: pin, copy out, copy in, synchronise.  The CPU is the
one that every test runs on; :class:`StreamDevice` serves accelerators whose torch module offers streams
(``torch.cuda``, ``torch.npu``).  Engine tensors are seen in one of two ways:

- :class:`BlockRows`: a page is the concatenation of one row a tensor, in the order given: some heads of a whole
  block, because an engine may pack the tokens of a head inside a block as it likes.
- :class:`TokenRows`: tensors ``[num_blocks, block_size, heads, head_size]`` with any strides; a page has the
  tokens of each tensor side by side, so that its bytes depend on what is stored and on nothing else.

Ownership: the engine owns its tensors and keeps the blocks untouched while a copy runs; the pool owns pages.
"""

from __future__ import annotations

import importlib
import weakref
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from ems.cc_v1.slots import Numbers, SlotRun, SlotSpan
from ems.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

PART_ALIGN = 8
"""Each tensor's part of a token page begins at a multiple of this many bytes."""

_PORTABLE = 1
"""Flag of ``cudaHostRegister``: pinned for all devices of the process."""

ALL = slice(None)
"""All tensors of the rows."""

Row = tuple[int, int]
"""An engine block and a shard of it."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class BlockRows:
    """Engine tensors seen as rows: row ``(b, s)`` of tensor ``i`` is what its block ``b`` has of shard ``s``'s heads.

    ``tensors`` are shaped ``[num_blocks, heads, ...]`` with any strides; each is cut into ``shards`` along its heads.
    A page holds one row a tensor, in the order given, with the values in the order of the dimensions: its bytes
    depend on neither the strides nor on how many heads the engine keeps.

    Raises:
        ConfigError: the tensors disagree in their number of blocks, or their heads cannot be cut so.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], names: Sequence[str] | None = None, *, shards: int = 1) -> None:
        if not tensors:
            raise ConfigError("no KV cache tensors were given, expected at least one a layer")
        names = names or [str(position) for position in range(len(tensors))]
        self.tensors = [_as_shards(tensor, name, shards) for tensor, name in zip(tensors, names, strict=True)]
        counts = {rows.shape[0] for rows in self.tensors}
        if len(counts) != 1:
            raise ConfigError(f"KV cache tensors have {sorted(counts)} blocks, expected the same number in all of them")
        self.num_blocks = counts.pop()
        self.shards = shards
        self.row_bytes = [rows.shape[2:].numel() * rows.element_size() for rows in self.tensors]
        self.page_bytes = sum(self.row_bytes)
        ends = np.cumsum(self.row_bytes).tolist()
        self.spans = list(zip([0, *ends[:-1]], ends, strict=True))


def _as_shards(tensor: torch.Tensor, name: str, shards: int) -> torch.Tensor:
    """``tensor`` as integers ``[num_blocks, shards, ...]``, or ``[num_blocks, shards, bytes]`` where memory allows."""
    shape = tuple(tensor.shape)
    if tensor.dim() < 2 or 0 in shape or shape[1] % shards:
        raise ConfigError(
            f"KV cache tensor {name} has shape {shape}, expected [num_blocks, heads, ...] with heads a multiple of "
            f"{shards}"
        )
    integers = _INTEGERS.get(tensor.element_size())
    if integers is None:
        raise ConfigError(f"KV cache tensor {name} has values of type {tensor.dtype}, expected plain numbers")
    cut = tensor.detach().view(integers).unflatten(1, (shards, -1))
    try:
        return cut.view(shape[0], shards, -1).view(torch.uint8)
    except RuntimeError:
        # The heads of a shard do not lie side by side, or their values do not: copied with strides.
        return cut


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
        self.tensors = [_as_integers(tensor, name) for name, tensor in named]
        for what, values in (
            ("numbers of blocks", {tensor.shape[0] for _, tensor in named}),
            ("block sizes", {tensor.shape[1] for _, tensor in named}),
            ("devices", {str(tensor.device) for _, tensor in named}),
        ):
            if len(values) != 1:
                raise ConfigError(f"KV cache tensors have different {what} {sorted(values)}, expected one for all")
        self.num_blocks, self.block_size = self.tensors[0].shape[:2]
        self.layers = [len(layer) for layer in layers]
        self.parts: list[Part] = []
        end = 0
        for (_, given), tensor in zip(named, self.tensors, strict=True):
            heads, head_size = tensor.shape[2:]
            start = -(-end // PART_ALIGN) * PART_ALIGN
            part = Part(start, heads * head_size * tensor.element_size(), _dtype_name(given), heads, head_size)
            self.parts.append(part)
            end = start + self.block_size * part.token_bytes
        # The note lies in the place of a token that a partial block does not have, where one token is large enough.
        self.page_bytes = end if self.parts[-1].token_bytes >= self.COUNT_BYTES else end + self.COUNT_BYTES
        self._arrays: list[Any] | None = None

    @property
    def arrays(self) -> list[Any]:
        """The tensors as numpy arrays that share their memory; host tensors only."""
        if self._arrays is None:
            self._arrays = [tensor.numpy() for tensor in self.tensors]
        return self._arrays


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _as_integers(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """``tensor`` with its values as integers of the same size, because numpy lacks the types that models use."""
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
    integers = _INTEGERS.get(tensor.element_size())
    if integers is None or tensor.is_complex() or tensor.is_quantized:
        raise ConfigError(
            f"KV cache tensor {name} (layer.tensor) has values of type {tensor.dtype}, expected plain numbers"
        )
    return tensor.detach().view(integers)


def slot_numbers(slot_mapping: Any) -> Numbers:
    """A copy of ``slot_mapping``, a tensor or sequence of whole numbers in one dimension, as 64-bit integers.

    Raises:
        ConfigError: it is something else.
    """
    if isinstance(slot_mapping, torch.Tensor):
        slot_mapping = slot_mapping.detach().cpu().numpy()
    try:
        numbers = np.asarray(slot_mapping)
    except ValueError as error:
        raise ConfigError(f"slot_mapping is not a sequence of whole numbers: {error}") from error
    if numbers.size == 0 and numbers.ndim == 1:
        return np.zeros(0, dtype=np.int64)
    if numbers.ndim != 1 or numbers.dtype.kind not in "iu" or numbers.dtype == np.uint64:
        raise ConfigError(
            f"slot_mapping has {numbers.ndim} dimensions of {numbers.dtype}, expected one dimension of whole numbers"
        )
    return numbers.astype(np.int64, copy=True)


class Device(ABC):
    """Copies between engine memory and pool memory for one kind of accelerator.

    Copies may still run when a verb returns; they are over when :meth:`synchronise` has returned.
    """

    at_once = False
    """Whether a copy is over when its verb returns."""

    @abstractmethod
    def pin(self, buffer: memoryview) -> None:
        """Make pool memory known to the accelerator's driver, once a segment."""

    @abstractmethod
    def unpin(self, buffer: memoryview) -> None:
        """Take back :meth:`pin`, before the memory is unmapped."""

    @abstractmethod
    def copy_out(self, rows: BlockRows, row: Row, page: memoryview, tensors: slice = ALL) -> None:
        """A shard of an engine block to a page of ``rows.page_bytes`` bytes; only its part of ``tensors``."""

    @abstractmethod
    def copy_in(self, rows: BlockRows, row: Row, page: memoryview, tensors: slice = ALL) -> None:
        """A page of ``rows.page_bytes`` bytes to a shard of an engine block; only its part of ``tensors``."""

    @abstractmethod
    def copy_tokens_out(self, rows: TokenRows, place: SlotSpan, page: memoryview) -> None:
        """The tokens of one block, wherever the engine has them, to the beginnings of a token page's parts."""

    @abstractmethod
    def copy_tokens_in(self, rows: TokenRows, place: SlotSpan, page: memoryview) -> None:
        """The first ``place.tokens`` tokens of a token page to where the engine wants them."""

    @abstractmethod
    def mark(self) -> object:
        """A point in the engine's work, for :meth:`wait_for`: what was computed until now."""

    @abstractmethod
    def wait_for(self, mark: object) -> None:
        """Order the copies that follow behind the engine's work up to ``mark``."""

    @abstractmethod
    def synchronise(self) -> None:
        """Wait until all copies of this device object are over."""


class CpuDevice(Device):
    """Engine memory is host memory: a copy is a copy, and it is over at once."""

    at_once = True

    def __init__(self) -> None:
        self._arrays: weakref.WeakKeyDictionary[BlockRows, list[Any]] = weakref.WeakKeyDictionary()

    def pin(self, buffer: memoryview) -> None:
        """Host memory needs no pinning."""

    def unpin(self, buffer: memoryview) -> None:
        """Host memory was not pinned."""

    def _rows(self, rows: BlockRows) -> list[Any]:
        arrays = self._arrays.get(rows)
        if arrays is None:
            arrays = self._arrays[rows] = [tensor.numpy() for tensor in rows.tensors]
        return arrays

    def copy_out(self, rows: BlockRows, row: Row, page: memoryview, tensors: slice = ALL) -> None:
        for array, (start, _) in zip(self._rows(rows)[tensors], rows.spans[tensors], strict=True):
            source = array[row]
            np.ndarray(source.shape, source.dtype, page, start)[...] = source

    def copy_in(self, rows: BlockRows, row: Row, page: memoryview, tensors: slice = ALL) -> None:
        for array, (start, _) in zip(self._rows(rows)[tensors], rows.spans[tensors], strict=True):
            target = array[row]
            target[...] = np.ndarray(target.shape, target.dtype, page, start)

    def copy_tokens_out(self, rows: TokenRows, place: SlotSpan, page: memoryview) -> None:
        for array, part in zip(rows.arrays, rows.parts, strict=True):
            target = np.ndarray((place.tokens, part.heads, part.head_size), array.dtype, page, part.start)
            if isinstance(place, SlotRun):
                target[...] = array[place.block, place.first : place.first + place.tokens]
            else:
                target[...] = array[place.blocks, place.positions]

    def copy_tokens_in(self, rows: TokenRows, place: SlotSpan, page: memoryview) -> None:
        for array, part in zip(rows.arrays, rows.parts, strict=True):
            source = np.ndarray((place.tokens, part.heads, part.head_size), array.dtype, page, part.start)
            if isinstance(place, SlotRun):
                array[place.block, place.first : place.first + place.tokens] = source
            else:
                array[place.blocks, place.positions] = source

    def mark(self) -> object:
        return None

    def wait_for(self, mark: object) -> None:
        """The engine's work on the CPU is over when it returns."""

    def synchronise(self) -> None:
        """Copies are over when they return."""


class StreamDevice(Device):
    """An accelerator with streams: copies run on a stream of their own beside the engine's."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._backend = getattr(torch, device.type)
        self._stream = self._backend.Stream(device=device)
        self._pinned: set[int] = set()

    def _registers(self) -> bool:
        return hasattr(self._backend, "cudart")

    def pin(self, buffer: memoryview) -> None:
        address = torch.frombuffer(buffer, dtype=torch.uint8).data_ptr()
        if address in self._pinned or not self._registers():
            return
        with self._backend.device(self._device):  # a thread begins on the first device, which may be another's
            self._backend.check_error(int(self._backend.cudart().cudaHostRegister(address, len(buffer), _PORTABLE)))
        self._pinned.add(address)

    def unpin(self, buffer: memoryview) -> None:
        address = torch.frombuffer(buffer, dtype=torch.uint8).data_ptr()
        if address in self._pinned:
            self._pinned.discard(address)
            with self._backend.device(self._device):
                self._backend.check_error(int(self._backend.cudart().cudaHostUnregister(address)))

    def copy_out(self, rows: BlockRows, row: Row, page: memoryview, tensors: slice = ALL) -> None:
        host = torch.frombuffer(page, dtype=torch.uint8)
        with torch.inference_mode(), self._backend.stream(self._stream):
            for tensor, (start, end) in zip(rows.tensors[tensors], rows.spans[tensors], strict=True):
                source = tensor[row]
                host[start:end].view(tensor.dtype).view(source.shape).copy_(source, non_blocking=True)

    def copy_in(self, rows: BlockRows, row: Row, page: memoryview, tensors: slice = ALL) -> None:
        host = torch.frombuffer(page, dtype=torch.uint8)
        with torch.inference_mode(), self._backend.stream(self._stream):
            for tensor, (start, end) in zip(rows.tensors[tensors], rows.spans[tensors], strict=True):
                target = tensor[row]
                target.copy_(host[start:end].view(tensor.dtype).view(target.shape), non_blocking=True)

    def copy_tokens_out(self, rows: TokenRows, place: SlotSpan, page: memoryview) -> None:
        host = torch.frombuffer(page, dtype=torch.uint8)
        with torch.inference_mode(), self._backend.stream(self._stream):
            index = _index(place, rows.tensors[0].device)
            for tensor, part in zip(rows.tensors, rows.parts, strict=True):
                _tokens(host, tensor, part, place.tokens).copy_(tensor[index], non_blocking=True)

    def copy_tokens_in(self, rows: TokenRows, place: SlotSpan, page: memoryview) -> None:
        host = torch.frombuffer(page, dtype=torch.uint8)
        with torch.inference_mode(), self._backend.stream(self._stream):
            index = _index(place, rows.tensors[0].device)
            for tensor, part in zip(rows.tensors, rows.parts, strict=True):
                source = _tokens(host, tensor, part, place.tokens)
                if isinstance(place, SlotRun):
                    tensor[index].copy_(source, non_blocking=True)
                else:
                    tensor[index] = source.to(tensor.device, non_blocking=True)

    def mark(self) -> object:
        event = self._backend.Event()
        event.record()
        return event

    def wait_for(self, mark: object) -> None:
        self._stream.wait_event(mark)

    def synchronise(self) -> None:
        self._stream.synchronize()


def _index(place: SlotSpan, device: torch.device) -> tuple[Any, Any]:
    if isinstance(place, SlotRun):
        return place.block, slice(place.first, place.first + place.tokens)
    return torch.from_numpy(place.blocks).to(device), torch.from_numpy(place.positions).to(device)


def _tokens(host: torch.Tensor, tensor: torch.Tensor, part: Part, count: int) -> torch.Tensor:
    """The first ``count`` tokens of one part of a page, as values like ``tensor``'s."""
    flat = host[part.start : part.start + count * part.token_bytes]
    return flat.view(tensor.dtype).view(count, part.heads, part.head_size)


def device_of(tensor: torch.Tensor) -> Device:
    """The :class:`Device` that copies to and from ``tensor``'s memory.

    Raises:
        ConfigError: the tensor lives on a device that has no streams in torch.
    """
    if tensor.device.type == "cpu":
        return CpuDevice()
    if tensor.device.type == "npu":
        importlib.import_module("torch_npu")
    if not hasattr(getattr(torch, tensor.device.type, None), "Stream"):
        raise ConfigError(f"KV cache tensors live on {tensor.device}, expected cpu, cuda or npu")
    return StreamDevice(tensor.device)
