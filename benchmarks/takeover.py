#!/usr/bin/env python3
"""How long a cluster is away when its master is killed under load, with a standby and without.

Network namespaces are two hosts, each with a node, and a third one with Mooncake's masters and their etcd.  The first
host saves all the time, the second looks up what the first had saved before, each page once, so that every hit comes
from the other host.  In the middle of it the master that leads is killed.

    python benchmarks/takeover.py [--rounds 3] [--help]

Needs root, for the namespaces.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from statistics import median

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ems.errors import EmsError
from ems.pool.client.answers import Namespace
from ems.pool.client.pool_client import PoolClient
from ems.tables import Table
from tests.kit.hosts import Host, Hosts
from tests.kit.mooncake import Etcd, MooncakeMaster
from tests.kit.node import NodeProcess
from tests.kit.tiers import key
from tests.kit.waiting import until
from tests.pool.tiers.pages import look, save

PAGE = 64 << 10
NAMESPACE = Namespace("bench/takeover/pages", PAGE)
BEFORE = 800
"""Pages that are saved before the master is killed."""
TOGETHER = 2
"""Pages of one prompt."""
PAUSE = 0.1
"""Between two prompts."""
PATIENCE = 1.0
"""A prompt whose pages do not come in this time is computed."""
WARM_SECONDS = 3.0
MOST_SECONDS = 60.0


class Seen(msgspec.Struct):
    """What came of one round; times are seconds after the kill."""

    hit_before: float = MOST_SECONDS
    """Until the other host's pages from before the kill are found again, and go on being found."""
    hit_after: float = MOST_SECONDS
    """Until a page is found that was saved after it."""
    longest_lookup: float = 0.0
    longest_save: float = 0.0
    failed: int = 0
    prompts: int = 0


def timed(seen: Seen, call: Callable[[], object]) -> float:
    """How long ``call`` took, which must not fail."""
    began = time.perf_counter()
    try:
        call()
    except (EmsError, OSError) as error:
        sys.stderr.write(f"failed: {error}\n")
        seen.failed += 1
    return time.perf_counter() - began


def prompt(client: PoolClient, keys: list[bytes], seen: Seen) -> bool:
    """Whether all of ``keys`` came from the other host in time."""
    end = time.monotonic() + PATIENCE
    found = [0]

    def once() -> None:
        found[0] = look(client, NAMESPACE, keys).count

    while time.monotonic() < end:
        seen.longest_lookup = max(seen.longest_lookup, timed(seen, once))
        if found[0] == len(keys):
            return True
        time.sleep(0.02)  # bounded by the end
    return False


def sets(name: str) -> Iterator[list[bytes]]:
    for number in itertools.count():
        yield [key(f"{name}/{number}/{page}") for page in range(TOGETHER)]


def measure(standby: bool) -> Seen:
    seen = Seen()
    with tempfile.TemporaryDirectory(prefix="ems-takeover-") as name, ExitStack() as stack:
        folder = Path(name)
        first, second, third = stack.enter_context(Hosts(3)).hosts
        with third.entered():
            etcd = stack.enter_context(Etcd(folder, address=third.address)) if standby else None
            leader, *_ = [
                stack.enter_context(MooncakeMaster(folder, address=third.address, etcd=etcd, name=f"master-{number}"))
                for number in range(1 + standby)
            ]
        nodes = [node(host, folder, leader.endpoint, stack) for host in (first, second)]
        writer, reader = (stack.enter_context(closing(one.client())) for one in nodes)
        before, after = sets("before"), sets("after")
        for _ in range(BEFORE // TOGETHER):
            save(writer, NAMESPACE, next(before))
        until(lambda: nodes[0].figures()["tiers"][0]["pages_written"] >= BEFORE, "all is written", MOST_SECONDS)
        asked, over, killed = sets("before"), threading.Event(), threading.Event()
        with ThreadPoolExecutor(1) as threads:
            saving = threads.submit(save_all_the_time, writer, after, seen, over, killed)
            try:
                load(reader, asked, seen, leader, killed)
            finally:
                over.set()
            saving.result()
    return seen


def save_all_the_time(
    client: PoolClient, keys: Iterator[list[bytes]], seen: Seen, over: threading.Event, killed: threading.Event
) -> None:
    while not over.wait(PAUSE):
        if killed.is_set():
            seen.longest_save = max(seen.longest_save, timed(seen, lambda: save(client, NAMESPACE, next(keys))))


def load(
    client: PoolClient, asked: Iterator[list[bytes]], seen: Seen, leader: MooncakeMaster, killed: threading.Event
) -> None:
    begin = time.monotonic()
    while time.monotonic() < begin + WARM_SECONDS:
        assert prompt(client, next(asked), seen), "nothing comes from the other host before anything was killed"
        time.sleep(PAUSE)
    leader.kill()
    killed.set()
    death, later = time.monotonic(), sets("after")
    fresh = next(later)
    misses = 0
    while (now := time.monotonic() - death) < MOST_SECONDS:
        seen.prompts += 1
        if prompt(client, next(asked), seen):
            if seen.hit_before == MOST_SECONDS:
                seen.hit_before = now
        else:
            misses += 1
            seen.hit_before = MOST_SECONDS
        if seen.hit_after == MOST_SECONDS and prompt(client, fresh, seen):
            seen.hit_after = time.monotonic() - death
        if seen.hit_after < MOST_SECONDS and seen.hit_before < now - WARM_SECONDS:
            break
        time.sleep(PAUSE)
    sys.stderr.write(f"{seen}, {misses} prompts computed\n")


def node(host: Host, folder: Path, master: str, stack: ExitStack) -> NodeProcess:
    settings = folder / "mooncake.json"
    said = {"metadata_server": "P2PHANDSHAKE", "protocol": "tcp", "master_server_address": master}
    settings.write_text(json.dumps({**said, "global_segment_size": "256MB"}))
    made = NodeProcess("--size", "256MB", "--tier", f"mooncake:{settings}")
    with host.entered():
        stack.enter_context(made)
    made.wait_touched()
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="how often the master is killed, each time anew")
    parser.add_argument("--alone", action="store_true", help="without a standby: nothing comes back")
    given = parser.parse_args()
    rounds = [measure(not given.alone) for _ in range(given.rounds)]
    rows = [
        [what, *(f"{getattr(one, name):.1f}" for one in rounds), f"{median(getattr(one, name) for one in rounds):.1f}"]
        for what, name in (
            ("pages from before, found again after s", "hit_before"),
            ("pages saved since, found after s", "hit_after"),
            ("longest lookup, s", "longest_lookup"),
            ("longest save, s", "longest_save"),
            ("failed calls", "failed"),
        )
    ]
    header = ["", *(f"round {number + 1}" for number in range(len(rounds))), "median"]
    remark = f"{MOST_SECONDS:.0f}: not within that time."
    sys.stdout.write("\n".join(Table(header, rows, remark=remark).lines(None)) + "\n")
    return 1 if any(one.failed for one in rounds) else 0


if __name__ == "__main__":
    sys.exit(main())
