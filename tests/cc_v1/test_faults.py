"""A node that is gone, hangs, comes back or is full: the engine goes on, and no byte is wrong."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest

from ems import CcKvOption, Ems, EmsErrorCode, EmsException
from ems.errors import PoolTimeout
from ems.pool.client.health import HealthRules
from ems.pool.client.pool_client import PoolClient
from ems.pool.keys import integer_key
from ems.pool.layout import HEADER_BYTES, HEADERS_OFFSET, SlotState
from ems.transfers.checksums import PageSums
from ems.transfers.device import CpuDevice
from tests.cc_v1.conftest import NEVER, OPTION, make_caches, same, tokens, zeros_like
from tests.kit.node import NodeProcess
from tests.kit.waiting import until

pytestmark = pytest.mark.process

if TYPE_CHECKING:
    from collections.abc import Callable

    from ems.cc_v1.context_caching import ContextCaching
    from ems.transfers.plan import CopyPlan
    from tests.cc_v1.conftest import Connect

AT_ONCE = 10.0
"""Seconds that tell what does not wait from what waits :data:`LONG`, however busy the machine is."""
LONG = CcKvOption(write_rcache=True, read_local_only=False, timeout=60_000)
"""More than a call that does not wait needs, even on a busy machine."""


def code_of(call: Callable[[], Any]) -> EmsErrorCode:
    with pytest.raises(EmsException) as caught:
        call()
    assert str(caught.value)
    return caught.value.status_code()


class TestNodeKilled:
    def test_calls_degrade_and_work_again_when_a_node_is_back(
        self, fragile_node: NodeProcess, connect: Connect
    ) -> None:
        cc = connect(fragile_node)
        caches = make_caches()
        cc.register_kvcache(caches)
        assert cc.get_result(cc.async_save(range(8), [1, 2], [4, 4], OPTION)).success == 2

        fragile_node.kill()
        assert cc.exists([1, 2], OPTION).success == 0
        assert not Ems.check_health()
        for begin in (cc.async_load, cc.async_save):
            future = begin(range(8), [1, 2], [4, 4], OPTION)
            assert bool(future) is True
            assert cc.is_ready(future)
            assert code_of(lambda future=future: cc.get_result(future)) == EmsErrorCode.EMS_RECOVERD_ERROR  # type: ignore[misc]

        fragile_node.start()
        until(Ems.check_health)
        assert cc.exists([1, 2], OPTION).success == 2, "pages were lost with their node"
        assert cc.get_result(cc.async_save(range(8), [1, 2], [4, 4], OPTION)).success == 2
        other = zeros_like(caches)
        cc.register_kvcache(other)
        assert cc.get_result(cc.async_load(range(8), [1, 2], [4, 4], OPTION)).success == 2
        assert same(tokens(other, range(8)), tokens(caches, range(8)))

    @pytest.mark.parametrize("verb", ["async_load", "async_save"])
    def test_the_first_transfer_to_notice_fails_and_degrades(
        self, fragile_node: NodeProcess, connect: Connect, verb: str
    ) -> None:
        cc = connect(fragile_node, health=NEVER)
        cc.register_kvcache(make_caches())
        fragile_node.kill()
        assert Ems.check_health()
        future = getattr(cc, verb)(range(4), [1], [4], OPTION)
        assert code_of(lambda: cc.get_result(future)) == EmsErrorCode.EMS_RECOVERD_ERROR
        assert not Ems.check_health()

    def test_a_busy_engine_does_not_keep_the_gate_closed(self, fragile_node: NodeProcess, connect: Connect) -> None:
        """Calls that were not even tried while degraded are no new failures."""
        cc = connect(fragile_node)
        cc.register_kvcache(make_caches())
        fragile_node.kill()
        assert cc.exists([1], OPTION).success == 0
        fragile_node.start()

        def well_while_asked() -> bool:
            cc.async_save(range(4), [1], [4], OPTION)
            cc.exists([1], OPTION)
            return Ems.check_health()

        until(well_while_asked)

    def test_a_restart_between_two_calls_goes_unnoticed(self, fragile_node: NodeProcess, connect: Connect) -> None:
        cc = connect(fragile_node, health=NEVER)
        cc.register_kvcache(make_caches())
        assert cc.get_result(cc.async_save(range(4), [1], [4], OPTION)).success == 1
        assert cc.exists([1], OPTION).success == 1
        fragile_node.kill()
        fragile_node.start()

        assert cc.exists([1], OPTION).success == 1
        assert cc.get_result(cc.async_save(range(4), [1], [4], OPTION)).success == 1
        assert cc.get_result(cc.async_load(range(4), [1], [4], OPTION)).success == 1
        assert Ems.check_health()

    def test_an_idle_session_survives_a_restart_too(self, fragile_node: NodeProcess, connect: Connect) -> None:
        cc = connect(fragile_node, health=HealthRules(check_seconds=0.05, good_checks=1, flap_changes=1000))
        cc.register_kvcache(make_caches())
        pages = cc._pages
        first = pages.epoch
        fragile_node.kill()
        until(lambda: not Ems.check_health())
        fragile_node.start()
        until(Ems.check_health)
        assert pages.epoch > first
        assert cc.get_result(cc.async_save(range(4), [1], [4], OPTION)).success == 1

    def test_the_memory_of_a_dead_node_is_given_back(self, fragile_node: NodeProcess, connect: Connect) -> None:
        """Without a call of the engine: the next node may need it."""
        cc = connect(fragile_node)
        cc.register_kvcache(make_caches())
        assert cc.get_result(cc.async_save(range(4), [1], [4], OPTION)).success == 1

        def mapped() -> bool:
            return str(fragile_node.directory) in Path("/proc/self/maps").read_text()

        assert mapped()
        fragile_node.kill()
        until(lambda: not mapped())


class TestNodeHangs:
    @pytest.fixture
    def hung(self, fragile_node: NodeProcess, connect: Connect) -> ContextCaching:
        cc = connect(fragile_node, health=NEVER)
        cc.register_kvcache(make_caches())
        assert cc.get_result(cc.async_save(range(4), [1], [4], OPTION)).success == 1
        fragile_node.send(signal.SIGSTOP)
        return cc

    def test_transfers_return_at_once_and_end_at_their_time_out(self, hung: ContextCaching) -> None:
        option = CcKvOption(write_rcache=True, read_local_only=False, timeout=300)
        for verb in (hung.async_load, hung.async_save):
            future = verb(range(4), [1], [4], option)
            begin = time.monotonic()
            waits = verb(range(4), [1], [4], LONG)
            hung.is_ready(waits)
            with pytest.raises(EmsException):
                hung.get_result(future)
            assert time.monotonic() - begin < AT_ONCE
            assert hung.is_ready(future)

    def test_a_time_out_says_so_and_degrades(self, hung: ContextCaching) -> None:
        option = CcKvOption(write_rcache=True, read_local_only=False, timeout=100)
        future = hung.async_load(range(4), [1], [4], option)
        assert not hung.is_ready(future)
        assert code_of(lambda: hung.get_result(future)) == EmsErrorCode.EMS_TIMEOUT
        assert not Ems.check_health()

    def test_polling_alone_ends_a_transfer(self, hung: ContextCaching) -> None:
        option = CcKvOption(write_rcache=True, read_local_only=False, timeout=100)
        future = hung.async_save(range(4), [1], [4], option)
        until(lambda: hung.is_ready(future))
        assert code_of(lambda: hung.get_result(future)) == EmsErrorCode.EMS_TIMEOUT

    def test_a_lookup_answers_nothing_within_its_time_out(self, hung: ContextCaching) -> None:
        begin = time.monotonic()
        option = CcKvOption(write_rcache=True, read_local_only=False, timeout=200)
        assert hung.exists([1], option).success == 0
        assert time.monotonic() - begin < AT_ONCE
        begin = time.monotonic()
        assert hung.exists([1], LONG).success == 0
        assert time.monotonic() - begin < AT_ONCE

    def test_it_is_used_again_when_it_moves_again(self, fragile_node: NodeProcess, connect: Connect) -> None:
        cc = connect(fragile_node)
        cc.register_kvcache(make_caches())
        assert cc.get_result(cc.async_save(range(4), [1], [4], OPTION)).success == 1
        fragile_node.send(signal.SIGSTOP)
        option = CcKvOption(write_rcache=True, read_local_only=False, timeout=100)
        assert cc.exists([1], option).success == 0
        fragile_node.send(signal.SIGCONT)
        until(Ems.check_health)
        assert cc.exists([1], OPTION).success == 1
        assert cc.get_result(cc.async_load(range(4), [1], [4], OPTION)).success == 1


class Meddling(CpuDevice):
    """Does something after each copy, which is of one page."""

    batch_bytes = 1

    def __init__(self, meddle: Callable[[int], object]) -> None:
        super().__init__()
        self._meddle = meddle
        self._made = 0

    def copy(self, plan: CopyPlan, sums: PageSums | None = None) -> None:
        super().copy(plan, sums)
        self._meddle(self._made)
        self._made += 1


def meddle(cc: ContextCaching, what: Callable[[int], object]) -> None:
    assert cc.transfers is not None
    cc.transfers.device = Meddling(what)


class TestCopiesThatGoWrong:
    def test_a_save_that_breaks_leaves_nothing_behind(self, node: NodeProcess, connect: Connect) -> None:
        cc = connect(node, health=NEVER)
        cc.register_kvcache(make_caches())

        def breaks(copy: int) -> None:
            if copy == 1:
                raise RuntimeError("the device fell off the bus")

        meddle(cc, breaks)
        future = cc.async_save(range(12), [1, 2, 3], [4, 4, 4], OPTION)
        assert code_of(lambda: cc.get_result(future)) == EmsErrorCode.EMS_INTERNAL_ERROR
        assert not Ems.check_health()

        assert cc.transfers is not None
        namespace = cc.transfers.namespace
        client = PoolClient(node.config.socket)
        keys = b"".join(integer_key(value, namespace.name) for value in (1, 2, 3))
        hits = client.lookup(namespace, keys)
        client.close()
        assert (hits.count, hits.pending) == (0, 0)

    def test_a_page_that_changes_during_the_copy_is_not_loaded(self, node: NodeProcess, connect: Connect) -> None:
        cc = connect(node)
        caches = make_caches()
        cc.register_kvcache(caches)
        cc.get_result(cc.async_save(range(12), [1, 2, 3], [4, 4, 4], OPTION))
        transfers = cc.transfers
        assert transfers is not None
        keys = b"".join(transfers.names.whole(value) for value in (1, 2, 3))
        watcher = PoolClient(node.config.socket)
        hits = watcher.lookup(transfers.namespace, keys, lease=True)
        assert hits.lease is not None
        second = hits.lease.refs[1]
        segment = watcher.segments(hits.lease.epoch).segment(second.segment)
        header = HEADERS_OFFSET + second.slot * HEADER_BYTES

        def reused(copy: int) -> None:
            if copy == 1:
                segment[header] = SlotState.WRITING

        meddle(cc, reused)
        result = cc.get_result(cc.async_load(range(12), [1, 2, 3], [4, 4, 4], OPTION))
        segment[header] = SlotState.PRESENT
        watcher.close()
        assert (result.success, result.total) == (1, 3)

    def test_no_slot_is_touched_once_a_load_was_given_up(
        self, node: NodeProcess, connect: Connect, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(CpuDevice, "batch_bytes", 1)
        cc = connect(node, health=NEVER)
        cc.register_kvcache(make_caches(blocks=64))
        offsets, hashes = [4] * 64, list(range(64))
        assert cc.get_result(cc.async_save(range(256), hashes, offsets, OPTION)).success == 64
        copied = []

        def slow(copy: int) -> None:
            copied.append(copy)
            time.sleep(1.1)  # longer than the whole load may take, begun after it was asked for

        meddle(cc, slow)
        option = CcKvOption(write_rcache=True, read_local_only=False, timeout=1000)
        future = cc.async_load(range(256), hashes, offsets, option)
        with contextlib.suppress(EmsException):  # the one block may count or not
            assert cc.get_result(future).success == 1
        so_far = len(copied)
        cc._lanes[future.kind].close()
        assert 0 < so_far < 64
        assert len(copied) == so_far

    def test_waiting_for_its_turn_too_long_says_nothing_about_the_node(
        self, node: NodeProcess, connect: Connect
    ) -> None:
        cc = connect(node, health=NEVER)
        cc.register_kvcache(make_caches())
        go_on = threading.Event()
        meddle(cc, lambda copy: go_on.wait(10.0))
        first = cc.async_save(range(4), [1], [4], OPTION)
        option = CcKvOption(write_rcache=True, read_local_only=False, timeout=50)
        second = cc.async_save(range(4), [2], [4], option)
        assert code_of(lambda: cc.get_result(second)) == EmsErrorCode.EMS_TIMEOUT
        assert Ems.check_health()
        go_on.set()
        assert cc.get_result(first).success == 1
        assert cc.get_result(cc.async_save(range(4), [3], [4], OPTION)).success == 1
        assert cc.exists([2], OPTION).success == 0

    @pytest.mark.parametrize("end", ["degraded", "closed"])
    def test_what_waits_for_its_turn_is_not_begun_any_more(self, node: NodeProcess, connect: Connect, end: str) -> None:
        cc = connect(node, health=NEVER)
        cc.register_kvcache(make_caches())
        go_on = threading.Event()
        meddle(cc, lambda copy: go_on.wait(10.0))
        cc.async_save(range(4), [1], [4], OPTION)
        waiting = cc.async_save(range(4), [2], [4], OPTION)
        if end == "degraded":
            cc._monitor.failed(PoolTimeout("no answer"))
        else:
            cc.abandon()
        go_on.set()
        expected = EmsErrorCode.EMS_RECOVERD_ERROR if end == "degraded" else EmsErrorCode.EMS_NOT_INITIALISED
        assert code_of(lambda: cc.get_result(waiting)) == expected
        assert cc.transfers is not None
        client = PoolClient(node.config.socket)
        assert client.lookup(cc.transfers.namespace, cc.transfers.names.whole(2)).count == 0
        client.close()

    def test_a_lease_ends_with_its_load(self, node: NodeProcess, connect: Connect) -> None:
        cc = connect(node)
        cc.register_kvcache(make_caches())
        cc.get_result(cc.async_save(range(12), [1, 2, 3], [4, 4, 4], OPTION))
        client = PoolClient(node.config.socket)
        held = []

        def breaks(copy: int) -> None:
            held.append(client.stats()["leases"])
            if copy == 3:
                raise RuntimeError("the device fell off the bus")

        meddle(cc, breaks)
        assert cc.get_result(cc.async_load(range(12), [1, 2, 3], [4, 4, 4], OPTION)).success == 3
        until(lambda: client.stats()["leases"] == 0, seconds=10.0)
        future = cc.async_load(range(12), [1, 2, 3], [4, 4, 4], OPTION)
        assert code_of(lambda: cc.get_result(future)) == EmsErrorCode.EMS_INTERNAL_ERROR
        until(lambda: client.stats()["leases"] == 0, seconds=10.0)
        assert held == [1] * 4
        client.close()


class TestRoom:
    def test_a_full_pool_stores_what_it_can(self, connect: Connect) -> None:
        with NodeProcess("--size", "1MB", "--segment-size", "1MB") as tiny:
            cc = connect(tiny)
            cc.register_kvcache(make_caches(layers=4, heads=8, size=256))  # pages of 256 KiB: three fit
            slots, hashes, offsets = range(32), list(range(8)), [4] * 8
            assert cc.transfers is not None
            assert cc.get_result(cc.async_save(slots[:12], hashes[:3], offsets[:3], OPTION)).success == 3
            holder = PoolClient(tiny.config.socket)
            keys = b"".join(cc.transfers.names.whole(value) for value in hashes[:3])
            hits = holder.lookup(cc.transfers.namespace, keys, lease=True)
            assert hits.count == 3

            result = cc.get_result(cc.async_save(slots, hashes, offsets, OPTION))
            assert (result.success, result.total) == (3, 8)
            future = cc.async_save(slots[:4], hashes[5:6], [4], OPTION)
            with pytest.raises(EmsException, match=r"none of 1 blocks .* is in use") as refused:
                cc.get_result(future)
            assert refused.value.status_code() == EmsErrorCode.EMS_NO_SPACE
            assert Ems.check_health()
            holder.close()

    def test_a_page_larger_than_the_pool_is_refused_with_a_sentence(
        self, connect: Connect, caplog: pytest.LogCaptureFixture
    ) -> None:
        with NodeProcess("--size", "1MB", "--segment-size", "1MB") as tiny:
            cc = connect(tiny, health=NEVER)
            cc.register_kvcache(make_caches(layers=20, heads=8, size=256))
            assert "does not fit in a segment" in caplog.text
            assert not Ems.check_health()
            assert cc.exists([1], OPTION).success == 0
            with pytest.raises(EmsException, match=r"not used for now: a page of .* does not fit") as refused:
                cc.get_result(cc.async_save(range(4), [1], [4], OPTION))
            assert refused.value.status_code() == EmsErrorCode.EMS_RECOVERD_ERROR


class TestDeathInTheMiddle:
    def test_the_node_dies_while_a_load_copies(self, fragile_node: NodeProcess, connect: Connect) -> None:
        """What is mapped stays readable, so the blocks that count are right."""
        cc = connect(fragile_node, health=NEVER)
        caches = make_caches()
        cc.register_kvcache(caches)
        assert cc.get_result(cc.async_save(range(12), [1, 2, 3], [4, 4, 4], OPTION)).success == 3
        other = zeros_like(caches)
        cc.register_kvcache(other)
        meddle(cc, lambda copy: fragile_node.kill())
        assert cc.get_result(cc.async_load(range(12), [1, 2, 3], [4, 4, 4], OPTION)).success == 3
        assert same(tokens(other, range(12)), tokens(caches, range(12)))
        assert cc.exists([1], OPTION).success == 0

    @pytest.mark.parametrize("reservation", [1, 1 << 20])
    def test_the_node_dies_while_a_save_copies(
        self, fragile_node: NodeProcess, connect: Connect, monkeypatch: pytest.MonkeyPatch, reservation: int
    ) -> None:
        monkeypatch.setattr("ems.cc_v1.transfers.RESERVATION_BYTES", reservation)
        cc = connect(fragile_node, health=NEVER)
        cc.register_kvcache(make_caches())
        meddle(cc, lambda copy: fragile_node.kill())
        future = cc.async_save(range(12), [1, 2, 3], [4, 4, 4], OPTION)
        assert code_of(lambda: cc.get_result(future)) == EmsErrorCode.EMS_RECOVERD_ERROR
        assert not Ems.check_health()

    def test_the_node_dies_before_it_answers_a_commit(self, fragile_node: NodeProcess, connect: Connect) -> None:
        """What was committed before counts, and of what was asked for ahead nothing is left behind."""
        with patch("ems.cc_v1.transfers.RESERVATION_BYTES", 1):
            cc = connect(fragile_node, health=NEVER)
            cc.register_kvcache(make_caches())
            meddle(cc, lambda copy: fragile_node.kill() if copy == 3 else None)
            result = cc.get_result(cc.async_save(range(24), [1, 2, 3, 4, 5, 6], [4] * 6, OPTION))
            assert 2 <= result.success <= 3
        assert cc.transfers is not None
        assert cc.transfers._client._promised._held == {}

    @pytest.mark.parametrize(("reservation", "held"), [(1 << 20, 1), (1, 2)])
    def test_the_engine_dies_while_it_saves(
        self, node: NodeProcess, connect: Connect, reservation: int, held: int
    ) -> None:
        """Nothing half-written is ever found, nothing stays reserved, and the next engine stores the blocks."""
        script = f"""
