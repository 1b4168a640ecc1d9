"""The scheduler side's brain: what is known of each request, and what follows from each event.

A request goes through::

    arrive ── asked ── answered ── allocated ── loading ── received ─┐
                 │         │            │                             ├─ scheduled* ── finished
                 └─────────┴── nothing to load ──────────────────────┘

It knows no vLLM, no socket and no clock.  What always holds: a lease that was taken is given back exactly
once, by a :class:`Release` effect; a chunk is offered for saving at most once a life of its memory; a load
that failed is not tried again for the same request; a request whose lookup stays unanswered is a miss after
a bounded time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import count

import msgspec

from ems.pool.client.answers import Lease
from ems.pool.keys import KEY_BYTES, KeyChain, Tail
from ems.pool.layout import REF_BYTES
from ems.vllm.configuration.settings import ConnectorSettings
from ems.vllm.planes import Plane

NEVER = 1 << 62
EAGER_LEASES = 64
"""Requests that may hold a lease while they wait; those behind are looked up when one of these leaves."""


class Phase(Enum):
    """How far the lookup and load of a request have come."""

    NEW = auto()
    ASKED = auto()
    ANSWERED = auto()
    LOADING = auto()
    SETTLED = auto()


class Ask(msgspec.Struct, frozen=True):
    """Effect: look up the request's blocks; ``expected`` tokens are known to be on their way."""

    request_id: str
    expected: int


class Release(msgspec.Struct, frozen=True):
    """Effect: give a lease back."""

    lease: Lease


class Pages(msgspec.Struct, frozen=True):
    """Pages of one plane: those of the chunks ``[first, ...)`` of a prompt, chunk by chunk, all shards of each.

    ``keys`` are those of the chunks, from which those of the pages follow.
    """

    plane: int
    first: int
    keys: bytes
    packed_refs: bytes


class Adapter(msgspec.Struct, frozen=True):
    """A LoRA adapter as the engine numbers it, and the digest of its files."""

    number: int
    digest: str


class LoadPart(msgspec.Struct, frozen=True):
    """What is to be loaded in one plane: the engine blocks ``block_ids``, out of pages as in :class:`Pages`.

    The first of them is number ``skip`` of the first page.
    """

    plane: int
    block_ids: list[int]
    keys: bytes
    packed_refs: bytes
    skip: int = 0


class Load(msgspec.Struct, frozen=True):
    """Effect: copy pages of the node ``node`` into engine blocks."""

    request_id: str
    node: str
    parts: list[LoadPart]
    broken: bool = False
    """The engine wants another part of the prompt than was found: nothing can be loaded."""
    in_step: bool = False
    """The step that begins the load needs it."""
    adapter: Adapter | None = None
    """The one that the pages were computed with."""

    def split(self, planes: Sequence[Plane], page_blocks: int) -> tuple[Load, Load]:
        """Two loads: one without the last block of each part, and one of these, which the engine fills next."""
        rest, last = list[LoadPart](), list[LoadPart]()
        for part in self.parts:
            ids, end = part.block_ids, len(part.block_ids) - 1
            number, skip = divmod(part.skip + end, page_blocks)
            for found, blocks, first, pages in (
                (rest, ids[:end], part.skip, slice(0, number + bool(skip))),
                (last, ids[end:], skip, slice(number, number + 1)),
            ):
                keys, refs = of_chunks(part.keys, part.packed_refs, pages, planes[part.plane].shards)
                found.append(LoadPart(part.plane, blocks, keys, refs, first))
        kept = [part for part in rest if part.block_ids]
        return msgspec.structs.replace(self, parts=kept), msgspec.structs.replace(self, parts=last)


class Save(msgspec.Struct, frozen=True):
    """Effect: store the chunks of a request from number ``first`` on, behind the one of the key ``parent``.

    ``tails`` names them; the last one is not full if ``partial``.  ``block_ids`` has their blocks for each KV cache
    group of the engine; 0 stands for one that the engine has dropped.  No other save of the engine has its ``number``.
    """

    number: int
    request_id: str
    first: int
    parent: bytes
    tails: Sequence[Tail]
    block_ids: Sequence[Sequence[int]]
    partial: bool = False
    adapter: Adapter | None = None
    """The one that the blocks are computed with."""


class Span(msgspec.Struct, frozen=True):
    """Chunks ``[first, end)`` of a request, and ``tail`` tokens of the chunk behind them."""

    first: int
    end: int
    tail: int


