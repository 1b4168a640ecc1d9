#!/usr/bin/env python3
"""Minutes of load on hosts that share their memory, while nodes, agents, engines, links and masters are broken.

Network namespaces are the hosts, each with a node and an engine; a host of its own has Mooncake's master, with
``--masters 2`` a standby, too, and etcd.  Every answer is compared, token by token, with that of an engine without a
connector; no request may fail, but with its engine, or hang.  When all is mended the hosts must load from each other
again, and nothing may be left: no blocks of engines, no leases and slots of nodes, no agents of nodes that are gone,
nothing in the cluster that a clear does not take out, no memory that nobody lends any more.

Run it as root with the project's interpreter: ``python scripts/cluster_chaos.py [--minutes 20] [--hosts 4] [--help]``.
Progress goes to stderr, the result to stdout; the exit status is 1 when anything was found, 2 when the usage was wrong.
"""

from __future__ import annotations

import heapq
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import psutil

if __package__ in (None, ""):  # run as a program
    sys.path.insert(0, str(Path(__file__).parent.parent))

from scripts.chaos_load import ClusterFault, Job, Load, Tally, cluster_faults
from scripts.chaos_runner import (
    OPTIONS,
    PIECE_SECONDS,
    READY_SECONDS,
    Engine,
    Reference,
    Runner,
    complete,
    conduct,
    connected_server,
    engine_holds,
    expect_nothing,
    parser_of,
    plain_server,
    pool_holds,
    running,
    say,
)
from tests.kit.hosts import Host, Hosts
from tests.kit.mooncake import Etcd, MooncakeMaster
from tests.kit.node import NodeProcess
from tests.kit.tiny_model import make_model
from tests.kit.waiting import until

POOL = "48MB"
LENT = "64MB"
RETURN_SECONDS = 240.0
"""How long a mended cluster may take until it is used again: the longer it was broken the rarer it is tried out."""
WRITTEN_SECONDS = 20.0
"""How long what an engine saved may take until the cluster has it, before it is looked at without that."""
GONE_SECONDS = 60.0
"""How long the master may take to forget hosts that it does not hear of."""
FORGETS = ("--put_start_discard_timeout_sec=10", "--put_start_release_timeout_sec=20")
"""Room for what somebody began to store and never finished is free after that; Mooncake waits ten minutes otherwise."""
AGENT = "ems.pool.tiers.cluster.agent"
MOST_AGENTS = 2
MARK_BYTES = 16 << 10
TOKENS = 600
"""Of a prompt that must come from another host when all is mended."""
PAGES = 8
"""In which an engine saves it."""


class Member:
    """A host with a node and an engine."""

    def __init__(self, host: Host, node: NodeProcess, engine: Engine) -> None:
        self.host = host
        self.node = node
        self.engine = engine
        self.broken: set[str] = set()
        """What of it is broken now."""
        self.tokens_before = 0.0
        """That came from the pool, for engines that were killed."""

    def start_node(self) -> None:
        with self.host.entered():
            self.node.start()

    def agents(self) -> list[psutil.Process]:
        return [one for one in self.host.processes() if AGENT in _command(one)]

    def tokens_from_pool(self) -> float:
        return self.engine.metrics().get("vllm:external_prefix_cache_hits_total", 0.0)

    def tier(self) -> dict[str, Any]:
        return dict(self.node.figures()["tiers"][0])

    def uses_cluster(self) -> bool:
        tier = self.tier()
        return bool(tier["reading"] and tier["writing"] and not tier["queued_bytes"])

    def has_written(self, pages: int) -> bool:
        """Whether the cluster got as many, and nothing waits: what was lost is offered again beside what is new."""
        tier = self.tier()
        return int(tier["pages_written"]) >= pages and not tier["queued_bytes"]