import threading
from pathlib import Path
import ems.cc_v1.transfers
from ems.config import NodeConfig
from tests.cc_v1.conftest import *
from tests.cc_v1.test_faults import meddle

ems.cc_v1.transfers.RESERVATION_BYTES = {reservation}
directory = Path({str(node.directory)!r})
node = NodeConfig(directory=directory, socket=directory / "node.sock")
Ems.init(EmsConfig("", "", rank_config("dies{held}"), autostart=False, node=node))
cc = Ems.get_cc()
cc.register_kvcache(make_caches())

def wait_to_die(copy):
    print("copying", flush=True)
    threading.Event().wait(60)

meddle(cc, wait_to_die)
cc.get_result(cc.async_save(range(12), [1, 2, 3], [4, 4, 4], CcKvOption(timeout=60000)))
"""
        engine = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
        assert engine.stdout is not None
        assert engine.stdout.readline() == b"copying\n"
        watcher = PoolClient(node.config.socket)
        until(lambda: watcher.stats()["reservations"] == held)
        cc = connect(node, model_id=f"dies{held}")
        cc.register_kvcache(make_caches())
        assert cc.exists([1, 2, 3], OPTION).success == 0
        engine.kill()
        engine.communicate()
        until(lambda: watcher.stats()["reservations"] == 0, seconds=20.0)
        watcher.close()
        assert cc.exists([1, 2, 3], OPTION).success == 0
        assert cc.get_result(cc.async_save(range(12), [1, 2, 3], [4, 4, 4], OPTION)).success == 3
        assert cc.exists([1, 2, 3], OPTION).success == 3
