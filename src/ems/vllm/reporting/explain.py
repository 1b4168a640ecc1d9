"""What became of each request's lookup and load, and why not more: for counters, and for requests that ask.

A brain: one small record a live request, dropped when it ends.  What always holds: each request counts as one lookup
at most, decided once, a hit or a miss with one reason; memory is bounded by :data:`MAX_RECORDS`.
"""

from __future__ import annotations

from collections import Counter

import msgspec

from ems.pool.reasons.words import Reason

MAX_RECORDS = 65536
"""Requests that are followed at a time; beyond, the oldest are forgotten."""


class Explanation(msgspec.Struct, frozen=True):
    """A request's hit or miss, in tokens of its prompt unless said otherwise.

    ``found`` is what the pool had from the prompt's start, ``from_engine`` what the engine's own cache had,
    ``from_pool`` what was loaded behind that, ``computed`` the rest, at least the last token.
    """

    prompt: int
    found: int
    found_blocks: int
    from_engine: int
    from_pool: int
    loaded_blocks: int
    computed: int
    tier: str
    reason: str
    sentence: str

    def line(self) -> str:
        return (
            f"{self.prompt} tokens in the prompt, {self.from_engine} from the engine's cache, {self.from_pool} "
            f"({self.loaded_blocks} blocks) from the pool{f' in {self.tier}' if self.from_pool else ''}, "
            f"{self.computed} computed; the pool had {self.found} tokens ({self.found_blocks} blocks); {self.sentence}"
        )


class Tally(msgspec.Struct):
    """Lookups that were decided, each with tokens beyond the engine's own and those to be loaded; misses by reason."""

    decided: list[tuple[int, int]] = msgspec.field(default_factory=list)
    misses: Counter[str] = msgspec.field(default_factory=Counter)


class _Record(msgspec.Struct):
    prompt: int
    wanted: bool
    found: int = 0
    local: int = 0
    loaded: int = 0
    answered: bool = False
    decided: bool = False
    reason: Reason | None = None
    detail: str = ""
    reason_found: Reason | None = None
    """The reason that the detail belongs to."""


class Explanations:
    """Follows the requests of one engine with blocks of ``block_size`` tokens."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._records: dict[str, _Record] = {}
        self.tally = Tally()

    def take_tally(self) -> Tally:
        taken, self.tally = self.tally, Tally()
        return taken

    # A request's way

    def arrived(self, request_id: str, prompt: int, *, wanted: bool = False) -> None:
        if len(self._records) >= MAX_RECORDS:
            del self._records[next(iter(self._records))]
        self._records[request_id] = _Record(prompt, wanted)

    def wanted(self, request_id: str) -> bool:
        record = self._records.get(request_id)
        return record is not None and record.wanted

    def left_out(self, request_id: str, reason: Reason) -> None:
        record = self._records.get(request_id)
        if record is not None and not record.decided:
            self._miss(record, reason)

    def answered(self, request_id: str, tokens: int, reason: Reason | None = None, detail: str = "") -> None:
        """The lookup found ``tokens`` tokens, and not more for ``reason`` (None: there is no more).

        ``detail`` says more about the reason.
        """
        record = self._records.get(request_id)
        if record is not None and not record.decided:
            record.answered = True
            record.found = tokens
            record.reason = record.reason_found = reason
            record.detail = detail

    def matched(self, request_id: str, local: int, external: int | None) -> None:
        """The engine has ``local`` tokens and can load ``external`` more (None: it has to ask again)."""
        record = self._records.get(request_id)
        if record is None or record.decided or external is None:
            return
        record.local = local
        if external:
            return
        if not record.answered:
            self._miss(record, Reason.LOOKUP_TIMEOUT if record.prompt > 1 else Reason.TOO_SHORT)
        else:
            self._miss(record, Reason.IN_ENGINE if record.found else record.reason or Reason.ABSENT)

    def loading(self, request_id: str, tokens: int) -> None:
        record = self._records.get(request_id)
        if record is None:
            return
        record.loaded = tokens
        if not record.decided:
            self._decide(record, tokens)
            if record.reason is None:
                complete = record.found >= record.prompt - 1
                record.reason = Reason.NOTHING_MISSED if complete else Reason.ABSENT

    def load_failed(self, request_id: str, missing_blocks: int) -> None:
        record = self._records.get(request_id)
        if record is not None and missing_blocks:
            record.loaded = max(record.loaded - missing_blocks * self._block_size, 0)
            record.reason = Reason.LOAD_FAILED
            self.tally.misses[Reason.LOAD_FAILED.value] += 1

    def ended(self, request_id: str) -> Explanation | None:
        """The request ended; its explanation if it asked for one."""
        record = self._records.pop(request_id, None)
        if record is None or not record.wanted:
            return None
        reason = record.reason or Reason.NOT_LOADED
        # What the pool told belongs to its own reason, not to one that came later.
        detail = record.detail if reason is record.reason_found else ""
        return Explanation(
            prompt=record.prompt,
            found=record.found,
            found_blocks=record.found // self._block_size,
            from_engine=record.local,
            from_pool=record.loaded,
            loaded_blocks=-(-record.loaded // self._block_size),
            computed=max(record.prompt - record.local - record.loaded, 1),
            tier="DRAM" if record.found else "",
            reason=reason.value,
            sentence=f"{reason.sentence} ({detail})" if detail else reason.sentence,
        )

    # Counting

    def _decide(self, record: _Record, found: int) -> None:
        record.decided = True
        if len(self.tally.decided) < MAX_RECORDS:
            self.tally.decided.append((max(record.prompt - record.local, 0), found))

    def _miss(self, record: _Record, reason: Reason) -> None:
        self._decide(record, 0)
        record.reason = reason
        self.tally.misses[reason.value] += 1
