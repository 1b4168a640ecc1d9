"""The cluster as a tier: what other hosts have, and what this one puts there.

What always holds: nobody who asks what is known waits; what is not known is asked for by whoever runs :meth:`ask`, and
counts as missing meanwhile; a page is handed over only when its seal was proven; a call that fails says so for the
cluster as a whole, and for no page.
"""

from __future__ import annotations

import difflib
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import structlog

from ems.config import format_size
from ems.errors import ConfigError, TierFailed
from ems.pool.keys import Tail
from ems.pool.movement.hot_list import HotRun
from ems.pool.segments.arena import total_memory
from ems.pool.segments.segment_file import FileRange
from ems.pool.tiers.answers import ForgetRequest, ForgetResult, Holding, KeyRun, Outcome, StoredTail, Unknown
from ems.pool.tiers.cluster import calls
from ems.pool.tiers.cluster.agent_process import Agents
from ems.pool.tiers.cluster.known import KnownKeys
from ems.pool.tiers.cluster.mooncake_config import MooncakeConfig, parse_mooncake
from ems.pool.tiers.pack_seal import SealKeys, read_keys
from ems.pool.tiers.pass_through import Leaving
from ems.pool.tiers.settings import TierConfig

SHARE_SECONDS = 1.0
ASK_SECONDS = 3.0
"""How long the master may take to say what there is before it counts as lost."""
MOST_NAMESPACES = 4096
_THERE = {Outcome.DONE, Outcome.PRESENT}

_log = structlog.get_logger("ems.tier")


class _Seen(msgspec.Struct):
    """What this node put into a namespace, and when it last had to do with it."""

    page_size: int = 0
    pages: int = 0
    bytes: int = 0
    used_at: float = 0.0


