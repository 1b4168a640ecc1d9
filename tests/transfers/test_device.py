"""Devices: copies are made, ordered behind the engine's work, and refused where nothing can make them."""

from __future__ import annotations

import ctypes
import importlib
import logging
import os
import sys
import threading
import types
from typing import Any

import pytest
import torch

from ems.errors import ConfigError
from ems.transfers import device as module
from ems.transfers.device import CpuDevice, Device, DevicePair, StreamDevice, batch_of, device_of
from ems.transfers.pins import SegmentPins
from ems.transfers.plan import CopyPlan, Slots
from ems.transfers.rows import BlockRows, PageBlocks
from tests.transfers.drivers import DrivenDevice, Driver, StreamBackend


@pytest.fixture(autouse=True)
def backend(monkeypatch: pytest.MonkeyPatch) -> StreamBackend:
    pretended = StreamBackend()
    monkeypatch.setattr(torch, "pretended", pretended, raising=False)
    return pretended


@pytest.fixture
def tensors() -> list[torch.Tensor]:
    return [torch.randn(8, 2, 4, 16, generator=torch.Generator().manual_seed(n)) for n in range(3)]


@pytest.fixture(params=["cpu", "driver", "pieces"])
def device(request: pytest.FixtureRequest, tensors: list[torch.Tensor]) -> Device:
    if request.param == "cpu":
        return device_of(tensors)
    return DrivenDevice(tensors, Driver(tensors) if request.param == "driver" else None)


def test_blocks_go_out_and_come_in(device: Device, tensors: list[torch.Tensor]) -> None:
    rows = BlockRows(tensors, shards=2)
    pages = [memoryview(bytearray(rows.page_bytes)) for _ in range(2)]
    before = [tensor.clone() for tensor in tensors]
    device.copy(rows.plan([PageBlocks([5]), PageBlocks([6], 1)], Slots.of(pages), out=True))
    device.copy(rows.plan([PageBlocks([1], 1), PageBlocks([2])], Slots.of(pages), out=False))
    device.synchronise()
    for new, old in zip(tensors, before, strict=True):
        assert torch.equal(new[1, 1], old[5, 0])
        assert torch.equal(new[2, 0], old[6, 1])
        new[1, 1], new[2, 0] = old[1, 1], old[2, 0]
        assert torch.equal(new, old)


def test_tensors_of_engines_in_inference_mode_are_filled() -> None:
    with torch.inference_mode():
        tensors = [torch.zeros(4, 1, 8, dtype=torch.int8)]
    for device in (device_of(tensors), DrivenDevice(tensors)):
        page = memoryview(bytearray(range(8)))
        device.copy(BlockRows(tensors).plan([PageBlocks([2])], Slots.of([page]), out=False))
        device.synchronise()
        assert tensors[0][2].flatten().tolist() == list(range(8))
        with torch.inference_mode():
            tensors[0].zero_()


def test_work_of_the_engine_comes_first(tensors: list[torch.Tensor]) -> None:
    device = DrivenDevice(tensors, Driver(tensors))
    mark: Any = device.mark()
    assert mark.recorded
    device.wait_for(mark)
    device.synchronise()
    assert device._stream.waited == [mark]
    assert len(device._stream.waits) == 1


def test_what_was_computed_is_what_this_device_computed(tensors: list[torch.Tensor], backend: StreamBackend) -> None:
    """Another device may be the current one of the thread."""
    mark: Any = DrivenDevice(tensors).mark()
    assert mark.stream is backend.computing["pretended"]


def test_a_copy_behind_nothing_waits_for_nothing(tensors: list[torch.Tensor]) -> None:
    device = DrivenDevice(tensors, Driver(tensors))
    device.wait_for(None)
    assert device._stream.waited == []


