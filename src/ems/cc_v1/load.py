"""Pages into engine memory.

What always holds: a block counts as loaded only if its page was the right one before and after the copy, with the
right bytes as far as these are checked; the pages stay where they are meanwhile, because a lease says so; the lease
ends whatever happens.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from ems.cc_v1.present import LOOKUP_KEYS, twice

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ems.cc_v1.registration import PageMemory, Registration
    from ems.cc_v1.slots import Blocks
    from ems.cc_v1.transfer import CcFuture
    from ems.pool.client.pool_client import PoolClient
    from ems.pool.layout import PageRef
    from ems.pool.segments.reader import PageReader

TOKEN_COUNT = struct.Struct("<I")
"""The note at the end of a page that has fewer tokens than a block: how many."""


def batch_size(registration: Registration) -> int:
    """Pages copied in one go."""
    return max(registration.device.batch_bytes // registration.namespace.page_size, 1)


class Loader:
    """Loads for one registration, over one connection."""

    def __init__(self, client: PoolClient, registration: Registration) -> None:
        self._client = client
        self._registration = registration

    def load(self, blocks: Blocks, future: CcFuture) -> None:
        """Load leading ``blocks`` as far as the pool has them; ``future`` learns how many.

        Raises:
            PoolError: the pool failed; what was loaded by then counts.
        """
        names = self._registration.names
        total = len(blocks)
        while future.progress < total and future.open:
            start = future.progress
            span = range(start, min(start + LOOKUP_KEYS, total))
            found = self._load_run(blocks, span, [names.whole(blocks.hashes[i]) for i in span], future)
            if found < len(span):
                missing = start + found
                if blocks.whole(missing) or not future.open:
                    return
                beginning = names.beginning(blocks.hashes[missing])
                if not self._load_run(blocks, range(missing, missing + 1), [beginning], future):
                    return

    def _load_run(self, blocks: Blocks, span: range, keys: Sequence[bytes], future: CcFuture) -> int:
        """Load the blocks of ``span`` from the pages of ``keys``; how many leading ones were loaded."""
        namespace = self._registration.namespace
        joined = b"".join(keys)
        hits = twice(lambda: self._client.lookup(namespace, joined, lease=True, timeout=future.remaining()))
        if hits.lease is None:
            return 0
        try:
            memory = self._registration.memory(self._client, hits.lease.epoch)
            reader = self._client.reader(namespace, hits.lease.epoch)
            pages = list(zip(span, keys, hits.lease.refs, strict=False))
            step = batch_size(self._registration)
            loaded = 0
            for begin in range(0, len(pages), step):
                batch = pages[begin : begin + step]
                good = self._load_batch(memory, reader, blocks, batch, future)
                loaded += good
                future.advance(span.start + loaded)
                if good < len(batch):
                    break
            self._client.report(namespace, reader)
            return loaded
        finally:
            self._client.release(hits.lease)

    def _load_batch(
        self,
        memory: PageMemory,
        reader: PageReader,
        blocks: Blocks,
        batch: Sequence[tuple[int, bytes, PageRef]],
        future: CcFuture,
    ) -> int:
        device, rows = self._registration.device, self._registration.rows
        whole: list[tuple[bytes, PageRef]] = []
        spans, places = [], []
        for position, key, ref in batch:
            page = memory.page(ref)
            if not reader.holds(ref, key):
                reader.suspect(ref, key)
                break
            if not self._enough(blocks, position, key, page):
                break
            whole.append((key, ref))
            spans.append(blocks.span(position))
            places.append(page)
        if not whole:
            return 0
        plan = rows.plan(spans, places, out=False)
        with future.copying() as allowed:
            if not allowed:
                return 0
            device.copy(plan)
            device.synchronise()
        for loaded, (key, ref) in enumerate(whole):
            if not reader.sound(ref, key):
                return loaded
        return len(whole)

    def _enough(self, blocks: Blocks, position: int, key: bytes, page: memoryview) -> bool:
        if key == self._registration.names.whole(blocks.hashes[position]):
            return True
        (tokens,) = TOKEN_COUNT.unpack_from(page, len(page) - TOKEN_COUNT.size)
        return bool(blocks.offsets[position] <= tokens < blocks.block_size)