class Found(msgspec.Struct, frozen=True):
    """What a lookup found: ``tokens`` from the prompt's start, the first ``chunks`` chunks of them full.

    ``pages`` says where they lie, plane by plane; ``leases`` keep them there.
    """

    tokens: int
    chunks: int
    pages: tuple[Pages, ...]
    leases: tuple[Lease, ...]


NOTHING = Found(0, 0, (), ())


def of_chunks(keys: bytes, packed_refs: bytes, chunks: slice, shards: int) -> tuple[bytes, bytes]:
    """Keys of some ``chunks``, and references of all of their pages."""
    size, begin, end = shards * REF_BYTES, chunks.start, chunks.stop
    return keys[begin * KEY_BYTES : end * KEY_BYTES], packed_refs[begin * size : end * size]


@dataclass(slots=True, eq=False)
class Request:
    """What is known of one request."""

    request_id: str
    prompt_tokens: int
    expected: int
    adapter: Adapter | None = None
    phase: Phase = Phase.NEW
    matched_at: float | None = None
    """When the engine first asked for it, from when on its lookup has to end."""
    matched_in: int = -1
    """The number of the step in which the engine last asked for it."""
    chain: KeyChain | None = None
    found: Found = NOTHING
    local: int = 0
    in_step: bool = False
    """Its load is part of the step that begins it."""
    failed: bool = False
    ended: bool = False
    block_ids: list[list[int]] = field(default_factory=list)
    loading: list[int] = field(default_factory=list)
    """The blocks of the first group that a load fills."""
    next_save: int = 0
    """The first chunk that was not offered for saving."""
    offered: bool = False
    """All of its prompt was offered for saving."""
    saved_tail: int = 0
    """Tokens of the request up to the end of the tail that was offered last."""
    states_until: int = 0
    """The last token behind which the states of state-space layers were saved and can be gone on from."""


