"""Engine tensors and pool pages: both kinds of rows, both kinds of device."""

from __future__ import annotations

import contextlib
import gc
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from ems.cc_v1.registration import PageMemory
from ems.cc_v1.slots import Scattered, SlotRun, place_of
from ems.cc_v1.tensors import BlockRows, CpuDevice, StreamDevice, TokenRows, device_of
from ems.errors import ConfigError
from tests.cc_v1.conftest import make_caches, same, tokens, zeros_like

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ems.cc_v1.tensors import Device


class PretendedBackend:
    """The stream functions of an accelerator's torch module, on host memory."""

    class Stream:
        def __init__(self, device: Any) -> None:
            self.waited: list[object] = []
            self.synchronised = 0

        def wait_event(self, event: object) -> None:
            self.waited.append(event)

        def synchronize(self) -> None:
            self.synchronised += 1

    class Event:
        def __init__(self) -> None:
            self.recorded = False

        def record(self) -> None:
            self.recorded = True

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        yield

    @contextlib.contextmanager
    def device(self, device: Any) -> Iterator[None]:
        yield

    def cudart(self) -> PretendedBackend:
        return self

    def cudaHostRegister(self, address: int, length: int, flags: int) -> int:  # noqa: N802 - the driver's name
        assert address not in self.registered
        self.registered[address] = length
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802 - the driver's name
        del self.registered[address]
        return 0

    def check_error(self, code: int) -> None:
        assert code == 0


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> PretendedBackend:
    pretended = PretendedBackend()
    monkeypatch.setattr(torch, "pretended", pretended, raising=False)
    return pretended


@pytest.fixture(params=["cpu", "stream"])
def device(request: pytest.FixtureRequest, backend: PretendedBackend) -> Device:
    if request.param == "cpu":
        return device_of(torch.zeros(1))
    named: Any = type("Named", (), {"type": "pretended"})()
    return StreamDevice(named)


def page_of(rows: TokenRows) -> memoryview:
    return memoryview(bytearray(rows.page_bytes))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.float8_e5m2, torch.bool])
@pytest.mark.parametrize(
    "slots", [[4, 5, 6, 7], [5, 6], [7, 6, 5, 4], [1, 30, 17, 2], [3]], ids=lambda slots: "-".join(map(str, slots))
)
def test_tokens_go_out_and_come_in(device: Device, dtype: Any, slots: list[int]) -> None:
    caches = [[t.permute(0, 2, 1, 3).contiguous().permute(0, 2, 1, 3) for t in layer] for layer in make_caches(dtype)]
    rows = TokenRows(caches)
    place = place_of(np.array(slots), rows.block_size)
    page = page_of(rows)
    device.copy_tokens_out(rows, place, page)
    device.synchronise()
    for part, expected in zip(rows.parts, tokens(caches, slots), strict=True):
        raw = expected.numpy().tobytes()
        assert bytes(page[part.start : part.start + len(raw)]) == raw

    other = zeros_like(caches)
    device.copy_tokens_in(TokenRows(other), place, page)
    device.synchronise()
    assert same(tokens(other, slots), tokens(caches, slots))
    assert not any(part.any() for part in tokens(other, sorted(set(range(32)) - set(slots))))


def test_tensors_of_engines_in_inference_mode(device: Device) -> None:
    with torch.inference_mode():
        caches = [[torch.zeros(8, 4, 2, 8)]]
    rows = TokenRows(caches)
    page = memoryview(bytearray(np.arange(rows.page_bytes // 4, dtype=np.float32).tobytes()))
    device.copy_tokens_in(rows, SlotRun(2, 0, 4), page)
    device.copy_tokens_in(rows, Scattered(np.array([5, 7]), np.array([3, 0])), page)
    device.synchronise()
    assert caches[0][0][2].flatten().tolist() == list(range(64))
    assert caches[0][0][5, 3].flatten().tolist() == list(range(16))
    assert caches[0][0][7, 0].flatten().tolist() == list(range(16, 32))


def test_whole_blocks_go_out_and_come_in(device: Device) -> None:
    caches = make_caches(torch.bfloat16)
    flat = [tensor for layer in caches for tensor in layer]
    rows = BlockRows(flat)
    page = memoryview(bytearray(rows.page_bytes))
    device.copy_out(rows, (5, 0), page)
    device.synchronise()
    other = [torch.zeros_like(tensor) for tensor in flat]
    device.copy_in(BlockRows(other), (2, 0), page)
    device.synchronise()
    assert all(torch.equal(new[2], old[5]) for new, old in zip(other, flat, strict=True))


def test_rows_that_are_gone_are_not_mistaken_for_new_ones() -> None:
    """A new object may get the address of one that was freed; its tensors are others all the same."""
    device = CpuDevice()
    for value in range(20):
        rows = BlockRows([torch.full((2, 4), value, dtype=torch.int8)])
        page = memoryview(bytearray(4))
        device.copy_out(rows, (0, 0), page)
        assert bytes(page) == bytes([value] * 4)
        del rows


def test_work_of_the_engine_comes_first(backend: PretendedBackend) -> None:
    named: Any = type("Named", (), {"type": "pretended"})()
    device = StreamDevice(named)
    mark: Any = device.mark()
    assert mark.recorded
    device.wait_for(mark)
    device.synchronise()
    assert device._stream.waited == [mark]
    assert device._stream.synchronised == 1


def test_segments_are_pinned_once_and_unpinned_with_the_last_user(backend: PretendedBackend) -> None:
    named: Any = type("Named", (), {"type": "pretended"})()
    device = StreamDevice(named)

    class Segments:
        def segment(self, number: int) -> memoryview:
            return memoryview(bytearray(4096 * (number + 1)))

    memory = PageMemory(Segments(), device, 64)  # type: ignore[arg-type]
    for number in (0, 1, 0, 1):
        memory.segment(number)
    assert sorted(backend.registered.values()) == [4096, 8192]
    gone = weakref.ref(memory)
    del memory
    gc.collect()
    assert gone() is None
    assert backend.registered == {}


def test_devices_without_streams_are_refused() -> None:
    with pytest.raises(ConfigError, match="expected cpu, cuda or npu"):
        device_of(torch.zeros(1, device="meta"))


def test_parts_begin_on_even_addresses() -> None:
    rows = TokenRows([[torch.zeros(2, 3, 1, 1, dtype=torch.int8), torch.zeros(2, 3, 1, 5, dtype=torch.float64)]])
    assert [part.start for part in rows.parts] == [0, 8]
    assert rows.page_bytes == 8 + 3 * 5 * 8


@pytest.mark.parametrize(
    ("slots", "expected"),
    [
        ([8, 9, 10, 11], SlotRun(2, 0, 4)),
        ([9, 10], SlotRun(2, 1, 2)),
        ([31], SlotRun(7, 3, 1)),
        ([10, 11, 12], None),
        ([9, 8, 11, 10], None),
        ([8, 10, 9, 11], None),
        ([8, 8, 10], None),
    ],
    ids=lambda value: str(value) if isinstance(value, list) else "",
)
def test_runs_are_recognised(slots: list[int], expected: SlotRun | None) -> None:
    place = place_of(np.array(slots), 4)
    if expected is None:
        assert isinstance(place, Scattered)
        assert [4 * b + p for b, p in zip(place.blocks, place.positions, strict=True)] == slots
        assert place.tokens == len(slots)
    else:
        assert place == expected
