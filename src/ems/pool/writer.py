"""Who may write into a slot: the process that was promised it, as a slot's header remembers it.

A process that was cut off from its node can go on copying for any time, so a slot of it is free only once that process
has ended, has said that it stopped, or cannot reach the slot's memory any more.  What always holds: two processes are
two writers, also where the second has the process id of the first.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

INSTANCE_BYTES = 8
"""Bytes of the random number by which a client knows its own promises again on another connection."""
_WRITER = struct.Struct("<II8s")
_MASK = 0xFFFFFFFF


class Writer(NamedTuple):
    """One client of one process.

    ``pid`` is 0 where the process cannot be seen from the node (a container has process ids of its own); ``start`` is
    when it began, ``pid_namespace`` says where its id means something, ``instance`` is the client's random number.
    """

    pid: int = 0
    start: int = 0
    instance: bytes = bytes(INSTANCE_BYTES)
    pid_namespace: int = 0

    @property
    def process(self) -> tuple[int, int, int] | bytes:
        """What all writers of one process have in common; of one that cannot be seen each client counts by itself."""
        return (self.pid, self.start, self.pid_namespace) if self.pid else self.instance

    def pack(self) -> bytes:
        return _WRITER.pack(self.pid & _MASK, self.start & _MASK, self.instance)

    @classmethod
    def unpack(cls, raw: bytes, pid_namespace: int) -> Writer:
        pid, start, instance = _WRITER.unpack(raw)
        return cls(pid, start, instance, pid_namespace)


UNKNOWN = Writer()
"""Stands for whoever was promised a slot whose header cannot be read."""


def writer_of(number: int) -> Writer:
    """The writer that stands for a client of the node of which nothing is known but its ``number``."""
    return Writer(instance=number.to_bytes(INSTANCE_BYTES, "little", signed=True))
