"""The clients of a node that is hurt: what each holds, copies and still writes, over memory that it maps itself."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterable

import msgspec

from ems.pool.layout import MAGIC, PageRef, Writer, generation_of, slot_offset
from ems.pool.node.pool_node import Node
from ems.pool.protocol import messages
from ems.pool.segments.reader import LeasedPages, PageReader
from ems.pool.tenants.gate import Peer

GONE = 1 << 30
"""A process id that no process has."""

Identity = tuple[int, int]
"""A file, whatever it is called."""


class Maps:
    """The segments of one node as one client maps them; they stay what they were when the node replaces a file."""

    def __init__(self, node: Node, client_id: int) -> None:
        self.node = node
        self.client_id = client_id
        self._maps: dict[int, memoryview] = {}
        self._files: dict[int, Identity] = {}

    def segment(self, number: int) -> memoryview:
        """The whole segment, writable."""
        known = self._maps.get(number)
        replaced = known is not None and known[: len(MAGIC)] != MAGIC and number < len(self.node.arena.sizes)
        if known is None or replaced:
            self.node.answer(self.client_id, messages.Attach(number))  # refused where it is another's
            descriptor = self.node.arena._files[number].descriptor
            self._files[number] = identity(descriptor)
            known = self._maps[number] = memoryview(mmap.mmap(descriptor, os.fstat(descriptor).st_size))
        return known

    def map(self, refs: Iterable[PageRef]) -> None:
        """Map the segments of ``refs``, which can be used when the node has gone, too."""
        for ref in refs:
            self.segment(ref.segment)

    def file(self, number: int) -> Identity:
        """The file that is mapped as the segment."""
        return self._files[number]

    def shares(self, node: Node, number: int) -> bool:
        """Whether what is mapped is the segment that ``node`` uses now."""
        return self._files.get(number) == identity(node.arena._files[number].descriptor)

    @property
    def files(self) -> Iterable[Identity]:
        """What is mapped."""
        return self._files.values()

    def write(self, ref: PageRef, data: bytes, size: int) -> bool:
        """Write the beginning of a page of ``size`` bytes, where it was promised; False where that was replaced."""
        segment = self._maps[ref.segment]
        if generation_of(segment, ref.slot) != ref.generation:
            return False
        begin = slot_offset(len(segment), size, ref.slot)
        segment[begin : begin + len(data)] = data
        return True


def identity(descriptor: int) -> Identity:
    """What tells one file from another, whatever it is called."""
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


class Writing(msgspec.Struct):
    """A reservation: what it promises by position, in which files, and which of that is written already."""

    number: int
    name: str
    keys: list[bytes]
    granted: dict[int, PageRef]
    maps: Maps
    files: dict[int, Identity]
    loose: bool = False
    written: set[int] = msgspec.field(default_factory=set)


class Reading(msgspec.Struct):
    """A lease: its pages, what was seen and copied of them, and their reader.  ``life`` is the node's."""

    number: int
    name: str
    keys: list[bytes]
    refs: list[PageRef]
    reader: PageReader
    life: int
    leased: bool = True
    looked: list[LeasedPages] = []
    copies: list[bytes] = []
    accepted: int = 0


class Late(msgspec.Struct):
    """A slot into which a writer that was cut off may still write."""

    writer: Writer
    maps: Maps
    ref: PageRef
    file: Identity
    size: int
    loose: bool = False
    """Whether the header that said so was damaged, so that its slot may have been handed out."""


class SimulatedClient:
    """One client on one connection, in the form in which a node knows it; ``ended`` is told when the node ends it."""

    def __init__(
        self, node: Node, client_id: int, tenant: str, writer: Writer, ended: Callable[[SimulatedClient], None]
    ) -> None:
        self.node = node
        self.client_id = client_id
        self.tenant = tenant
        self.gone = False
        """Whether the node would not have it, or ended it."""
        self._ended = ended
        self.writer = writer
        """The process that this is."""
        self.pid = writer.pid
        self.uid = os.geteuid()
        self.client = self.party = "test"
        self.administers = False
        self.greeted = True
        self.maps = Maps(node, client_id)
        self.writing: list[Writing] = []
        self.reading: list[Reading] = []
        self.announced: list[int] = []

    @property
    def peer(self) -> Peer:
        """Who the kernel says it is: to greet, each is a process of its own."""
        return Peer(GONE + self.client_id, self.uid)

    def check_deadlines(self, now: float) -> None:
        """It greeted."""

    def close(self, reason: str | None) -> None:
        """The connection ends, unless it has ended."""
        if not self.gone:
            self.gone = True
            self.node.clients.forget(self.client_id, reason)

    def refuse(self, error: Exception) -> None:
        """The node ends it."""
        self.close(str(error))
        self._ended(self)