class ClusterTier:
    """The cluster that ``agents`` reach and to which they lend ``lends`` bytes; a call may take ``timeout`` seconds."""

    asks = True
    scanned = True
    """There is no end to what others have: nothing is ever listed."""

    def __init__(
        self,
        agents: Agents,
        timeout: float,
        lends: int,
        seals: Mapping[str, str] = MappingProxyType({}),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._agents = agents
        # Before whoever waits gives up the thread.
        self._timeout = timeout * 0.9
        self._clock = clock
        self._known = KnownKeys()
        self._seen: dict[str, _Seen] = {}
        self._mark = f"ems-lent-{secrets.token_hex(8)}"
        """Names an object in the memory that this host lends: when it is gone, so is all else there."""
        self.lends = lends
        self._seals = dict(seals)
        """Fingerprints of the secrets, as :class:`~ems.pool.tiers.pack_seal.SealKeys` has them; none without one."""
        self.losses = 0
        self.leaving = False
        self._lock = threading.Lock()
        """Around what is known; nobody calls an agent while holding it."""
        self._counts = {"asked": 0, "transfers_failed": 0, "read_directly": 0, "hot_lists_failed": 0}

    # What is known without waiting

    def holds(self, namespace: str, keys: Sequence[bytes]) -> int:
        with self._lock:
            return self._known.holds(namespace, keys, self._clock())

    def lacks(self, namespace: str, keys: Sequence[bytes]) -> list[bytes]:
        with self._lock:
            now = self._clock()
            return [key for key in keys if not self._known.written(namespace, key, now)]

    def unknown(self, namespace: str, keys: Sequence[bytes], directories: Sequence[bytes] = ()) -> Unknown:
        with self._lock:
            return self._known.unknown(namespace, keys, self._clock(), directories)

    def tails(self, namespace: str, keys: Sequence[bytes]) -> list[Tail | None]:
        with self._lock:
            return [self._known.tail(namespace, key) for key in keys]

    def know_tail(self, namespace: str, tail: Tail) -> None:
        with self._lock:
            self._known.know_tail(namespace, tail)

    def find_tail(self, namespace: str, tail: Tail) -> StoredTail | None:
        with self._lock:
            return self._known.find_tail(namespace, tail, self._clock())

    def unknown_tail(self, namespace: str, tail: Tail) -> tuple[bool, bool]:
        with self._lock:
            return self._known.unknown_place(namespace, tail.directory, self._clock())

    def namespaces(self) -> dict[str, Holding]:
        now = self._clock()
        with self._lock:
            return {
                name: Holding(one.page_size, one.pages, one.bytes, max(now - one.used_at, 0.0))
                for name, one in self._seen.items()
            }

    def left_alone(self) -> set[str]:
        return set()

    def recent(self, _namespace: str) -> Iterator[KeyRun]:
        """Nothing: what is in a cluster is not this node's to bring up unasked."""
        return iter(())

    def _see(self, namespace: str, page_size: int = 0, pages: int = 0) -> None:
        if namespace not in self._seen and len(self._seen) >= MOST_NAMESPACES:
            return
        seen = self._seen.setdefault(namespace, _Seen())
        seen.page_size = page_size or seen.page_size
        seen.pages += pages
        seen.bytes += pages * page_size
        seen.used_at = self._clock()

    # Asking; blocks

    def ask(self, namespace: str, keys: Sequence[bytes], directories: Sequence[bytes] = ()) -> None:
        """Find out which of ``keys``, which were :meth:`unknown`, are there, and which ``directories`` list nothing."""
        there = [False] * len([*keys, *directories])
        try:
            found = self._agents.call(calls.Exist(namespace, list(keys), list(directories)), ASK_SECONDS).codes
            there = [code == 1 for code in found]
        finally:
            with self._lock:
                now = self._clock()
                self._known.answered(namespace, keys, there[: len(keys)], now)
                self._known.answered_places(namespace, directories, there[len(keys) :], now)
        with self._lock:
            self._counts["asked"] += len(keys)
            self._see(namespace)

    def ask_tails(self, namespace: str, directory: bytes) -> None:
        listed: list[StoredTail] = []
        try:
            found = self._agents.call(calls.FindTails(namespace, [directory]), ASK_SECONDS)
            listed = [StoredTail(one.tail, one.parent) for one in found.tails if one.tail.directory == directory]
        finally:
            with self._lock:
                self._known.listed(namespace, directory, listed, self._clock())

    def share_hot(self, told: Mapping[str, Sequence[HotRun]]) -> dict[str, list[HotRun]]:
        lists = [calls.HotList(name, list(runs)) for name, runs in told.items()]
        with self._lock:
            for name in filter(told.__getitem__, told):
                self._see(name)  # 'ems clear' takes out what the node had to do with
        try:
            found = self._agents.call(calls.ShareHot(lists), SHARE_SECONDS)
        except TierFailed:  # one host may have the lists, and not answer: no reason to leave the cluster alone
            with self._lock:
                self._counts["hot_lists_failed"] += 1
            return {}
        return {one.namespace: one.runs for one in found.hot}

    # Moving pages; blocks

    def write(self, namespace: str, pages: Sequence[Leaving]) -> list[Outcome]:
        places = [page.place for page in pages]
        size = places[0].length
        named = [
            calls.Place(page.key, self._agents.number(page.place.file), page.place.offset, page.parent, page.checksum)
            for page in pages
        ]
        answer = self._agents.call(calls.Store(namespace, size, named), self._timeout, places)
        outcomes = [Outcome(code) for code in answer.codes]
        there = {page.key: page for page, outcome in zip(pages, outcomes, strict=True) if outcome in _THERE}
        with self._lock:
            self._known.stored(namespace, there, self._clock())
            self._see(namespace, size, outcomes.count(Outcome.DONE))
        inner = {page.parent for page in pages}
        tails = [calls.Listed(one.tail, one.parent) for one in there.values() if one.tail and one.key not in inner]
        if tails:
            # A page that something stored with it continues is found by its key; what comes last may be cut anywhere.
            self._agents.call(calls.ListTails(namespace, tails), self._timeout)
        return outcomes

    def read(self, namespace: str, wanted: Sequence[tuple[bytes, FileRange]]) -> tuple[list[Outcome], list[int]]:
        places = [place for _, place in wanted]
        named = [calls.Place(key, self._agents.number(place.file), place.offset) for key, place in wanted]
        answer = self._agents.call(calls.Fetch(namespace, places[0].length, named), self._timeout, places)
        outcomes = [Outcome(code) for code in answer.codes]
        with self._lock:
            self._counts["transfers_failed"] += answer.unsafe
            self._counts["read_directly"] += answer.direct
            gone = [key for (key, _), outcome in zip(wanted, outcomes, strict=True) if outcome is not Outcome.DONE]
            self._known.lost(namespace, gone, self._clock())
        return outcomes, answer.sums

    # Keeping order; blocks

    @property
    def gives(self) -> bool:
        return self._agents.gives

    def maintain(self) -> None:
        gave, self._agents.leaving = self.gives, self.leaving
        self._agents.keep()
        if not self.lends:
            return
        leaves = self._agents.leaving
        if gave if leaves else not self._agents.call(calls.Mark(self._mark), self._timeout).codes[0]:
            with self._lock:
                self._known.drop()
                for seen in self._seen.values():  # what is put there again counts again
                    seen.pages = seen.bytes = 0
            self.losses += 1

    def probe(self) -> None:
        self._agents.call(calls.Probe(), self._timeout)

    def forget(self, request: ForgetRequest, *, dry_run: bool = False) -> ForgetResult:
        """Take all of a namespace out, whoever stored it; what of it is spared has to be stored anew."""
        if request.unused_for:
            return ForgetResult(note="a cluster does not know when its pages were used, so it clears none by age")
        with self._lock:
            seen = self._seen.get(request.namespace, _Seen())
        if dry_run:
            return ForgetResult(seen.pages, seen.bytes)  # what other hosts put there nobody knows before
        removed = self._agents.call(calls.Clear(request.namespace), self._timeout).codes[0]
        with self._lock:
            self._known.drop(request.namespace)
            self._seen.pop(request.namespace, None)
        return ForgetResult(removed, removed * seen.page_size)

    def figures(self) -> dict[str, Any]:
        with self._lock:
            return {
                "pages": sum(one.pages for one in self._seen.values()),
                "bytes": sum(one.bytes for one in self._seen.values()),
                "lends": self.lends if self.gives else 0,
                "seals": self._seals,
                "agent_starts": self._agents.starts,
                **self._counts,
            }

    def close(self) -> None:
        self._agents.close()


def read_mooncake(place: str) -> MooncakeConfig:
    """What the file ``place`` says, or the environment where that is empty.  Raises ConfigError: it makes no sense."""
    origin = place or os.environ.get("MOONCAKE_CONFIG_PATH", "")
    text = None
    if origin:
        try:
            text = Path(origin).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is no text"
            raise ConfigError(f"cannot read {origin}: {reason}; name a file with Mooncake's settings") from error
    config, unused = parse_mooncake(text, os.environ, origin or "the environment")
    for name in unused:
        if near := difflib.get_close_matches(name, MooncakeConfig.__struct_fields__, 1):
            _log.warning(f"{name} means nothing, did you mean {near[0]}?", file=origin)
    if unused:
        _log.info("settings of Mooncake mean nothing to EMS", file=origin, names=", ".join(unused))
    return config


def open_cluster(config: TierConfig, seal_key: Path | None) -> ClusterTier:
    """The tier that ``config`` describes, sealed with the secret in ``seal_key``; nobody was asked anything yet.

    Raises ConfigError: it cannot be used.
    """
    mooncake = read_mooncake(config.place)
    if mooncake.global_segment_size > total_memory():
        raise ConfigError(
            f"global_segment_size of {config.name} is {format_size(mooncake.global_segment_size)}, and this host has "
            f"{format_size(total_memory())} of memory; lend less, beside the node's own pool"
        )
    keys = SealKeys(None, encrypts=False) if seal_key is None else read_keys(seal_key, encrypts=False)
    if seal_key is None:
        _log.warning("pages of a cluster are believed whoever stored them, give seal_key=FILE", tier=config.name)
    own_place, lanes = config.placement == "own", config.readers + 4 + 3
    agents = Agents(mooncake, secrets=keys.secrets, own_place=own_place, replicas=config.replicas, lanes=lanes)
    return ClusterTier(agents, config.timeout, mooncake.global_segment_size, keys.fingerprints)
