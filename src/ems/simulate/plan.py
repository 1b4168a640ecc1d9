"""What is to be simulated, refused here with a sentence where it makes no sense."""

from __future__ import annotations

from math import inf
from typing import Literal, get_args

import msgspec

from ems.config import DEFAULT_POLICY, GIB, MIB, POLICIES, PolicyName, format_size
from ems.errors import ConfigError
from ems.simulate.network import Network

Routing = Literal["random", "least-loaded", "prefix"]
Placement = Literal["random", "free-ratio", "own-host"]
Write = Literal["never", "on-save", "second-use", "on-eviction"]
"""When a page is written to the cluster as well."""
CHOICES = {
    "routing": get_args(Routing), "placement": get_args(Placement), "write": get_args(Write), "policy": POLICIES
}  # fmt: skip
LEAST = {
    "hosts": 1, "copies": 1, "replicas": 1, "page_size": 1, "pages_per_block": 1,
    "spread": 0, "lose_at": 0, "down": 0, "window": 1, "seed": 0, "cluster": 0,
}  # fmt: skip
OWN_BYTES, CLUSTER_BYTES, HOST_BYTES, PROCESS_BYTES = 750, 260, 3 * MIB // 2, 128 * MIB
"""Bytes here for a block in a host's memory, for one in the cluster, for a host, for all else, as measured."""


class Plan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Hosts, what each of them has, and the traffic.  Sizes are bytes a host, times are seconds of the trace."""

    hosts: int = 16
    copies: int = 1
    """How many times the trace comes, each time with blocks of its own and a shift of up to ``spread`` seconds."""
    spread: float = 60.0
    sample: float = 1.0
    """Share of the sessions that is simulated, on hosts with this share of their memory."""
    seed: int = 0
    memory: int = 512 * GIB
    """Of the node of a host."""
    cluster: int = 512 * GIB
    """What a host contributes to the cluster; 0 is a fleet without one."""
    persistent: bool = False
    page_size: int = 4 * MIB
    pages_per_block: int = 16
    """Pages that the blocks of the trace have; they come and go together."""
    policy: PolicyName = DEFAULT_POLICY
    routing: Routing = "prefix"
    placement: Placement = "random"
    replicas: int = 1
    write: Write = "on-save"
    window: float = 60.0
    """Length of the parts in which figures over time are given."""
    lose: int = 0
    """Hosts that are lost together."""
    lose_at: float = 1800.0
    down: float = 60.0
    """Seconds until the lost ones come back, empty."""
    network: Network = msgspec.field(default_factory=Network)

    def __post_init__(self) -> None:
        for name, known in CHOICES.items():
            if getattr(self, name) not in known:
                raise ConfigError(f"--{name} is {getattr(self, name)!r}, expected one of {', '.join(known)}")
        for name, least in LEAST.items():
            if not least <= getattr(self, name) < inf:
                shown = name.replace("_", "-")
                raise ConfigError(f"--{shown} is {getattr(self, name)}, expected a finite number, {least} or more")
        if not 0 < self.sample <= 1:
            raise ConfigError(f"--sample is {self.sample}, expected a share above 0, at most 1")
        if not 0 <= self.lose < self.hosts:
            raise ConfigError(f"--lose is {self.lose}, expected fewer than the {self.hosts} hosts")
        if self.memory < self.block_bytes or (self.cluster and self.cluster < self.block_bytes):
            raise ConfigError(
                f"a block has {format_size(self.block_bytes)}, --memory and --cluster must have room for one at least"
            )

    @property
    def block_bytes(self) -> int:
        return self.page_size * self.pages_per_block

    @property
    def memory_blocks(self) -> int:
        """Of a host as it is simulated, so of the sample."""
        return int(self.memory // self.block_bytes * self.sample)

    @property
    def cluster_blocks(self) -> int:
        return int(self.cluster // self.block_bytes * self.sample)

    @property
    def pages(self) -> int:
        """For which there is room on all hosts."""
        return self.hosts * (self.memory // self.block_bytes + self.cluster // self.block_bytes) * self.pages_per_block

    def refuse_late_loss(self, lasts: float) -> None:
        """Refuse to lose hosts behind the end of a trace that ``lasts`` so many seconds."""
        if self.lose and self.lose_at >= lasts:
            raise ConfigError(f"--lose-at is {self.lose_at:g} and the trace ends after {lasts:.0f} s, give less")

    def refuse_unfit(self, longest: int, distinct: int, available: int) -> None:
        """Refuse a sample too small for the ``longest`` prompt, and what does not fit into ``available`` bytes.

        ``distinct`` are the different blocks of one copy of the trace.
        """
        if self.sample < 1 and self.memory_blocks < 2 * longest:
            raise ConfigError(
                f"with --sample {self.sample:g} a host has room for {self.memory_blocks} blocks, expected twice the "
                f"longest prompt of {longest} blocks at least; take a larger sample or more --memory"
            )
        need = self.process_bytes(distinct)
        if need > available:
            raise ConfigError(
                f"this takes about {format_size(need)} of memory and {format_size(available)} are free, "
                f"simulate a sample of it with --sample {self.sample * available / need:.2g} or less"
            )

    def process_bytes(self, distinct: int) -> int:
        """About what simulating this takes, where every copy has so many different blocks."""
        blocks = distinct * self.copies * self.sample
        own = min(self.hosts * self.memory_blocks, blocks * min(self.hosts, 2))
        in_cluster = min(self.hosts * self.cluster_blocks / self.replicas, blocks)
        return (
            PROCESS_BYTES
            + self.hosts * HOST_BYTES
            + int(own * OWN_BYTES + in_cluster * CLUSTER_BYTES + (blocks * 120 if self.persistent else 0))
        )
