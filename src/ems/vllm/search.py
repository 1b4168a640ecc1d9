"""Finds how much of a prompt the pool has, over all planes of a model, and promises it.

A prompt can be used up to where every plane can go on from: full attention needs all chunks before, a sliding
window only those in sight.  What always holds: what is promised is held by leases of one node, all of them or none;
each search makes a bounded number of calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from ems.errors import EmsError
from ems.pool.client.answers import NO_TAIL, Hits, Lease, LookupHints, Namespace, TailHit
from ems.pool.client.pool_client import PoolClient
from ems.pool.keys import KEY_BYTES, NO_DIRECTORY, KeyChain, Tail, page_keys
from ems.pool.layout import REF_BYTES
from ems.pool.protocol.limits import MAX_KEYS
from ems.pool.reasons.words import Reason
from ems.vllm.planes import Plane, first_in_sight
from ems.vllm.requests import NOTHING, Found, Pages

ATTEMPTS = 8
"""Shorter prefixes that are tried where a window has gaps."""

MANY = 64
"""Blocks from which on it is worth while to look for the first of their pages alone at first."""

MOST_DIRECTORIES = 1024
"""Chunks of a prompt whose directories are told with their keys; of a longer one another question is little."""

_PRESENT = (0, Reason.GAP.code, Reason.LOWER_TIER.code)
"""What the node says of keys that it has, also behind others that it has not."""


class Prompt(msgspec.Struct):
    """What is searched for: all tokens, the keys of their full chunks, what else names each chunk of some size."""

    tokens: Sequence[int]
    chain: KeyChain
    extra_keys: Callable[[int], Sequence[object]]
    request: str = ""
    """The engine's id of the request, by which the node can be asked about it."""
    finer: Mapping[int, KeyChain] = {}
    """Keys of the shorter chunks of some planes, by :attr:`Plane.parts`."""

    def chain_of(self, plane: Plane) -> KeyChain:
        return self.chain if plane.parts == 1 else self.finer[plane.parts]


class Reach(msgspec.Struct, frozen=True):
    """How far the pool's pages of a prompt reach: full chunks, a part of the next, whether more is being written."""

    chunks: int
    tail: TailHit
    pending: bool


