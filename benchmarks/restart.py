#!/usr/bin/env python3
"""How long a node with many pages is away when it is killed and started again, and when it hands over.

    python benchmarks/restart.py [PAGES]

Stores small pages over a real socket, kills the node with SIGKILL, starts it again in the same folder, and looks that
every page is there; the same after a stop, which leaves what the policy has learned.  Then swaps its process while a
client looks up in a loop: its longest call is what engines feel.  Prints one line of JSON with all of them and what the
pause is of a restart; fails when a restart takes longer than 3 s, or the longest call longer than 0.3 s.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import statistics
import sys
import tempfile
import threading
import time

from ems.pool.client.answers import Namespace
from ems.pool.client.pool_client import PoolClient
from ems.pool.client.retry import MAX_RETRY_SECONDS
from ems.pool.keys import NO_PARENT
from ems.pool.node.launcher import start_successor
from ems.testing.node import NodeProcess

PAGE = 4096
BATCH = 2048
BOUND_SECONDS = 3.0
PAUSE_BOUND_SECONDS = 0.3
SWAPS = 3
"""Hand-overs in a row, the shortest pause of which counts: this machine may have other things to do."""


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


def hand_over(node: NodeProcess, namespace: Namespace) -> tuple[int, float, float]:
    """Swap the node's process: the new one, and seconds of the longest lookup meanwhile and of a usual one."""
    client, stop = node.client(), threading.Event()
    taken: list[tuple[float, float]] = []
    asking = threading.Thread(target=lambda: taken.append(longest_call(client, namespace, stop)))
    asking.start()
    with tempfile.TemporaryFile() as log:
        pid = start_successor(node.socket, log)
    stop.set()
    asking.join()
    assert client.epoch == 1, "the connection was lost"
    client.close()
    return (pid, *taken[0])


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
        swaps = [hand_over(node, namespace) for _ in range(SWAPS)]
        last = node.client()
        back = min(back, present(last, namespace, pages))
        last.close()
        os.kill(swaps[-1][0], signal.SIGTERM)
    assert back == pages, f"{pages - back} pages are lost"
    _, longest, usual = min(swaps, key=lambda swap: swap[1])
    figures = {
        "pages": pages,
        "pages_back": back,
        "seconds_to_serve": round(seconds, 3),
        "seconds_to_serve_after_stop": round(after_stop, 3),
        "longest_call_in_hand_over": round(longest, 3),
        "of_restart": round(longest / seconds, 3),
        "longest_calls": [round(swap[1], 3) for swap in swaps],
        "usual_call": round(usual, 6),
    }
    sys.stdout.write(json.dumps(figures) + "\n")
    return int(seconds > BOUND_SECONDS or longest > PAUSE_BOUND_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
