"""Devices whose driver is a stand-in: host memory behind the interfaces of an accelerator."""

from __future__ import annotations

import contextlib
import ctypes
import random
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from ems.transfers.device import Batch, StreamDevice
from ems.transfers.plan import CopyPlan


class StreamBackend:
    """The stream functions of an accelerator's torch module."""

    class Stream:
        def __init__(self, device: Any) -> None:
            self.waited: list[object] = []
            self.waits: list[bool] = []
            """Whether who waited for its end slept meanwhile."""

        def wait_event(self, event: object) -> None:
            assert isinstance(event, StreamBackend.Event), "torch takes nothing else"
            self.waited.append(event)

        def synchronize(self) -> None:
            self.waits.append(False)

    class Event:
        def __init__(self, *, blocking: bool = False) -> None:
            self.blocking = blocking
            self.recorded = False
            self.stream: StreamBackend.Stream | None = None

        def record(self, stream: StreamBackend.Stream | None = None) -> None:
            self.recorded = True
            self.stream = stream

        def synchronize(self) -> None:
            assert self.stream is not None, "it was recorded on a stream"
            self.stream.waits.append(self.blocking)

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self.refuses = 0
        self.computing: dict[object, StreamBackend.Stream] = {}
        """On which engines compute, by device."""

    def current_stream(self, device: Any) -> StreamBackend.Stream:
        return self.computing.setdefault(device.type, self.Stream(device))

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        yield

    @contextlib.contextmanager
    def device(self, device: Any) -> Iterator[None]:
        yield

    def cudart(self) -> StreamBackend:
        return self

    def cudaHostRegister(self, address: int, length: int, flags: int) -> int:  # noqa: N802 - the driver's name
        assert address not in self.registered
        if not self.refuses:
            self.registered[address] = length
        return self.refuses

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802 - the driver's name
        del self.registered[address]
        return 0


class Driver:
    """Carries out a plan as a driver may: later, in any order; counts, and refuses what is out of bounds."""

    def __init__(self, tensors: Sequence[torch.Tensor], seed: int = 0) -> None:
        self._bounds = [(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in tensors]
        self._random = random.Random(seed)
        self._waiting: list[CopyPlan] = []
        self.submissions = 0
        self.pinned = False
        """Whether it was told so of the last plan."""

    def batch(self, plan: CopyPlan, pinned: bool) -> None:
        self.submissions += 1
        self.pinned = pinned
        self._waiting.append(plan)

    def run(self) -> None:
        """What the end of the stream waits for."""
        for plan in self._waiting:
            copies = list(zip(plan.targets.tolist(), plan.sources.tolist(), plan.sizes.tolist(), strict=True))
            assert all(self._owned(address, size) for address, size in zip(plan.engine, plan.sizes, strict=True))
            self._random.shuffle(copies)
            for target, source, size in copies:
                ctypes.memmove(target, source, size)
        self._waiting.clear()

    def _owned(self, address: int, size: int) -> bool:
        return any(begin <= address and address + size <= end for begin, end in self._bounds)


class DrivenDevice(StreamDevice):
    """A :class:`StreamDevice` over CPU tensors whose copies are made by a :class:`Driver` when they are waited for."""

    def __init__(
        self, tensors: Sequence[torch.Tensor], driver: Driver | None = None, *, kind: str = "pretended"
    ) -> None:
        self.driver = driver
        super().__init__([_Named(tensor, kind) for tensor in tensors], driver.batch if driver else _by_pieces(tensors))

    def synchronise(self) -> None:
        super().synchronise()
        if self.driver is not None:
            self.driver.run()


class _Named:
    """A tensor that says that it lives on a device of ``kind``."""

    def __init__(self, tensor: torch.Tensor, kind: str) -> None:
        self.tensor = tensor
        self.device = SimpleNamespace(type=kind)


def _by_pieces(tensors: Sequence[torch.Tensor]) -> Batch:
    from ems.transfers.device import PieceCopies

    return PieceCopies(tensors).copy