class Search:
    """Searches for one engine.  ``planes`` are those of its model; pages have no known size on this side.

    Without ``tails`` full chunks alone are looked for.
    """

    def __init__(
        self, client: PoolClient, planes: Sequence[Plane], chunk_tokens: int, call_timeout: float, *, tails: bool = True
    ) -> None:
        self._client = client
        self._planes = planes
        self.states = [number for number, plane in enumerate(planes) if plane.state]
        """Planes of layers that keep states: a prompt goes on only where all of these have one."""
        self.tails = tails and not self.states
        """Whether a part of a chunk is of use: behind one there is no state to go on from."""
        self._namespaces = [Namespace(plane.namespace, 0) for plane in planes]
        self._chunk_tokens = chunk_tokens
        self._timeout = call_timeout
        self.reason: Reason | None = None
        """Why the last search found no more, as far as the node tells."""
        self.promoting = 0
        """How many chunks tiers were promoting at the last search."""
        self.computing = 0.0
        """Seconds that a chunk takes to be computed, 0 while that is not known."""
        self.patience = 0.0
        """Seconds that each call may wait for tiers that have to be asked what they have."""
        self._request = ""

    def reach(self, prompt: Prompt) -> tuple[int, bool]:
        """How many tokens of ``prompt`` are present, and whether more are being written.  Takes no lease."""
        self._request = ""  # a hand-off that waits asks often
        self.promoting = 0
        reach = self._reach(prompt)
        return self._tokens(reach), reach.pending

    def take(self, prompt: Prompt) -> Found:
        self.reason, self._request, self.promoting = None, prompt.request, 0
        leading = len(self._planes) == 1 and not self._planes[0].window
        for _ in range(2):
            # What is evicted, or a node that changes, between two calls is noticed; it is then tried once more.
            leases: list[Lease] = []
            try:
                found = (self._take_leading if leading else self._take_all)(prompt, leases)
            except EmsError:
                self._give_back(leases)
                raise
            if found is not None and len({(lease.node, lease.epoch) for lease in leases}) <= 1:
                if not found.tokens:
                    self._give_back(leases)
                return found
            self._give_back(leases)
        return NOTHING

    def _tokens(self, reach: Reach) -> int:
        return reach.chunks * self._chunk_tokens + reach.tail.tokens

    def _take_all(self, prompt: Prompt, leases: list[Lease]) -> Found | None:
        reach = self._reach(prompt)
        if not self._tokens(reach):
            return NOTHING
        pages = [self._promise(number, prompt, reach, leases) for number in range(len(self._planes))]
        taken = tuple(part for part in pages if part is not None)
        return Found(self._tokens(reach), reach.chunks, taken, tuple(leases)) if len(taken) == len(pages) else None

    # One plane that needs all chunks: found and promised in one call, and the tail behind them in another

    def _take_leading(self, prompt: Prompt, leases: list[Lease]) -> Found:
        shards = self._planes[0].shards
        full = len(prompt.chain)
        keys, refs = self._hold(
            page_keys(prompt.chain.packed(0, full), shards), leases, self._directories(prompt, full)
        )
        chunks = len(keys) // (shards * KEY_BYTES)
        refs = refs[: chunks * shards * REF_BYTES]  # a chunk of which some pages are missing counts for nothing
        tail = self._tail(prompt, chunks, lease=shards == 1)
        leases += [tail.lease] if tail.lease is not None else []
        tail_keys, tail_refs = tail.key, tail.lease.packed_refs if tail.lease is not None else b""
        if tail.tokens and shards > 1:
            tail_keys, tail_refs = self._hold(page_keys(tail.key, shards), leases)
        whole = len(tail_keys) == shards * KEY_BYTES
        tokens = chunks * self._chunk_tokens + (tail.tokens if whole else 0)
        if not len(prompt.chain) and tokens < len(prompt.tokens) and (name := self.tail_name(prompt, 0)) is not None:
            # There was no key to ask for that would have told why.
            self.reason = self._ask(0, name.key).reason
        names = prompt.chain.packed(0, chunks) + (tail.key if whole else b"")
        pages = Pages(0, 0, names, refs + (tail_refs if whole else b""))
        return Found(tokens, chunks, (pages,), tuple(leases)) if tokens else NOTHING

    def _directories(self, prompt: Prompt, chunks: int) -> bytes:
        """The directories of the leading ``chunks``, and of what is behind them, zeros where that is nothing."""
        if not self.tails or not 0 < chunks <= MOST_DIRECTORIES:
            return b""
        behind = self.tail_name(prompt, chunks)
        directories = [tail.directory for tail in prompt.chain.tails(0, chunks)]
        return b"".join(directories) + (NO_DIRECTORY if behind is None else behind.directory)

    def _hold(self, keys: bytes, leases: list[Lease], directories: bytes = b"") -> tuple[bytes, bytes]:
        """The leading ones of ``keys`` that are present, and their places.  Adds the lease on them to ``leases``."""
        if not keys:
            return b"", b""
        hits = self._ask(0, keys, lease=True, directories=directories)
        self.reason = self.reason or hits.reason
        if hits.lease is None:
            return b"", b""
        leases.append(hits.lease)
        return keys[: hits.count * KEY_BYTES], hits.lease.packed_refs

    def _ask(self, number: int, keys: bytes, *, lease: bool = False, directories: bytes = b"") -> Hits:
        hits = self._client.lookup(
            self._namespaces[number],
            keys,
            lease=lease,
            timeout=self._timeout,
            # The pages of a chunk, of all planes, share what it takes to be computed.
            hints=LookupHints(
                self._request, self.computing / sum(one.shards for one in self._planes), self.patience, directories
            ),
        )
        self.promoting = max(self.promoting, -(-hits.below // self._planes[number].shards))
        return hits

    # Several

    def _reach(self, prompt: Prompt) -> Reach:
        chunks, pending = len(prompt.chain), False
        if self.states:
            chunks = min(chunks, (len(prompt.tokens) - 1) // self._chunk_tokens)  # the last token is computed again
        for number, plane in enumerate(self._planes):
            if not plane.window and chunks:
                directories = self._directories(prompt, chunks) if not number and plane.parts == 1 else b""
                keys = prompt.chain_of(plane).packed(0, chunks * plane.parts)
                found, writing = self._leading(number, keys, directories)
                found //= plane.parts
                chunks, pending = found, pending or (writing and found < chunks)
        for _ in range(ATTEMPTS):
            chunks = self._behind_states(prompt, chunks)
            tail = self._whole_tail(prompt, chunks)
            gap, writing = self._gap(prompt, chunks, tail)
            pending = pending or writing or tail.pending
            if gap is None:
                return Reach(chunks, tail, pending)
            # Up to the gap some of the window may be there; a tail at a gap is none.
            chunks = min(gap, chunks)
        return Reach(0, NO_TAIL, pending)

    def _behind_states(self, prompt: Prompt, chunks: int) -> int:
        """How many of the leading ``chunks`` end with states that memory, or a tier, has; all without such layers."""
        for number in self.states:
            plane = self._planes[number]
            shards, parts = plane.shards, plane.parts
            begin = max(chunks - MAX_KEYS // shards, 0)
            ends_of_chunks = prompt.chain_of(plane)[(begin + 1) * parts - 1 : chunks * parts : parts]
            keys = page_keys(b"".join(ends_of_chunks), shards)
            codes = self._client.explain(plane.namespace, keys, self._timeout).codes if keys else ()
            present = [code in _PRESENT for code in codes]
            ends = (at for at in range(chunks - begin, 0, -1) if all(present[(at - 1) * shards : at * shards]))
            chunks = begin + next(ends, -begin)
        return chunks

    def _leading(self, number: int, keys: bytes, directories: bytes = b"") -> tuple[int, bool]:
        """How many leading chunks of ``keys`` are whole in a plane, and whether the next is being written."""
        plane = self._planes[number]
        chunks = len(keys) // KEY_BYTES
        if plane.shards > 1 and chunks > MANY:
            # Most misses show in the first shard, at a fraction of the keys.
            first = self._ask(number, keys, directories=directories)
            if not first.count:
                self.reason = first.reason
                return 0, bool(first.pending)
            chunks = first.count
        directories = directories[: (chunks + 1) * KEY_BYTES]
        hits = self._ask(number, page_keys(keys[: chunks * KEY_BYTES], plane.shards), directories=directories)
        self.reason = hits.reason or self.reason
        return hits.count // plane.shards, bool(hits.pending)

    def _gap(self, prompt: Prompt, chunks: int, tail: TailHit) -> tuple[int | None, bool]:
        """The first missing chunk that some window needs, or None; and whether it is being written."""
        tokens = chunks * self._chunk_tokens + tail.tokens
        for number, plane in enumerate(self._planes):
            # The engine computes the last token again.
            first = first_in_sight(plane.window, tokens - 1, self._chunk_tokens // plane.parts)
            end = chunks * plane.parts
            if plane.window and first < end:
                found, writing = self._leading(number, prompt.chain_of(plane).packed(first, end))
                if first + found < end:
                    return (first + found) // plane.parts, writing
        return None, False

    def _tail(self, prompt: Prompt, chunks: int, *, lease: bool) -> TailHit:
        """The part of chunk number ``chunks`` that some page of the first plane holds.

        While chunks come up from tiers there it is no use yet, but what stands behind these is asked for, to come with
        them.
        """
        ahead = self.promoting
        name = self.tail_name(prompt, chunks + ahead)
        if name is None:
            return NO_TAIL
        shards, held = self._planes[0].shards, lease and not ahead
        patience = 0.0 if ahead else self.patience
        hit = self._client.lookup_tail(
            self._namespaces[0], name, lease=held, timeout=self._timeout, shards=shards, patience=patience
        )
        self.promoting = max(ahead, int(hit.below))
        return TailHit(0, b"", hit.pending, None) if ahead else hit

    def tail_name(self, prompt: Prompt, chunks: int) -> Tail | None:
        """The chunk number ``chunks`` as far as the prompt has it; None where the prompt ends before it."""
        rest = prompt.tokens[chunks * self._chunk_tokens : (chunks + 1) * self._chunk_tokens]
        if not len(rest) or not self.tails:
            return None
        extra = prompt.extra_keys(self._chunk_tokens)
        return prompt.chain.tail(chunks, rest, extra[chunks] if chunks < len(extra) else None)

    def _whole_tail(self, prompt: Prompt, chunks: int) -> TailHit:
        """The same, if all other pages of that chunk are there too."""
        tail = self._tail(prompt, chunks, lease=False)
        if not tail.tokens:
            return tail
        for number in range(len(self._planes)):
            if not self._leading(number, tail.key)[0]:
                return TailHit(0, b"", tail.pending, None)
        return tail

    def _promise(self, number: int, prompt: Prompt, reach: Reach, leases: list[Lease]) -> Pages | None:
        plane = self._planes[number]
        end = reach.chunks * plane.parts
        first = min(first_in_sight(plane.window, self._tokens(reach) - 1, self._chunk_tokens // plane.parts), end)
        names = prompt.chain_of(plane).packed(first, end) + reach.tail.key
        keys = page_keys(names, plane.shards)
        hits = self._ask(number, keys, lease=True)
        if hits.lease is not None:
            leases.append(hits.lease)
        if hits.lease is None or hits.count * KEY_BYTES < len(keys):
            return None
        return Pages(number, first, names, hits.lease.packed_refs)

    def _give_back(self, leases: list[Lease]) -> None:
        for lease in leases:
            self._client.release(lease)