def _command(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


class Masters:
    """Mooncake's master, or a leader and who stands by, on a host of their own."""

    def __init__(self, host: Host, folder: Path, count: int, stack: ExitStack) -> None:
        self.host = host
        with host.entered():
            etcd = stack.enter_context(Etcd(folder, address=host.address)) if count > 1 else None
            self.all = [
                stack.enter_context(
                    MooncakeMaster(folder, *FORGETS, address=host.address, etcd=etcd, name=f"master-{number}")
                )
                for number in range(count)
            ]
        self.endpoint = self.all[0].endpoint
        self.broken: set[int] = set()

    def start(self, number: int) -> None:
        with self.host.entered():
            self.all[number].start()

    def send(self, number: int, what: signal.Signals) -> None:
        for process in self.all[number].processes():
            process.send_signal(what)

    def figures(self) -> dict[str, float]:
        """What the one that leads says of the cluster."""
        with self.host.entered():
            said = [master.metrics() for master in self.all]
        return max(said, key=lambda one: one["master_total_capacity_bytes"])


class Breaker:
    """Breaks parts and mends them, from the thread that started them, which outlives them all."""

    def __init__(self, members: Sequence[Member], masters: Masters, tally: Tally) -> None:
        self._members = members
        self._masters = masters
        self._tally = tally
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def run(self, seed: int, until_done: Future[None]) -> None:
        """Break things until that is done, then mend everything."""
        for fault in cluster_faults(seed, len(self._members), len(self._masters.all)):
            begin = time.monotonic() + fault.after
            while not until_done.done() and time.monotonic() < begin:
                self._keep()
                time.sleep(0.1)  # bounded by the load's end
            if until_done.done():
                break
            self._break(fault)
        while self._due:
            heapq.heappop(self._due)[2]()
        for member in self._members:
            until(partial(self._is_up, member), f"the engine of {member.host.address} is back", READY_SECONDS)

    def _keep(self) -> None:
        """Mend what is due, and see which engines are back."""
        while self._due and self._due[0][0] <= time.monotonic():
            heapq.heappop(self._due)[2]()
        for member in self._members:
            self._is_up(member)

    def _is_up(self, member: Member) -> bool:
        if not member.engine.up and member.engine.is_healthy():
            member.engine.up = True
            member.broken.discard("engine")
        return member.engine.up

    def _break(self, fault: ClusterFault) -> None:
        if fault.part == "master":
            broken: set[Any] = self._masters.broken
            part: Any = fault.host
            mend = self._break_master(fault) if part not in broken else None
        else:
            member = self._members[fault.host]
            broken, part = member.broken, fault.part
            mend = self._break_part(member, fault) if part not in broken else None
        if mend is None:
            return
        broken.add(part)
        self._tally.faults[f"{fault.part} {fault.act}"] += 1

        def mended() -> None:
            mend()
            if fault.part != "engine":
                broken.discard(part)

        heapq.heappush(self._due, (time.monotonic() + fault.lasts, next(self._order), mended))

    def _break_master(self, fault: ClusterFault) -> Callable[[], None]:
        if fault.act == "kill":
            self._masters.all[fault.host].kill()
            return partial(self._masters.start, fault.host)
        self._masters.send(fault.host, signal.SIGSTOP)
        return partial(self._masters.send, fault.host, signal.SIGCONT)

    def _break_part(self, member: Member, fault: ClusterFault) -> Callable[[], None] | None:
        if fault.part == "link":
            member.host.cut()
            return member.host.heal
        if fault.part == "agents":
            return _signal(member.agents(), fault.act)
        if fault.part == "engine":
            if 2 * sum(not one.engine.up for one in self._members) >= len(self._members):  # somebody has to answer
                return None
            member.tokens_before += member.tokens_from_pool()
            member.engine.up = False
            member.engine.kills += 1
            member.engine.server.kill()
            return member.engine.start
        if member.node.returncode is not None:  # it ended by itself, which is found later
            return None
        if fault.act == "kill":
            member.node.kill()
            return member.start_node
        member.node.send(signal.SIGSTOP)
        return partial(member.node.send, signal.SIGCONT)


def _signal(processes: Sequence[psutil.Process], act: str) -> Callable[[], None]:
    """Kill or freeze ``processes``; what mends that."""

    def send(what: signal.Signals) -> None:
        for process in processes:
            try:
                process.send_signal(what)
            except psutil.NoSuchProcess:
                continue

    send(signal.SIGKILL if act == "kill" else signal.SIGSTOP)
    return partial(send, signal.SIGCONT)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print what came of it, and return the exit status."""
    parser = parser_of(__doc__ or "")
    parser.set_defaults(minutes=20.0, clients=6)
    parser.add_argument("--hosts", type=int, choices=range(2, 9), default=4, metavar="2-8", help="of the cluster")
    parser.add_argument(
        "--masters", type=int, choices=range(1, 4), default=1, metavar="1-3", help="with etcd if above 1"
    )
    options = parser.parse_args(arguments)
    return conduct(options, partial(run, options))


def run(options: Any, folder: Path) -> tuple[Tally, dict[str, Any]]:
    """Start everything, make load and faults, wait for rest, look what is left."""
    model = make_model(folder / "model", "test")
    tally = Tally()
    with Hosts(options.hosts + 1) as network:
        *hosts, last = network.hosts
        with ExitStack() as stack:
            masters = Masters(last, folder, options.masters, stack)
            members = [_member(host, masters.endpoint, model, folder, stack) for host in hosts]
            plain = plain_server(model, OPTIONS, folder)
            with running([Engine(plain), *(member.engine for member in members)]):
                say(
                    f"{options.hosts} hosts with a node and an engine; {options.minutes:g} minutes, seed {options.seed}"
                )
                reference = Reference(plain, options.deadline)
                engines = [member.engine for member in members]
                runner = Runner(tally, engines, reference, options.deadline)
                load = Load(options.seed, options.hosts)
                with ThreadPoolExecutor(1) as threads:
                    loading = threads.submit(runner.run, load, options.minutes * 60, options.clients)
                    Breaker(members, masters, tally).run(options.seed, loading)
                    loading.result()
                figures = _look_after(tally, members, masters, reference, options)
                runner.compare(folder / "differences.jsonl")
        for host in network.hosts:
            # Who lends memory takes its leave of the master for three seconds after its node at most.
            expect_nothing(tally, f"host {host.address}", partial(_left_on, host))
    return tally, figures


def _left_on(host: Host) -> dict[str, float]:
    return {f"{one.pid} {' '.join(_command(one))}": 1.0 for one in host.processes()}


def _member(host: Host, master: str, model: Path, folder: Path, stack: ExitStack) -> Member:
    settings = folder / f"{host.address}.json"
    said = {"metadata_server": "P2PHANDSHAKE", "protocol": "tcp", "master_server_address": master}
    settings.write_text(json.dumps({**said, "global_segment_size": LENT}))
    node = NodeProcess("--size", POOL, "--tier", f"mooncake:{settings}")
    stack.callback(node.close)
    stack.callback(lambda: (folder / f"{host.address}.node.log").write_text(node.log))
    options = msgspec.structs.replace(OPTIONS, prefix_caching=host.address.endswith("1"))
    server = connected_server(model, options, node, folder / f"{host.address}.log", health_check_ms=500)
    member = Member(host, node, Engine(server, host))
    member.start_node()
    return member


def _look_after(
    tally: Tally, members: Sequence[Member], masters: Masters, reference: Reference, options: Any
) -> dict[str, Any]:
    """Wait for rest; what does not work, or is not free then, is a violation.  Returns what was counted."""
    ended = [member for member in members if member.node.returncode is not None]
    tally.violations += [f"node {one.host.address} ended by itself with {one.node.returncode}" for one in ended]
    if ended:
        return {}
    for member in members:
        name = f"host {member.host.address}"
        expect_nothing(tally, name, engine_holds(member.engine))
        try:
            until(member.uses_cluster, "it uses the cluster", RETURN_SECONDS)
        except AssertionError:
            tally.violations.append(f"{name} does not use the cluster again: {member.tier()['reason']}")
        expect_nothing(tally, name, pool_holds(member.node))
        agents = len(member.agents())
        tally.leftovers(name, {f"agents above {MOST_AGENTS}": max(agents - MOST_AGENTS, 0)})
    shared, in_vain = _load_from_each_other(tally, members, reference, options)
    for one in in_vain:
        say(one)
    figures = _look_at_cluster(tally, members, masters)
    metrics = [member.engine.metrics() for member in members]
    return {
        **figures,
        "hosts_that_load_from_another_again": shared,
        "prompts_computed_before_that": len(in_vain),
        "tokens_from_pools": int(sum(member.tokens_before + member.tokens_from_pool() for member in members)),
        "preemptions": int(sum(each["vllm:num_preemptions_total"] for each in metrics)),
        "prompt_tokens": int(sum(each["vllm:prompt_tokens_total"] for each in metrics)),
    }


def _load_from_each_other(
    tally: Tally, members: Sequence[Member], reference: Reference, options: Any
) -> tuple[int, list[str]]:
    """Have each host load what the one before it stored just now; how many did, and what the others said meanwhile.

    A host that measured how slow a broken cluster was computes, until that is forgotten or tried out again.
    """
    done, misses = 0, list[str]()
    for number, (stores, loads) in enumerate(zip(members, (*members[1:], members[0]), strict=True)):
        ends = time.monotonic() + RETURN_SECONDS
        for attempt in itertools.count():
            tokens = tuple(Random(f"{options.seed} {number} {attempt}").choices(range(300, 1000), k=TOKENS))
            job = Job("repeat", number, tokens, 8)
            hits, before = loads.tokens_from_pool(), [one.node.figures() for one in (stores, loads)]
            try:
                expected = reference.ask(job).result()
                answers = [complete(stores.engine, job, options.deadline)]
                # The engine saves after its answer, so an empty queue may be one to which nothing came yet.
                settled = partial(stores.has_written, int(before[0]["tiers"][0]["pages_written"]) + PAGES)
                with suppress(AssertionError):  # what it has instead is told below
                    until(settled, "all was written", WRITTEN_SECONDS)
                answers.append(complete(loads.engine, job, options.deadline))
            except (OSError, ValueError) as error:
                tally.fail(job, str(error))
                break
            hits, after = loads.tokens_from_pool() - hits, [one.node.figures() for one in (stores, loads)]
            if any(answer != expected for answer in answers):
                tally.violations.append(f"host {loads.host.address}: another text than without a pool, when mended")
            if hits:
                done += 1
                break
            stored, loaded = (said_of(was, now) for was, now in zip(before, after, strict=True))
            misses.append(f"host {loads.host.address} {loaded}; {stores.host.address}, which stored it, {stored}")
            if time.monotonic() > ends:
                tally.violations.append(f"for {RETURN_SECONDS:.0f} s: {misses[-1]}")
                break
    return done, misses


def said_of(before: dict[str, Any], after: dict[str, Any]) -> str:
    """What a node counted between the two: why it missed, what it and its tier did, and whether that works."""
    was, tier = before["tiers"][0], after["tiers"][0]
    tables = ((before["misses"], after["misses"]), (before["counters"], after["counters"]), (was, tier))
    moved = [
        {name: more for name, many in new.items() if type(many) is int and (more := many - old.get(name, 0))}
        for old, new in tables
    ]
    missed, did, tier_did = moved
    return f"missed {missed}, did {did}, its tier {tier_did}, {after['clients']} clients, {tier['reason'] or 'well'}"


def _look_at_cluster(tally: Tally, members: Sequence[Member], masters: Masters) -> dict[str, Any]:
    """What the cluster holds, and whether all of it leaves when it is cleared."""
    full = masters.figures()
    lent = len(members) * (64 << 20)
    for what, most in (("master_total_capacity_bytes", lent), ("master_active_clients", len(members) * MOST_AGENTS)):

        def bounded(what: str = what, most: int = most) -> bool:
            return masters.figures()[what] <= most

        try:
            until(bounded, what, GONE_SECONDS)
        except AssertionError:
            tally.violations.append(f"cluster: {what} is {masters.figures()[what]:.0f}, expected at most {most}")
    for member in members:
        command = [sys.executable, "-m", "ems.cli", "clear", "--all", "--yes", "--socket", str(member.node.socket)]
        cleared = subprocess.run(command, env=dict(os.environ), check=False, capture_output=True, timeout=PIECE_SECONDS)
        if cleared.returncode:
            tally.violations.append(f"clear on {member.host.address}: {cleared.stderr.decode(errors='replace')}")
    marks = len(members)  # each host has a small object in what it lends
    most_left = {"master_key_count": 2 * marks, "master_allocated_bytes": marks * MARK_BYTES}

    def left() -> dict[str, float]:
        return {name: max(masters.figures()[name] - most, 0) for name, most in most_left.items()}

    expect_nothing(tally, "cleared cluster", left)
    files = [path for member in members for path in member.node.directory.rglob("*")]
    return {
        "cluster_objects_before_clear": int(full["master_key_count"]),
        "cluster_bytes_before_clear": int(full["master_allocated_bytes"]),
        "cluster_objects_evicted": int(full["master_evicted_key_count_total"]),
        "bytes_of_pool_files": sum(path.stat().st_size for path in files if path.is_file()),
    }


if __name__ == "__main__":
    sys.exit(main())
