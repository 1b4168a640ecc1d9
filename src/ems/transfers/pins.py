"""Pool memory that this process has mapped, known to the driver of the device that copies."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # this needs torch
    from ems.transfers.device import Device


class SegmentPins:
    """Keeps the pool's memory, as far as this process has it mapped, known to the driver of the served device."""

    def __init__(self) -> None:
        self._device: Device | None = None
        self._mapped: dict[int, memoryview] = {}

    def serve(self, device: Device) -> None:
        """From now on for ``device``; the one before it lets go of all memory."""
        before, self._device = self._device, device
        for buffer in list(self._mapped.values()):
            if before is not None:
                before.unpin(buffer)
            device.pin(buffer)

    def abandon(self) -> None:
        """In a forked child: what is pinned is so for the parent."""
        self._device = None

    def pin(self, buffer: memoryview) -> None:
        self._mapped[id(buffer)] = buffer
        if self._device is not None:
            self._device.pin(buffer)

    def unpin(self, buffer: memoryview) -> None:
        self._mapped.pop(id(buffer), None)
        if self._device is not None:
            self._device.unpin(buffer)
