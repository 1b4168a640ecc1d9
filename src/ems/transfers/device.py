"""The seam in front of an accelerator: pin memory, copy what a plan says, order copies behind the engine's work.

The CPU is the device that every test runs on.  :class:`StreamDevice` serves accelerators whose torch module offers
streams; it hands a whole plan to the engine's own driver call: vLLM's ``swap_blocks_batch`` (``cuMemcpyBatchAsync``,
its counterparts on ROCm and XPU, and vLLM's kernel for many small pieces), or vllm-ascend's.  Where the engine has
none, it copies piece by piece, which is right but slow, and says so.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import os
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

import numpy as np
import torch

from ems.errors import ConfigError
from ems.transfers.checksums import PageSums
from ems.transfers.pins import SegmentPins
from ems.transfers.plan import STEP_BYTES, CopyPlan

logger = logging.getLogger("ems.transfers")

_PORTABLE = 1
"""Flag of ``cudaHostRegister``: pinned for all devices of the process."""

_ASCEND_PINNED = 0x10000000
"""Flag of ``aclrtHostRegisterV2``: memory that stays where it is."""

SMALL_COPY = 2048
"""Bytes of a page's copies in the mean, below which they are small ones."""

Batch = Callable[[CopyPlan, bool], None]
"""Tells a driver of all copies of a plan, on the stream that is current; and whether all of its memory is pinned."""


