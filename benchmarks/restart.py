#!/usr/bin/env python3
"""How long a node with many pages is away when it is killed and started again, and when it is upgraded.

    python benchmarks/restart.py [PAGES]

Stores small pages over a real socket, kills the node with SIGKILL, starts it again in the same folder, and looks that
every page is there; the same after a stop.  Then upgrades it while a client looks up in a loop: its longest call is
what engines feel.  Prints one line of JSON with all of them; fails when a start takes longer than 3 s, or the longest
call longer than that.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import subprocess
import sys
import threading
import time

from ems.pool.client.answers import Namespace
from ems.pool.client.pool_client import PoolClient
from ems.pool.client.retry import MAX_RETRY_SECONDS
from ems.pool.keys import NO_PARENT
from tests.kit.node import NodeProcess

PAGE = 4096
BATCH = 2048
BOUND_SECONDS = 3.0
UPGRADES = 3
"""In a row, the shortest pause of which counts: this machine may have other things to do."""


def keys_of(first: int, count: int) -> list[bytes]:
    return [hashlib.sha256(b"%d" % number).digest()[:16] for number in range(first, first + count)]


def fill(client: PoolClient, namespace: Namespace, pages: int) -> None:
    for first in range(0, pages, BATCH):
        keys = keys_of(first, min(BATCH, pages - first))
        reserved = client.reserve(namespace, keys_of(first - 1, 1)[0] if first else NO_PARENT, keys)
        assert len(reserved.granted) == len(keys), "the pool has no room"
        client.commit(reserved)


def present(client: PoolClient, namespace: Namespace, pages: int) -> int:
    return sum(
        client.lookup(namespace, b"".join(keys_of(first, min(BATCH, pages - first)))).count
        for first in range(0, pages, BATCH)
    )


def serve_again(node: NodeProcess, namespace: Namespace) -> tuple[float, PoolClient]:
    """Start a node that ended: seconds until a lookup was answered, and the client that looked up."""
    begin = time.perf_counter()
    node.start()
    client = node.client()
    client.connect(MAX_RETRY_SECONDS)
    assert client.lookup(namespace, keys_of(0, 1)[0]).count == 1
    return time.perf_counter() - begin, client


def longest_call(client: PoolClient, namespace: Namespace, stop: threading.Event) -> tuple[float, float]:
    """Seconds of the longest lookup until ``stop``, and of the one in the middle."""
    calls, key = [], keys_of(0, 1)[0]
    while not stop.is_set():
        begin = time.perf_counter()
        assert client.lookup(namespace, key, timeout=60.0).count == 1
        calls.append(time.perf_counter() - begin)
    return max(calls), statistics.median(calls)


def upgrade(node: NodeProcess, namespace: Namespace) -> tuple[float, float]:
    """Upgrade the node: seconds of the longest lookup meanwhile and of a usual one."""
    client, stop = node.client(), threading.Event()
    taken: list[tuple[float, float]] = []
    asking = threading.Thread(target=lambda: taken.append(longest_call(client, namespace, stop)))
    asking.start()
    subprocess.run([sys.executable, "-m", "ems.cli", "upgrade", "--socket", str(node.socket)], check=True)
    stop.set()
    asking.join()
    client.close()
    return taken[0]


def main() -> int:
    pages = int(sys.argv[1]) if len(sys.argv) > 1 else 200_000
    size = pages * (PAGE + 64) * 11 // 10 + (64 << 20)
    namespace = Namespace("bench/restart", PAGE)
    with NodeProcess("--size", str(size), "--high-watermark", "1.0", "--http-port", "0") as node:
        node.wait_touched()
        client = node.client()
        fill(client, namespace, pages)
        client.close()
        node.kill()
        seconds, again = serve_again(node, namespace)
        again.close()
        node.stop()
        after_stop, again = serve_again(node, namespace)
        back = present(again, namespace, pages)
        again.close()
        pauses = [upgrade(node, namespace) for _ in range(UPGRADES)]
        last = node.client()
        back = min(back, present(last, namespace, pages))
        last.close()
    assert back == pages, f"{pages - back} pages are lost"
    longest, usual = min(pauses)
    figures = {
        "pages": pages,
        "pages_back": back,
        "seconds_to_serve": round(seconds, 3),
        "seconds_to_serve_after_stop": round(after_stop, 3),
        "longest_call_in_upgrade": round(longest, 3),
        "longest_calls": [round(pause[0], 3) for pause in pauses],
        "usual_call": round(usual, 6),
    }
    sys.stdout.write(json.dumps(figures) + "\n")
    return int(seconds > BOUND_SECONDS or longest > BOUND_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
