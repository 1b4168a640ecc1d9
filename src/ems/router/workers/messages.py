"""What workers say to each other: packets of one byte and MessagePack, which their parent passes on.

A worker writes into the byte who gets a packet, and reads there who sent it.  An empty packet says that its sender is
gone; one for the parent that a worker serves, in the words that a router has for it.
"""

from __future__ import annotations

from typing import Final

import msgspec

from ems.http.address import Address
from ems.router.fleet import Load, Role

PARENT: Final = 255
OTHERS: Final = 254
"""All workers but the sender."""
EVERYONE: Final = 253
"""The sender as well, so that all get these packets in one order: a :class:`Change`."""
LARGEST: Final = 256 << 10
"""Bytes of a packet; what is larger is lost."""


class Learned(msgspec.Struct, frozen=True, array_like=True):
    """A request was sent to an instance."""

    role: Role
    address: Address
    hashes: bytes
    """Of its prompt, four bytes each."""
    session: bytes


class State(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """What a worker has on instances: where it changed, or ``full``: wherever it has anything."""

    full: bool
    loads: list[tuple[Role, Address, Load]]
    learned: list[Learned] = []


class Change(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A question that is answered when the instances are there, or not."""

    number: int
    role: Role
    addresses: list[Address]
    listed: bool


class Ask(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A question of the sender's; ``what`` names who answers it."""

    number: int
    what: str
    argument: str


class Answer(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """To the question of that number."""

    number: int
    body: bytes


Message = State | Change | Ask | Answer
encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Message).decode