class Device(ABC):
    """Copies between engine memory and pool memory for one kind of accelerator.

    Copies may still run when a verb returns; they are over when :meth:`synchronise` has returned.
    """

    at_once = False
    """Whether a copy is over when its verb returns."""
    batch_bytes = 256 << 20
    """How much is planned at a time: enough to keep a link busy."""
    step_bytes = batch_bytes
    """How much is copied at a time: what who calls a copy off has to wait for."""
    sums = False
    """Whether copies out of the engine take the checksums of pages."""

    def pages_at_once(self, page_bytes: int, copies: int) -> int:
        """How many pages are planned together, of so many bytes and copies each; one at least.

        Copies of several steps are put into order for that, which takes longer than to plan each step by itself where
        they are small.
        """
        together = self.batch_bytes
        if page_bytes < SMALL_COPY * copies:
            together = min(together, self.step_bytes)
        return max(together // page_bytes, 1)

    @abstractmethod
    def pin(self, buffer: memoryview) -> None:
        """Make pool memory known to the accelerator's driver, once a segment."""

    @abstractmethod
    def unpin(self, buffer: memoryview) -> None:
        """Take back :meth:`pin`, before the memory is unmapped."""

    @abstractmethod
    def copy(self, plan: CopyPlan, sums: PageSums | None = None) -> None:
        """Copy what ``plan`` says; the caller keeps its engine's tensors alive until it is over.

        Where :attr:`sums` says so, it takes those of the pages with it, if the plan knows their slots.
        """

    @abstractmethod
    def mark(self) -> object:
        """A point in the engine's work, for :meth:`wait_for`: what the calling thread had computed until now."""

    @abstractmethod
    def wait_for(self, mark: object) -> None:
        """Order the copies that follow behind the engine's work up to ``mark``; None is before all of it."""

    @abstractmethod
    def synchronise(self) -> None:
        """Wait until all copies of this device object are over."""

    @abstractmethod
    def paused(self) -> AbstractContextManager[None]:
        """No copy of this device object runs or is submitted while this is entered."""


class DevicePair:
    """One device for each direction, so that loads do not queue behind saves.  Memory is pinned through the first."""

    def __init__(self, tensors: Sequence[torch.Tensor] = ()) -> None:
        self.load: Device = CpuDevice()
        self.save: Device = CpuDevice()
        self._pins = SegmentPins()
        if tensors:
            self.serve(tensors)

    def serve(self, tensors: Sequence[torch.Tensor]) -> None:
        """From now on for ``tensors``."""
        self.load, self.save = device_of(tensors), device_of(tensors)
        self._pins.serve(self.load)

    def pin(self, buffer: memoryview) -> None:
        self._pins.pin(buffer)

    def unpin(self, buffer: memoryview) -> None:
        # A copy into memory that is not pinned any more would end the process, whichever device makes it.
        with self.load.paused(), self.save.paused():
            self._pins.unpin(buffer)


class CpuDevice(Device):
    """Engine memory is host memory: a copy is a copy, and it is over at once."""

    at_once = True
    batch_bytes = 32 << 20
    step_bytes = STEP_BYTES

    def __init__(self) -> None:
        from ems.transfers.streaming import HostCopies  # takes a moment, which accelerators can do without

        self._copies = HostCopies()
        self.sums = self._copies.sums

    def pin(self, buffer: memoryview) -> None:
        """Host memory needs no pinning."""

    def unpin(self, buffer: memoryview) -> None:
        """Host memory was not pinned."""

    def copy(self, plan: CopyPlan, sums: PageSums | None = None) -> None:
        self._copies.copy(plan, sums)

    def mark(self) -> object:
        return None

    def wait_for(self, mark: object) -> None:
        """The engine's work on the CPU is over when it returns."""

    def synchronise(self) -> None:
        """Copies are over when they return."""

    def paused(self) -> AbstractContextManager[None]:
        return nullcontext()


class StreamDevice(Device):
    """An accelerator with streams: copies run on a stream of their own beside the engine's.

    ``tensors`` are the engine's; ``batch`` is the driver's call for a whole plan, if there is one.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], batch: Batch | None) -> None:
        self._device = tensors[0].device
        self._backend = getattr(torch, self._device.type)
        self._stream = self._backend.Stream(device=self._device)
        # Any other wait in CUDA takes a core of the processor for as long as it lasts.
        self._end = partial(self._backend.Event, **({"blocking": True} if self._device.type == "cuda" else {}))
        self._pinned: dict[int, int] = {}
        """Where pinned memory begins and ends."""
        self._submitting = threading.RLock()
        """Held where copies are submitted and where memory is unpinned: a kernel that reads memory which is not pinned
        any more would end the process."""
        self._register, self._unregister = _registration_of(self._device.type)
        self._batch = batch or PieceCopies(tensors).copy
        self._plans: list[CopyPlan] = []
        """Those that may still run."""

    def pin(self, buffer: memoryview) -> None:
        address = torch.frombuffer(buffer, dtype=torch.uint8).data_ptr()
        if address in self._pinned:
            return
        with self._backend.device(self._device):  # a thread begins on the first device, which may be another's
            failure = self._register(address, len(buffer))
        if failure:
            logger.warning(
                "EMS could not pin %d bytes of the pool for %s (%s): copies to and from them are slower, because the "
                "driver makes each of them twice",
                len(buffer),
                self._device,
                failure,
            )
            return
        self._pinned[address] = address + len(buffer)

    def unpin(self, buffer: memoryview) -> None:
        address = torch.frombuffer(buffer, dtype=torch.uint8).data_ptr()
        with self._submitting:
            if self._pinned.pop(address, None) is not None:
                self._stream.synchronize()
                with self._backend.device(self._device):
                    self._unregister(address)

    def copy(self, plan: CopyPlan, sums: PageSums | None = None) -> None:  # noqa: ARG002 - it has none to take
        with (
            self._submitting,
            torch.inference_mode(),
            self._backend.device(self._device),
            self._backend.stream(self._stream),
        ):
            self._plans.append(plan)
            self._batch(plan, self._is_pinned(plan))

    def _is_pinned(self, plan: CopyPlan) -> bool:
        starts = sorted(self._pinned)
        owners = np.searchsorted(starts, plan.memory, side="right") - 1
        if not starts or bool((owners < 0).any()):
            return False
        ends = np.array([self._pinned[start] for start in starts])
        return bool((plan.memory + plan.sizes <= ends[owners]).all())

    def mark(self) -> object:
        event = self._backend.Event()
        event.record(self._backend.current_stream(self._device))
        return event

    def wait_for(self, mark: object) -> None:
        if mark is not None:
            self._stream.wait_event(mark)

    def synchronise(self) -> None:
        over = {id(plan) for plan in list(self._plans)}  # another thread may add to them, or wait, meanwhile
        end = self._end()
        end.record(self._stream)
        end.synchronize()
        with self._submitting:
            self._plans = [plan for plan in self._plans if id(plan) not in over]

    @contextmanager
    def paused(self) -> Iterator[None]:
        with self._submitting:
            self.synchronise()
            yield


def _registration_of(kind: str) -> tuple[Callable[[int, int], str], Callable[[int], object]]:
    """The calls that make host memory known to a driver, which answers with what went wrong, and take that back."""
    if kind == "npu":
        return _ascend_registration()
    if kind == "xpu":
        try:
            host: Any = importlib.import_module("vllm.v1.kv_offload.cpu.host_register")
        except ImportError:
            return lambda _address, _size: "this release of vLLM has no call for it", lambda _address: None
        return lambda address, size: "" if host.host_register(address, size) else "see above", host.host_unregister
    runtime = getattr(torch, kind).cudart()

    def register(address: int, size: int) -> str:
        code = int(runtime.cudaHostRegister(address, size, _PORTABLE))
        if code and kind == "cuda":
            # The runtime keeps the error until it is asked for one: the engine's next kernel would be blamed.
            with suppress(RuntimeError):
                torch.ones(1, device=kind)
        return f"the driver's error {code}" if code else ""

    return register, runtime.cudaHostUnregister


def _ascend_registration() -> tuple[Callable[[int, int], str], Callable[[int], object]]:
    """The calls of the Ascend computing language, which torch_npu does not offer; CANN 8.5 and later pin memory."""
    release = os.uname().release
    old = tuple(map(int, re.findall(r"\d+", release)[:2])) <= (5, 10)
    failure = f"on Linux {release} drivers pin no memory but their own" if old else ""
    try:
        library = ctypes.CDLL("libascendcl.so")
        pin, unpin = library.aclrtHostRegisterV2, library.aclrtHostUnregister
    except (OSError, AttributeError) as error:
        failure = str(error)
    if failure:
        return lambda _address, _size: failure, lambda _address: None
    pin.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32]
    unpin.argtypes = [ctypes.c_void_p]

    def register(address: int, size: int) -> str:
        code = pin(address, size, _ASCEND_PINNED)
        return f"the driver's error {code}" if code else ""

    return register, unpin


class PieceCopies:
    """Copies a plan piece by piece with torch, where the driver takes no lists."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
        self._starts = sorted(storages)
        self._bytes = [
            torch.empty(0, dtype=torch.uint8, device=tensors[0].device).set_(storages[start]) for start in self._starts
        ]

    def copy(self, plan: CopyPlan, _pinned: bool) -> None:
        owners = np.searchsorted(self._starts, plan.engine, side="right") - 1
        for owner, engine, memory, size in zip(
            owners.tolist(), plan.engine.tolist(), plan.memory.tolist(), plan.sizes.tolist(), strict=True
        ):
            begin = engine - self._starts[owner]
            of_engine = self._bytes[owner][begin : begin + size]
            of_page = torch.frombuffer((ctypes.c_uint8 * size).from_address(memory), dtype=torch.uint8)
            source, target = (of_engine, of_page) if plan.out else (of_page, of_engine)
            target.copy_(source, non_blocking=True)


def _vllm_batch(kernel: bool, column_type: type[np.signedinteger[Any] | np.unsignedinteger[Any]]) -> Batch:
    """The call of vLLM, and its ``kernel``, which reads pinned memory: the faster way to load small pieces."""
    ops: Any = importlib.import_module("vllm._custom_ops")
    small: Any = importlib.import_module("vllm.v1.kv_offload.cpu.swap_blocks_triton") if kernel else None

    def batch(plan: CopyPlan, pinned: bool) -> None:
        source, target, sizes = (
            torch.from_numpy(column.view(column_type)) for column in (plan.sources, plan.targets, plan.sizes)
        )
        # Nobody writes into pages while they are read; engine memory is read in the order of the stream.
        any_order = not plan.out
        largest = int(plan.sizes.max())
        in_words = not ((plan.engine | plan.memory | plan.sizes) % 8).any()
        if small is not None and pinned and in_words and not plan.out and largest < small.THRESHOLD_BYTES:
            chunk = min(1 << (largest - 1).bit_length(), 8192)
            small.swap_blocks_batch(source, target, sizes, is_src_access_order_any=any_order, bytes_per_chunk=chunk)
        else:
            ops.swap_blocks_batch(source, target, sizes, is_src_access_order_any=any_order)

    return batch


def _ascend_batch() -> Batch:
    """The call of vllm-ascend."""
    call: Any = torch.ops._C_ascend.swap_blocks_batch  # noqa: SLF001 - the name under which it is published

    def batch(plan: CopyPlan, _pinned: bool) -> None:
        call(*map(torch.from_numpy, (plan.sources, plan.targets, plan.sizes)), int(plan.out))

    return batch


def _has_triton() -> bool:
    """Whether vLLM can compile kernels here; where it cannot, it has stand-ins that only fail when they are called."""
    return bool(getattr(importlib.import_module("vllm.triton_utils"), "HAS_TRITON", False))


def batch_of(kind: str) -> Batch | None:
    """The driver's call for a whole plan on devices of ``kind``; None where the engine has none."""
    try:
        if kind == "npu":
            importlib.import_module("vllm_ascend.utils").enable_custom_op()
            return _ascend_batch()
        column_type = np.uint64 if kind == "xpu" else np.int64
        kernel = kind == "cuda" and torch.version.hip is None and _has_triton()
        batch = _vllm_batch(kernel=kernel, column_type=column_type)
        torch.ops._C_cache_ops.swap_blocks_batch  # noqa: B018, SLF001 - fails where the engine has no such call
    except (ImportError, AttributeError) as error:
        logger.warning("EMS copies piece by piece, which is slow: the engine has no call for many copies (%s)", error)
        return None
    return batch


def device_of(tensors: Sequence[torch.Tensor]) -> Device:
    """A :class:`Device` that copies to and from the memory of ``tensors``.

    Raises:
        ConfigError: they live on a device that has no streams in torch, or on several.
    """
    kinds = {str(tensor.device) for tensor in tensors}
    if len(kinds) != 1:
        raise ConfigError(f"KV cache tensors live on {', '.join(sorted(kinds))}, expected one device")
    kind = tensors[0].device.type
    if kind == "cpu":
        return CpuDevice()
    if kind == "npu":
        importlib.import_module("torch_npu")
    if not hasattr(getattr(torch, kind, None), "Stream"):
        raise ConfigError(f"KV cache tensors live on {tensors[0].device}, expected cpu, cuda, xpu or npu")
    return StreamDevice(tensors, batch_of(kind))
