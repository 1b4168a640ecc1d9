"""The one place where engine memory meets pool memory: tensors on one side, bytes of a page on the other.

A :class:`Device` is the seam in front of an accelerator: pin, copy out, copy in, synchronise.  The CPU is the
one that every test runs on; :class:`StreamDevice` serves accelerators whose torch module offers streams
(``torch.cuda``, ``torch.npu``).  A page is the concatenation of one row a tensor, in the order given; whole
blocks only, because an engine may pack the tokens inside a block as it likes.

Ownership: the engine owns its tensors and keeps the blocks untouched while a copy runs; the pool owns pages.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ems.errors import ConfigError


class BlockRows:
    """Engine tensors seen as rows of bytes: row ``b`` of tensor ``i`` is that tensor's part of block ``b``.

    ``tensors`` have the block as their first dimension, in any layout whose blocks are contiguous memory.

    Raises:
        ConfigError: a tensor's blocks are not contiguous, or the tensors disagree in their number of blocks.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], names: Sequence[str] | None = None) -> None:
        if not tensors:
            raise ConfigError("no KV cache tensors were given, expected at least one a layer")
        names = names or [str(position) for position in range(len(tensors))]
        self.tensors = [_as_rows(tensor, name) for tensor, name in zip(tensors, names, strict=True)]
        counts = {rows.shape[0] for rows in self.tensors}
        if len(counts) != 1:
            raise ConfigError(f"KV cache tensors have {sorted(counts)} blocks, expected the same number in all of them")
        self.num_blocks = counts.pop()
        self.row_bytes = [rows.shape[1] for rows in self.tensors]
        self.page_bytes = sum(self.row_bytes)
        ends = np.cumsum(self.row_bytes).tolist()
        self.spans = list(zip([0, *ends[:-1]], ends, strict=True))


def _as_rows(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """``tensor`` of any shape ``[num_blocks, ...]`` as a ``uint8`` view ``[num_blocks, bytes of a block]``.

    The dimensions inside a block may be permuted: the row then has the bytes in memory order.  The blocks
    themselves may lie apart.
    """
    blocks, inner = tensor.shape[0], list(zip(tensor.stride()[1:], tensor.shape[1:], strict=True))
    inner.sort(reverse=True)
    expected = 1
    for stride, size in reversed(inner):
        if size != 1 and stride != expected:
            raise ConfigError(
                f"the blocks of KV cache tensor {name} (shape {tuple(tensor.shape)}, strides {tensor.stride()}) are "
                "not contiguous memory, which this version of EMS needs"
            )
        expected *= size
    flat = torch.as_strided(tensor, (blocks, expected), (tensor.stride(0), 1), tensor.storage_offset())
    return flat.view(torch.uint8)


class Device(ABC):
    """Copies between engine memory and pool memory for one kind of accelerator.

    Copies may still run when a verb returns; they are over when :meth:`synchronise` has returned.
    """

    @abstractmethod
    def pin(self, buffer: memoryview) -> None:
        """Make pool memory known to the accelerator's driver, once a segment."""

    @abstractmethod
    def copy_out(self, rows: BlockRows, block: int, page: memoryview) -> None:
        """Engine block ``block`` to a page of ``rows.page_bytes`` bytes."""

    @abstractmethod
    def copy_in(self, rows: BlockRows, block: int, page: memoryview) -> None:
        """A page of ``rows.page_bytes`` bytes to engine block ``block``."""

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

    def __init__(self) -> None:
        self._arrays: dict[int, list[Any]] = {}

    def pin(self, buffer: memoryview) -> None:
        """Host memory needs no pinning."""

    def _rows(self, rows: BlockRows) -> list[Any]:
        arrays = self._arrays.get(id(rows))
        if arrays is None:
            arrays = self._arrays[id(rows)] = [tensor.numpy() for tensor in rows.tensors]
        return arrays

    def copy_out(self, rows: BlockRows, block: int, page: memoryview) -> None:
        target = np.frombuffer(page, dtype=np.uint8)
        for array, (start, end) in zip(self._rows(rows), rows.spans, strict=True):
            target[start:end] = array[block]

    def copy_in(self, rows: BlockRows, block: int, page: memoryview) -> None:
        source = np.frombuffer(page, dtype=np.uint8)
        for array, (start, end) in zip(self._rows(rows), rows.spans, strict=True):
            array[block] = source[start:end]

    def mark(self) -> object:
        return None

    def wait_for(self, mark: object) -> None:
        """The engine's work on the CPU is over when it returns."""

    def synchronise(self) -> None:
        """Copies are over when they return."""


class StreamDevice(Device):
    """An accelerator with streams: copies run on a stream of their own beside the engine's."""

    def __init__(self, device: torch.device) -> None:
        self._backend = getattr(torch, device.type)
        self._stream = self._backend.Stream(device=device)
        self._pinned: set[int] = set()

    def pin(self, buffer: memoryview) -> None:
        host = torch.frombuffer(buffer, dtype=torch.uint8)
        address = host.data_ptr()
        if address in self._pinned or not hasattr(self._backend, "cudart"):
            return
        self._backend.check_error(int(self._backend.cudart().cudaHostRegister(address, len(buffer), 0)))
        self._pinned.add(address)

    def copy_out(self, rows: BlockRows, block: int, page: memoryview) -> None:
        target = torch.frombuffer(page, dtype=torch.uint8)
        with self._backend.stream(self._stream):
            for tensor, (start, end) in zip(rows.tensors, rows.spans, strict=True):
                target[start:end].copy_(tensor[block], non_blocking=True)

    def copy_in(self, rows: BlockRows, block: int, page: memoryview) -> None:
        source = torch.frombuffer(page, dtype=torch.uint8)
        with self._backend.stream(self._stream):
            for tensor, (start, end) in zip(rows.tensors, rows.spans, strict=True):
                tensor[block].copy_(source[start:end], non_blocking=True)

    def mark(self) -> object:
        event = self._backend.Event()
        event.record()
        return event

    def wait_for(self, mark: object) -> None:
        self._stream.wait_event(mark)

    def synchronise(self) -> None:
        self._stream.synchronize()


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