def test_what_is_submitted_meanwhile_is_kept_until_somebody_waited_for_it(
    tensors: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    device, rows = DrivenDevice(tensors), BlockRows(tensors)
    pages = [memoryview(bytearray(rows.page_bytes)) for _ in range(2)]
    first, second = (rows.plan([PageBlocks([5])], Slots.of([page]), out=True) for page in pages)
    device.copy(first)
    waiting: list[StreamBackend.Event] = []

    class End(StreamBackend.Event):
        def synchronize(self) -> None:
            waiting.append(self)
            if len(waiting) == 1:
                device.synchronise()
                device.copy(second)

    monkeypatch.setattr(device, "_end", End)
    device.synchronise()  # while it waits somebody else has waited, and copies more
    assert device._plans == [second]


def test_nothing_is_copied_while_memory_is_unpinned(tensors: list[torch.Tensor], backend: StreamBackend) -> None:
    drivers = [Driver(tensors), Driver(tensors)]
    pair, rows = DevicePair(), BlockRows(tensors)
    pair.load, pair.save = (DrivenDevice(tensors, driver) for driver in drivers)
    pair._pins.serve(pair.load)
    page = memoryview(bytearray(rows.page_bytes))
    pair.pin(page)
    plans = [rows.plan([PageBlocks([5])], Slots.of([page]), out=out) for out in (False, True)]
    left: list[int] = []
    others: list[threading.Thread] = []

    def unregister(address: int) -> int:
        left.append(sum(len(driver._waiting) for driver in drivers))
        for device, plan in zip((pair.load, pair.save), plans, strict=True):
            others.append(threading.Thread(target=device.copy, args=(plan,)))
            others[-1].start()
            others[-1].join(0.05)
        left.append(sum(len(driver._waiting) for driver in drivers))
        del backend.registered[address]
        return 0

    pair.load._unregister = unregister
    pair.load.copy(plans[0])
    pair.save.copy(plans[1])
    pair.unpin(page)
    for other in others:
        other.join()
    assert left == [0, 0]
    assert [driver.pinned for driver in drivers] == [False, False]


def test_who_waits_for_copies_of_cuda_leaves_its_core_to_others(
    tensors: list[torch.Tensor], backend: StreamBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "cuda", backend)
    device = DrivenDevice(tensors, kind="cuda")
    device.synchronise()
    assert device._stream.waits == [True]


def test_segments_are_pinned_for_the_device_that_is_registered_and_no_other(
    backend: StreamBackend, tensors: list[torch.Tensor]
) -> None:
    pins = SegmentPins()
    segments = [memoryview(bytearray(4096 * (number + 1))) for number in range(3)]
    pins.pin(segments[0])
    assert backend.registered == {}
    pins.serve(DrivenDevice(tensors))
    pins.pin(segments[1])
    assert sorted(backend.registered.values()) == [4096, 8192]
    pins.serve(DrivenDevice(tensors))
    pins.pin(segments[2])
    assert sorted(backend.registered.values()) == [4096, 8192, 12288]
    for segment in segments:
        pins.unpin(segment)
    assert backend.registered == {}


def test_memory_that_cannot_be_pinned_is_said_and_used_all_the_same(
    backend: StreamBackend, tensors: list[torch.Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    backend.refuses = 712
    device = DrivenDevice(tensors)
    buffer = memoryview(bytearray(4096))
    with caplog.at_level(logging.WARNING):
        device.pin(buffer)
    assert "could not pin 4096 bytes" in caplog.text
    assert "error 712" in caplog.text
    device.unpin(buffer)


def test_only_a_plan_whose_memory_is_pinned_is_called_so(tensors: list[torch.Tensor]) -> None:
    """A kernel that reads other memory ends the process."""
    driver = Driver(tensors)
    device, rows = DrivenDevice(tensors, driver), BlockRows(tensors)
    size = rows.page_bytes
    segments = [memoryview(bytearray(4 * size)) for _ in range(3)]
    for segment in segments[:2]:
        device.pin(segment)

    def told(*pages: memoryview) -> bool:
        device.copy(rows.plan([PageBlocks([block]) for block in range(len(pages))], Slots.of(pages), out=False))
        return driver.pinned

    assert told(segments[0][:size], segments[1][3 * size :])
    assert not told(segments[0][:size], segments[2][:size])
    device.unpin(segments[1])
    assert told(segments[0][size:])
    assert not told(segments[0][size:], segments[1][:size])
    device.unpin(segments[0])
    assert not told(segments[0][:size])


def test_devices_without_streams_and_tensors_on_several_are_refused() -> None:
    with pytest.raises(ConfigError, match="expected cpu, cuda, xpu or npu"):
        device_of([torch.zeros(1, device="meta")])
    with pytest.raises(ConfigError, match="expected one device"):
        device_of([torch.zeros(1, device="meta"), torch.zeros(1)])


class TestCallsOfTheEngine:
    """Plans reach the engine's own call as its signature wants them."""

    plan = BlockRows([torch.zeros(4, 1, 8, dtype=torch.int8)]).plan

    @pytest.fixture
    def calls(self, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
        calls: list[tuple[str, dict[str, Any]]] = []

        def noted(name: str) -> Any:
            return lambda *arguments, **named: calls.append((name, {"arguments": arguments, **named}))

        namespace = types.SimpleNamespace(swap_blocks_batch=noted("driver"))
        monkeypatch.setattr(torch.ops, "_C_cache_ops", namespace, raising=False)
        monkeypatch.setattr(torch.ops, "_C_ascend", types.SimpleNamespace(swap_blocks_batch=noted("ascend")))
        ops: Any = importlib.import_module("vllm._custom_ops")
        monkeypatch.setattr(ops, "swap_blocks_batch", noted("driver"))
        kernel: Any = importlib.import_module("vllm.v1.kv_offload.cpu.swap_blocks_triton")
        monkeypatch.setattr(kernel, "swap_blocks_batch", noted("kernel"))
        monkeypatch.setattr("vllm.triton_utils.HAS_TRITON", True)
        utils = types.ModuleType("vllm_ascend.utils")
        utils.enable_custom_op = lambda: True  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "vllm_ascend", types.ModuleType("vllm_ascend"))
        monkeypatch.setitem(sys.modules, "vllm_ascend.utils", utils)
        return calls

    def made(self, *, out: bool, size: int = 8) -> CopyPlan:
        rows = BlockRows([torch.zeros(4, 1, size, dtype=torch.int8)])
        return rows.plan([PageBlocks([1])], Slots.of([memoryview(bytearray(size))]), out=out)

    @pytest.mark.parametrize(
        ("kind", "out", "size", "pinned", "expected"),
        [
            ("cuda", True, 8, True, "driver"),
            ("cuda", False, 8, True, "kernel"),
            ("cuda", False, 8, False, "driver"),
            ("cuda", False, 7, True, "driver"),
            ("cuda", False, 1 << 16, True, "driver"),
            ("xpu", False, 8, True, "driver"),
            ("npu", True, 8, True, "ascend"),
            ("npu", False, 8, True, "ascend"),
        ],
    )
    def test_the_call_and_its_arguments(
        self, calls: list[tuple[str, dict[str, Any]]], kind: str, *, out: bool, size: int, pinned: bool, expected: str
    ) -> None:
        batch, plan = batch_of(kind), self.made(out=out, size=size)
        assert batch is not None
        batch(plan, pinned)
        ((name, given),) = calls
        assert name == expected
        sources, targets, sizes = (tensor.tolist() for tensor in given["arguments"][:3])
        wanted = torch.uint64 if kind == "xpu" else torch.int64
        assert {tensor.dtype for tensor in given["arguments"][:3]} == {wanted}
        assert (sources, targets, sizes) == (plan.sources.tolist(), plan.targets.tolist(), [size])
        if kind == "npu":
            assert given["arguments"][3] == int(out)
        else:
            assert given["is_src_access_order_any"] is not out

    def test_where_nothing_compiles_kernels_the_driver_copies(
        self, calls: list[tuple[str, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("vllm.triton_utils.HAS_TRITON", False)
        batch = batch_of("cuda")
        assert batch is not None
        batch(self.made(out=False), True)
        assert [name for name, _ in calls] == ["driver"]

    def test_without_such_a_call_it_is_said(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(torch.ops, "_C_cache_ops", types.SimpleNamespace(), raising=False)
        with caplog.at_level(logging.WARNING):
            assert batch_of("cuda") is None
        assert "piece by piece" in caplog.text


def test_a_release_that_pins_nothing_for_a_device_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm.v1.kv_offload.cpu.host_register", None)
    register, unregister = module._registration_of("xpu")
    assert "no call for it" in register(4096, 8192)
    unregister(4096)


class AscendLibrary:
    """``libascendcl.so``: functions that take what ctypes would convert."""

    def __init__(self, code: int = 0) -> None:
        self.calls: list[tuple[object, ...]] = []

        def pin(*given: object) -> int:
            self.calls.append(given)
            return code

        def unpin(*given: object) -> None:
            self.calls.append(given)

        self.aclrtHostRegisterV2, self.aclrtHostUnregister = pin, unpin


class TestPinningOnAscend:
    """Where memory cannot be pinned copies are slower, and the reason is in the log."""

    @pytest.fixture(autouse=True)
    def _linux(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "uname", lambda: types.SimpleNamespace(release="6.6.0-72.oe2403"))

    @pytest.mark.parametrize(("code", "failure"), [(0, ""), (207001, "the driver's error 207001")])
    def test_memory_is_pinned_and_no_more(self, monkeypatch: pytest.MonkeyPatch, code: int, failure: str) -> None:
        library = AscendLibrary(code)
        monkeypatch.setattr(ctypes, "CDLL", lambda _name: library)
        register, unregister = module._registration_of("npu")
        assert register(4096, 8192) == failure
        unregister(4096)
        assert library.calls == [(4096, 8192, 0x10000000), (4096,)]

    def test_a_driver_of_before_cannot(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(ctypes, "CDLL", lambda _name: types.SimpleNamespace(aclrtHostUnregister=None))
        register, unregister = module._registration_of("npu")
        assert "aclrtHostRegisterV2" in register(4096, 8192)
        unregister(4096)

    def test_nor_can_one_that_is_not_there(self) -> None:
        register, _ = module._registration_of("npu")
        assert "libascendcl.so" in register(4096, 8192)

    @pytest.mark.parametrize("release", ["5.10.0-216.oe2203", "4.19.90"])
    def test_on_an_old_linux_it_is_not_tried(self, monkeypatch: pytest.MonkeyPatch, release: str) -> None:
        """Its manual says that this ends badly with memory that the driver has not allocated."""
        library = AscendLibrary()
        monkeypatch.setattr(ctypes, "CDLL", lambda _name: library)
        monkeypatch.setattr(os, "uname", lambda: types.SimpleNamespace(release=release))
        register, _ = module._registration_of("npu")
        assert register(4096, 8192) == f"on Linux {release} drivers pin no memory but their own"
        assert not library.calls


def test_rows_that_are_gone_are_not_mistaken_for_new_ones() -> None:
    """A new object may get the address of one that was freed; its tensors are others all the same."""
    device = CpuDevice()
    for value in range(20):
        rows = BlockRows([torch.full((2, 4), value, dtype=torch.int8)])
        page = memoryview(bytearray(4))
        device.copy(rows.plan([PageBlocks([0])], Slots.of([page]), out=True))
        assert bytes(page) == bytes([value] * 4)
        del rows


@pytest.mark.parametrize(
    ("page_bytes", "copies", "pages"),
    [
        pytest.param(1 << 20, 16, 32, id="large-copies"),
        pytest.param(1 << 20, 8192, 2, id="small-copies"),
        pytest.param(64 << 20, 16, 1, id="a-large-page"),
        pytest.param(64 << 20, 1 << 20, 1, id="a-large-page-of-small-copies"),
    ],
)
def test_small_copies_are_planned_step_by_step(page_bytes: int, copies: int, pages: int) -> None:
    assert CpuDevice().pages_at_once(page_bytes, copies) == pages
    assert StreamDevice.batch_bytes == StreamDevice.step_bytes  # there it makes no difference