class RequestBook:
    """All requests of one engine.

    ``block_size`` tokens make a block, in every one of the engine's ``groups`` KV cache groups, and ``page_blocks``
    blocks a chunk.  With ``several_ranks`` nothing is offered for saving until a load that is part of a step is known
    to be sound.
    """

    def __init__(
        self,
        settings: ConnectorSettings,
        block_size: int,
        planes: Sequence[Plane],
        groups: int = 1,
        page_blocks: int = 1,
        *,
        several_ranks: bool = False,
    ) -> None:
        self._settings = settings
        self._block_size = block_size
        self._page_blocks = page_blocks
        self._chunk_tokens = block_size * page_blocks
        self._planes = planes
        self._groups = groups
        # With a window the engine drops what a new token cannot see: the last token, computed again, would see more.
        self._windows = any(plane.window for plane in planes)
        self._several_ranks = several_ranks
        self._state_groups = {plane.group for plane in planes if plane.state}
        """Groups that keep states: behind a part of a chunk there is none to go on from."""
        self.paused = False
        """While this is set nothing is offered for saving, nor later what follows it."""
        self.restarted_at = float("-inf")
        """When the node was not there for a moment: nobody's lookup can have been answered, and none had waited yet."""
        self._requests: dict[str, Request] = {}
        self._waiting: dict[str, None] = {}
        self.unasked: OrderedDict[str, None] = OrderedDict()
        """Requests that are not looked up yet, in the order of the engine's queue."""
        self._over: list[str] = []
        self._numbers = count(1)
        self.full = False
        """Whether as many requests are looked up as may be, and all stand before the one that was matched last."""
        self.loading = 0
        """How many requests' loads are under way."""
        self._step = 0
        self._later: list[str] | None = None
        """Requests of :attr:`_waiting` that the engine had not asked for in this step when another one needed room."""

    def loading_blocks(self) -> set[int]:
        """The blocks of the first group that loads under way fill."""
        return {block for request in self._requests.values() for block in request.loading}

    def get(self, request_id: str) -> Request | None:
        return self._requests.get(request_id)

    # Arrival, lookup

    def arrive(self, request_id: str, prompt_tokens: int, expected: int, adapter: Adapter | None = None) -> list[Ask]:
        """A request came in; ``expected`` of its tokens were announced by a prefill (0: none were)."""
        request = Request(request_id, prompt_tokens, expected, adapter)
        self._requests[request_id] = request
        if prompt_tokens < 2 or not self._settings.loads:
            # One token must be computed in any case.
            request.phase = Phase.SETTLED
            return []
        self.unasked[request_id] = None
        return self.start_lookups()

    def start_lookups(self) -> list[Ask]:
        """Look up the next requests of the engine's queue, as many as may wait with a lease."""
        asks = []
        while self.unasked and len(self._waiting) < EAGER_LEASES:
            asks.append(self._ask(self._requests[next(iter(self.unasked))]))
        return asks

    def _ask(self, request: Request) -> Ask:
        request.phase = Phase.ASKED
        self.unasked.pop(request.request_id, None)
        self._waiting[request.request_id] = None
        return Ask(request.request_id, request.expected)

    def take_over(self) -> list[str]:
        """Requests that since the last call stopped to need their lookups."""
        over, self._over = self._over, []
        return over

    def _no_longer_waits(self, request_id: str) -> None:
        self.unasked.pop(request_id, None)
        if request_id in self._waiting:
            del self._waiting[request_id]
            self._over.append(request_id)

    def answered(self, request_id: str, chain: KeyChain, found: Found) -> list[Release]:
        request = self._requests.get(request_id)
        if request is None or request.phase is Phase.NEW:
            # It ended, or what it was asked for has other names by now.
            return [Release(lease) for lease in found.leases]
        if request.chain is None or len(request.chain) < len(chain):
            request.chain = chain
        if request.phase not in (Phase.ASKED, Phase.ANSWERED):
            # It gave up waiting while the lookup was under way.
            return [Release(lease) for lease in found.leases]
        before, request.found = request.found.leases, found
        if request.phase is Phase.ANSWERED:
            # Looked at again while it waits, there was more, or what had been promised was gone.
            request.next_save = request.saved_tail = 0
        request.phase = Phase.ANSWERED
        request.next_save = max(request.next_save, found.chunks)
        if found.tokens % self._chunk_tokens and found.tokens >= request.prompt_tokens:
            request.saved_tail = request.prompt_tokens
        return [Release(lease) for lease in before]

    def match(
        self, request_id: str, tokens: int, local: int, now: float, *, in_step: bool = False
    ) -> tuple[int | None, list[Ask | Release]]:
        """How many tokens behind the ``local`` ones can be loaded for a request of ``tokens`` tokens; None: ask again.

        If the pool has the whole request, its last token counts too, because the engine computes it again by itself.
        It does not count for a load ``in_step``: that step computes it.
        """
        request = self._requests.get(request_id)
        if request is None:
            return 0, []
        request.matched_in, self.full = self._step, False
        if request.phase is Phase.NEW:
            effects: list[Ask | Release] = []
            if len(self._waiting) >= EAGER_LEASES:
                later = self._last_later()
                if later is None:
                    self.full = True
                    return None, []
                effects += self._defer(later)
            request.matched_at = now
            return None, [*effects, self._ask(request)]
        if request.matched_at is None:
            request.matched_at = now
        if request.phase is Phase.ASKED:
            patience = self._settings.lookup_timeout + (self._settings.handoff_timeout if request.expected else 0.0)
            if now - max(request.matched_at, self.restarted_at) < patience:
                return None, []
            self._settle(request)
        if request.phase is not Phase.ANSWERED:
            return 0, []
        request.local, request.in_step = local, in_step
        found = max(min(request.found.tokens, tokens - (in_step or self._windows)) - local, 0)
        return found, [] if found else list(self._settle(request))

    def begin_step(self) -> None:
        self._step += 1
        self._later = None

    def _last_later(self) -> Request | None:
        """The last request with a lookup for which the engine has not asked in this step, because it stands later."""
        if self._later is None:
            self._later = [name for name in self._waiting if self._requests[name].matched_in != self._step]
        while self._later:
            name = self._later.pop()
            if name in self._waiting and self._requests[name].matched_in != self._step:
                return self._requests[name]
        return None

    def _defer(self, request: Request) -> list[Release]:
        """Drop the request's lookup.  It is looked up again when there is room."""
        released = self._settle(request)
        request.next_save = request.saved_tail = 0
        self._look_up_later(request)
        return released

    def _look_up_later(self, request: Request) -> None:
        request.phase, request.matched_at = Phase.NEW, None
        self.unasked[request.request_id] = None

    def decline(self, request_id: str) -> list[Release]:
        """Load nothing for the request, whatever its lookup finds."""
        request = self._requests.get(request_id)
        if request is None or request.phase is Phase.LOADING:
            return []
        return self._settle(request)

    def _settle(self, request: Request) -> list[Release]:
        self.loading -= request.phase is Phase.LOADING
        request.phase = Phase.SETTLED
        self._no_longer_waits(request.request_id)
        found, request.found = request.found, NOTHING
        return [Release(lease) for lease in found.leases]

    # Blocks

    def allocated(self, request_id: str, block_ids: Sequence[list[int]], external: int) -> list[Load | Release]:
        """The engine gave the request ``block_ids``; ``external`` tokens after the local ones are to be loaded.

        Where nothing is to be loaded ``block_ids`` may be empty: :meth:`scheduled` has them in the same step.
        """
        request = self._requests.get(request_id)
        if request is None:
            return []
        if block_ids or not request.block_ids:
            request.block_ids = list(block_ids) or [[] for _ in range(self._groups)]
        if request.phase in (Phase.LOADING, Phase.SETTLED):
            return []
        if external <= 0 or request.phase is not Phase.ANSWERED:
            # It is computed now, whatever its lookup will find.
            return list(self._settle(request))
        request.phase = Phase.LOADING
        self.loading += 1
        found, tokens = request.found, request.local + external
        last = -(-tokens // self._block_size)
        request.loading = request.block_ids[0][request.local // self._block_size : last]
        self._no_longer_waits(request_id)
        broken = any(
            self._first_wanted(request, pages, tokens) // self._page_blocks < pages.first for pages in found.pages
        )
        parts = [] if broken else [self._part(request, pages, tokens) for pages in found.pages]
        parts = [part for part in parts if part.block_ids]
        return [Load(request_id, found.leases[0].node, parts, broken, request.in_step, request.adapter)]

    def _first_wanted(self, request: Request, pages: Pages, tokens: int) -> int:
        return max(request.local // self._block_size, self._planes[pages.plane].first_needed(tokens, self._block_size))

    def _part(self, request: Request, pages: Pages, tokens: int) -> LoadPart:
        plane = self._planes[pages.plane]
        first = self._first_wanted(request, pages, tokens)
        ids = request.block_ids[plane.group][first : -(-tokens // self._block_size)]
        begin, skip = divmod(first, self._page_blocks)
        chunks = slice(begin - pages.first, -(-(first + len(ids)) // self._page_blocks) - pages.first)
        keys, refs = of_chunks(pages.keys, pages.packed_refs, chunks, plane.shards)
        return LoadPart(pages.plane, ids, keys, refs, skip)

    def received(self, request_id: str, invalid: set[int], *, failed: bool = False) -> list[Release]:
        """The load ended without the blocks in ``invalid``, or without any if it ``failed``.  It is not tried again."""
        request = self._requests.get(request_id)
        if request is None or request.phase is not Phase.LOADING:
            return []
        released = self._settle(request)
        missing = [position for position, block in enumerate(request.loading) if failed or block in invalid]
        if missing:
            # These blocks are computed now; the pool may well take them then.
            request.failed = True
            first = request.local // self._block_size + missing[0]
            request.next_save = min(request.next_save, first // self._page_blocks)
            request.saved_tail = 0
            request.offered = False
        request.loading = []
        if request.ended:
            del self._requests[request_id]
        return released

    def scheduled(
        self, request_id: str, block_ids: Sequence[Sequence[int]], computed_after: int, *, replace: bool
    ) -> Span | None:
        """The request computes up to token ``computed_after`` in this step, with ``block_ids`` more blocks.

        Returns what of its prompt will be computed after the step and was not offered before.
        """
        request = self._requests.get(request_id)
        if request is None or (request.offered and not replace):
            return None
        if replace or not request.block_ids:
            request.block_ids = [list(ids) for ids in block_ids] or [[] for _ in range(self._groups)]
        else:
            for ids, new in zip(request.block_ids, block_ids, strict=False):
                ids.extend(new)
        computed = min(computed_after, request.prompt_tokens)
        request.offered = computed == request.prompt_tokens and not self._may_fail(request)
        return self._offer(request, computed, request.prompt_tokens)

    def _may_fail(self, request: Request) -> bool:
        """Whether a rank may learn too late of the request's load, which failed on another one."""
        return self._several_ranks and request.in_step and request.phase is Phase.LOADING

    def _offer(self, request: Request, computed: int, end: int) -> Span | None:
        """The full chunks of ``computed`` tokens that were not offered yet, and the tail once ``end`` is reached."""
        if not self._settings.saves or not request.block_ids or not request.prompt_tokens:
            # Without tokens: the cache was reset since, its keys name what other weights computed.
            return None
        if request.next_save == NEVER or self._may_fail(request):
            return None
        lengths = [len(ids) for group, ids in enumerate(request.block_ids) if group not in self._state_groups]
        held = min(lengths, default=0)
        whole = min(computed // self._chunk_tokens, held // self._page_blocks)
        first = min(request.next_save, whole)
        tail = computed - whole * self._chunk_tokens
        may_end = self._settings.save_tails and not self._state_groups and end <= computed > request.saved_tail
        if not may_end or tail >= self._chunk_tokens or computed > held * self._block_size:
            tail = 0
        if first == whole and not tail:
            return None
        if self.paused:
            # What comes after them is of no use without these chunks.
            request.next_save = NEVER
            return None
        request.next_save = whole
        if tail:
            request.saved_tail = computed
        return Span(first, whole, tail)

    def save(self, request_id: str, span: Span, chain: KeyChain, tail: Tail | None) -> Save:
        """The save of ``span`` of a request whose keys are ``chain``; ``tail`` names the part of a chunk behind it."""
        request = self._requests[request_id]
        tails = [*chain.tails(span.first, span.end), *([tail] if tail is not None else [])]
        first, partial = span.first * self._page_blocks, tail is not None
        end = span.end * self._page_blocks + -(-span.tail // self._block_size)
        # Which blocks hold states the engine tells apart, see save_states().
        block_ids = [
            [] if group in self._state_groups else ids[first:end] for group, ids in enumerate(request.block_ids)
        ]
        number, parent = next(self._numbers), chain.parent(span.first)
        return Save(number, request_id, span.first, parent, tails, block_ids, partial, request.adapter)

    def takes_states(self, request_id: str, tokens: int) -> bool:
        """Whether the states behind ``tokens`` tokens of a request are to be saved."""
        request = self._requests.get(request_id)
        if request is None or not self._settings.saves or not request.prompt_tokens or tokens % self._chunk_tokens:
            return False
        return request.next_save != NEVER and not self.paused

    def save_states(self, request_id: str, tokens: int, chain: KeyChain, blocks: Mapping[int, int]) -> Save:
        """The save of the states behind ``tokens`` tokens, which the engine has in ``blocks``, one for each group."""
        request, first = self._requests[request_id], tokens // self._chunk_tokens - 1
        if tokens < request.prompt_tokens:  # whoever has the same prompt computes its last token
            request.states_until = max(request.states_until, tokens)
        block_ids = [[blocks[group]] if group in blocks else [] for group in range(self._groups)]
        number, parent, tails = next(self._numbers), chain.parent(first), chain.tails(first, first + 1)
        return Save(number, request_id, first, parent, tails, block_ids, adapter=request.adapter)

    def stored_tokens(self, request_id: str) -> int:
        """Up to which token others will find a request's prompt and answer."""
        request = self._requests.get(request_id)
        if request is None or request.next_save == NEVER:
            return 0
        stored = max(request.next_save * self._chunk_tokens, request.saved_tail)
        return min(stored, request.states_until) if self._state_groups else stored

    # Ends

    def preempted(self, request_id: str) -> None:
        """The engine took the request's blocks away.  The request starts over later, and offers its chunks again."""
        request = self._requests.get(request_id)
        if request is None or request.phase is Phase.LOADING:
            return
        request.block_ids = []
        request.next_save = request.found.chunks
        request.saved_tail = 0
        request.offered = False
        if request.phase is Phase.SETTLED and not request.failed and request.prompt_tokens > 1 and self._settings.loads:
            self._look_up_later(request)
            # It is the next in the engine's queue.
            self.unasked.move_to_end(request_id, last=False)

    def leave_out(self, request_id: str) -> list[Release]:
        """Load nothing for the request, and store nothing of it from now on."""
        request = self._requests.get(request_id)
        if request is None:
            return []
        request.failed = True
        request.prompt_tokens = 0
        request.next_save = NEVER
        return self.decline(request_id)

    def reset(self) -> list[Release]:
        """Use nothing again that was computed until now.

        Requests without blocks are looked up again under new names.  The others look up and offer nothing.
        """
        released: list[Release] = []
        for request_id, request in self._requests.items():
            released += self.decline(request_id)
            if request.block_ids or request.failed:
                released += self.leave_out(request_id)
                continue
            request.chain, request.next_save, request.saved_tail = None, 0, 0
            if request.prompt_tokens > 1 and self._settings.loads:
                self._look_up_later(request)
        return released

    def last_save(self, request_id: str, block_ids: Sequence[list[int]], computed: int) -> Span | None:
        """The request is about to end with ``computed`` tokens in ``block_ids``; what was not offered yet."""
        request = self._requests.get(request_id)
        if request is None or request.phase is not Phase.SETTLED or computed <= 0:
            return None
        request.block_ids = list(block_ids)
        return self._offer(request, computed, computed)

    def finished(self, request_id: str) -> list[Release]:
        request = self._requests.get(request_id)
        if request is None:
            return []
        if request.phase is Phase.LOADING:
            # The engine itself keeps the blocks until the load is reported; the lease stays as long.
            request.ended = True
            return []
        del self._requests[request_id]
        return self._settle(request)
