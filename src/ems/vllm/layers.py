"""The order of layers, for transfers that run layer by layer beside the engine's compute."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple

from ems.vllm.pages import PlaneRows


class Layer(NamedTuple):
    """One layer of the model: the number of its plane, and its tensors in that plane's rows."""

    name: str
    plane: int
    tensors: slice


class LayerOrder:
    """All layers of this rank in the order in which the engine computes them."""

    def __init__(self, planes: Sequence[PlaneRows]) -> None:
        found = [
            Layer(name, plane.local.number, tensors)
            for plane in planes
            for name, tensors in zip(plane.local.layers, plane.layers, strict=True)
        ]
        self.layers = sorted(found, key=lambda layer: layer_index(layer.name))

    def __contains__(self, name: str) -> bool:
        return any(layer.name == name for layer in self.layers)


def layer_index(name: str) -> int:
    """The number in a layer's name (``model.layers.7.self_attn`` is 7); layers without one come first."""
    return next((int(part) for part in name.split(".") if part.isdecimal()), -1)


class Progress:
    """Which layers are done, shared by the thread that does them and the one that waits.

    A layer that was done may bring a mark: the point in an accelerator's work where it is really over.
    """

    def __init__(self) -> None:
        self._marks: dict[str, object] = {}
        self._last: object = None
        self.over = False
        self._changed = threading.Condition()

    def done(self, name: str, mark: object = None) -> None:
        with self._changed:
            self._marks[name] = mark
            self._changed.notify_all()

    def finish(self, mark: object = None) -> None:
        """All layers are, or never will be."""
        with self._changed:
            self.over = True
            self._last = mark
            self._changed.notify_all()

    def wait(self, name: str | None, timeout: float) -> tuple[bool, object]:
        """Wait until layer ``name`` (None: every layer) is done: whether it is, and its mark."""
        with self._changed:
            in_time = self._changed.wait_for(lambda: self.over or (name is not None and name in self._marks), timeout)
            return in_time, self._marks.get(name, self._last) if name is not None else self._last
