"""The context-caching object: what one rank of one engine asks of the pool.

Calls come from several threads of the engine and none of them waits for more than its option allows.  Loads and
saves run in a thread each; a lookup runs on its caller's thread over a connection of its own, so that it waits
for neither.  While the health gate is closed the pool is not asked at all.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ems.cc_v1.arguments import Blocks, reach_of, slot_numbers, timeout_of, whole_numbers
from ems.cc_v1.cc_config import CcKvOption, EmsConfig
from ems.cc_v1.errors import EmsErrorCode, EmsException, invalid
from ems.cc_v1.future import CcFuture, CcResult
from ems.cc_v1.monitor import GateClosed, Monitor
from ems.cc_v1.names import namespace_of
from ems.cc_v1.transfers import LOOKUP_KEYS, Transfers
from ems.errors import ConfigError, EmsError, NoSpace
from ems.pool.client.mapping import map_segments
from ems.pool.client.pool_client import PoolClient
from ems.transfers.lane import Lane
from ems.transfers.pins import SegmentPins
from ems.transfers.summary import Kind, Sample

OPEN_SECONDS = 2.0
"""How long a registration waits for the node to take note of it."""

_log = logging.getLogger("ems.cc_v1")


class ContextCaching:
    """Got from ``Ems.get_cc()``.

    ``lookups`` and ``pages`` are connections to the same node; ``pins`` is told of the memory that ``pages`` maps.
    """

    def __init__(
        self, config: EmsConfig, lookups: PoolClient, pages: PoolClient, pins: SegmentPins, monitor: Monitor
    ) -> None:
        self._config = config
        self._lookups = lookups
        self._pages = pages
        self._pins = pins
        self._monitor = monitor
        self.transfers: Transfers | None = None
        """Those of the registered caches."""
        self._closed = False
        self._lanes: dict[Kind, Lane[tuple[CcFuture, Callable[[], None]], None]] = {}
        for kind in (Kind.LOAD, Kind.SAVE):
            self._lanes[kind] = Lane(f"ems-{kind.value}", functools.partial(self._run, kind))
            self._lanes[kind].start()

    # The contract

    def register_kvcache(self, kv_caches: Sequence[Sequence[Any]]) -> None:
        """Tell which memory is loaded into and saved from.

        ``kv_caches[layer][i]`` are tensors ``[num_blocks, block_size, num_heads, head_size]`` with any strides.
        A node that is ill does not make this fail; it is logged, and the health gate closes.
        Raises EmsException: EMS_INVALID_ARGUMENT, the tensors cannot be served.
        """
        from ems.transfers.device import device_of
        from ems.transfers.rows import TokenRows

        self._config.cc_config_v1.check()
        self._check_open()
        try:
            rows = TokenRows([list(layer) for layer in kv_caches])
            device = device_of(rows.tensors)
        except (ConfigError, TypeError, RuntimeError) as error:
            raise invalid(f"kv_caches cannot be registered: {error}") from error
        namespace, described = namespace_of(self._config, rows)
        if "@" not in (engine := self._config.cc_config_v1.llm_engine):
            told = "llm_engine is %r, expected 'engine@model name': models with one model_id share pages"
            _log.warning(told, engine)
        self._pins.serve(device)
        self.transfers = Transfers(self._pages, rows, device, namespace)
        told = "EMS serves namespace %s: %d tokens a block, %d bytes a page"
        _log.info(told, namespace.name, rows.block_size, rows.page_bytes)
        self._pages.describe(namespace.name, described)
        try:
            self._pages.open(namespace, OPEN_SECONDS)
        except EmsError as error:
            self._monitor.failed(error)
            return
        threading.Thread(target=map_segments, args=(self._pages, _log), name="ems-warm", daemon=True).start()

    def exists(self, hashes: Iterable[int], option: CcKvOption | None = None) -> CcResult:
        """How many leading ``hashes`` are in the pool.

        0 on any fault but a bad argument, and before :meth:`register_kvcache`.
        Raises EmsException: EMS_INVALID_ARGUMENT.
        """
        wanted = whole_numbers("hashes", hashes)
        timeout = timeout_of(option)
        transfers = self.transfers
        if transfers is None or not wanted or not timeout or self._closed or not self._monitor.healthy:
            return CcResult(0, len(wanted))
        transfers.names.remember(wanted)
        begin = time.monotonic()
        count = 0
        try:
            count = self._count(transfers, wanted, begin + timeout, local_only=reach_of(option)[0])
        except EmsError as error:
            self._monitor.failed(error)
        except Exception:  # noqa: BLE001 - the root of what an SDK call runs, see below
            # Callers in the field take an exception here for "all of them are present".
            _log.exception("EMS lookup broke")
            self._monitor.failed(EmsException("a lookup broke, see the log"))
        self._monitor.add(Sample(Kind.LOOKUP, count, len(wanted), time.monotonic() - begin))
        return CcResult(count, len(wanted))

    def async_load(
        self, slot_mapping: Any, hashes: Iterable[int], offsets: Iterable[int], option: CcKvOption | None = None
    ) -> CcFuture:
        """Begin to copy blocks from the pool to their slots: block ``i`` owns the next ``offsets[i]`` slots.

        Raises EmsException: EMS_INVALID_ARGUMENT or EMS_NOT_REGISTERED.
        """
        return self._submit(Kind.LOAD, slot_mapping, hashes, offsets, option)

    def async_save(
        self, slot_mapping: Any, hashes: Iterable[int], offsets: Iterable[int], option: CcKvOption | None = None
    ) -> CcFuture:
        """Begin to copy blocks from their slots to the pool; arguments as for :meth:`async_load`.

        Raises EmsException: EMS_INVALID_ARGUMENT or EMS_NOT_REGISTERED.
        """
        return self._submit(Kind.SAVE, slot_mapping, hashes, offsets, option)

    def is_ready(self, future: CcFuture) -> bool:
        """Whether the load or save is over; never waits.

        Raises EmsException: EMS_INVALID_ARGUMENT, ``future`` is none.
        """
        return _future(future).ready()

    def get_result(self, future: CcFuture) -> CcResult:
        """Wait until the load or save is over, at most until its option's time-out.

        Raises EmsException: it failed as a whole; the slots are left alone from now on.
        """
        return _future(future).result()

    # Behind it

    def abandon(self) -> None:
        """From now on refuse everything; transfers that wait for their turn fail."""
        self._closed = True

    def join(self) -> None:
        """After :meth:`abandon`: end the threads."""
        for lane in self._lanes.values():
            lane.close()

    def _check_open(self) -> None:
        if self._closed:
            raise EmsException(
                "this context-caching object belongs to an earlier Ems.init, get the present one from Ems.get_cc()",
                EmsErrorCode.EMS_NOT_INITIALISED,
            )

    def _check_usable(self) -> None:
        self._check_open()
        if not self._monitor.healthy:
            raise GateClosed(self._monitor.reason)

    def _count(self, transfers: Transfers, wanted: list[int], deadline: float, *, local_only: bool) -> int:
        """How many leading blocks of ``wanted`` have a page, of the whole block or of the beginning of it."""
        names = transfers.names

        def leading(keys: Sequence[bytes]) -> int:
            left, packed = max(deadline - time.monotonic(), 0.001), b"".join(keys)
            return self._lookups.lookup(transfers.namespace, packed, timeout=left, local_only=local_only).count

        position = 0
        while position < len(wanted):
            keys = [names.whole(value) for value in wanted[position : position + LOOKUP_KEYS]]
            count = leading(keys)
            position += count
            if count < len(keys):
                if not leading([names.beginning(wanted[position])]):
                    break
                position += 1
        return position

    def _submit(
        self, kind: Kind, slot_mapping: Any, hashes: Iterable[int], offsets: Iterable[int], option: CcKvOption | None
    ) -> CcFuture:
        self._check_open()
        transfers = self.transfers
        if transfers is None:
            raise EmsException(
                "no KV caches are registered, call register_kvcache before loads and saves",
                EmsErrorCode.EMS_NOT_REGISTERED,
            )
        timeout = timeout_of(option)
        wanted = whole_numbers("hashes", hashes)
        counts = whole_numbers("offsets", offsets)
        rows, device = transfers.rows, transfers.device
        slots = slot_numbers(slot_mapping)
        blocks = Blocks(wanted, counts, slots, block_size=rows.block_size, num_blocks=rows.num_blocks)
        future = CcFuture(kind, len(blocks), timeout, time.monotonic, self._ended)
        future.local_only, future.cluster_write = reach_of(option)
        if not blocks:
            future.finish()
        elif not self._monitor.healthy:
            future.finish(GateClosed(self._monitor.reason))
        else:
            transfers.names.remember(wanted)
            mark = device.mark()

            def work() -> None:
                device.wait_for(mark)
                (transfers.load if kind is Kind.LOAD else transfers.save)(blocks, future)

            self._lanes[kind].put((future, work))
        return future

    def _run(self, kind: Kind) -> None:
        while (job := self._lanes[kind].next()) is not None:
            self._do(*job)

    def _do(self, future: CcFuture, work: Callable[[], None]) -> None:
        failure: EmsError | None = None
        try:
            self._check_usable()
            future.started = True
            work()
        except EmsError as error:
            failure = error
        except Exception as error:  # noqa: BLE001 - the root of this thread: a defect must cost a recompute, no engine
            _log.exception("EMS %s broke", future.kind.value)
            failure = EmsException(f"the {future.kind.value} broke: {error!r}")
        if failure is not None and not isinstance(failure, NoSpace):  # a full pool is a pool that is well
            self._monitor.failed(failure)
        future.finish(failure)

    def _ended(self, future: CcFuture) -> None:
        self._monitor.add(Sample(future.kind, future.progress, future.total, time.monotonic() - future.begin))
        if future.error is not None and future.started and not isinstance(future.error, NoSpace):
            # One that only ever waited for its turn says nothing about the node.
            self._monitor.failed(future.error)


def _future(future: object) -> CcFuture:
    if not isinstance(future, CcFuture):
        raise invalid(f"a {type(future).__name__} is no future of async_load or async_save")
    return future
