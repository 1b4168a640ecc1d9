#!/usr/bin/env python3
"""Two hosts: EMS over its cluster tier beside vLLM's own connector of Mooncake Store, on one master.

Network namespaces are the hosts, a third one has the master and asks.  Three steps: prompts go to an engine on the
first host (1), again after its own cache lost them (2), and to an engine on the second host (3).  Nodes copy what
another host used again before they are asked for it; demand: the same with nodes that fetch only what they are asked
for.  All rest for ``--rest`` seconds before step 3.  Cold: prompts that nobody has seen, one at a time and in waves, in
turns to an engine on the first host and to one without a pool there.  Connector: the same, and whole loops of twice as
many prompts as a wave, in one engine, whose connector is taken out and put in again between two requests, so that what
two engines differ by is not in the ratios.  Save: two engines whose node stores every page in the cluster as well, or
in its memory only.  Fetch: rounds of 128 MiB from the first host to the second, by the tier into the segments of a
node, and by Mooncake's ``batch_get_into``; and what it costs the first one's processor to store them.

    python benchmarks/cluster.py [--parts fetch,save,cold,connector,ems,demand,mooncake] [--help]

``cold`` and ``connector`` are of those of the last three that are named beside it, or of all.

Needs root, for the namespaces.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import dataclasses
import json
import mmap
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack, closing
from ctypes import addressof, c_char
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

import aiohttp
import msgspec
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.comparison.__main__ import options
from benchmarks.comparison.pairs import compare
from benchmarks.comparison.procedure import QUIET_SECONDS, Bench, Pairs, Sizes, ThreeSteps, in_three_steps
from benchmarks.comparison.usage import cpu_seconds
from ems.bench.completions import Completion, CompletionClient
from ems.cli.acts import ask
from ems.pool.client.answers import Namespace
from ems.pool.client.pool_client import PoolClient
from ems.pool.keys import NO_PARENT
from ems.pool.protocol.acts import Clear
from ems.tables import Table
from tests.kit.engine import SERVED_MODEL, VllmServer
from tests.kit.hosts import Host, Hosts
from tests.kit.mooncake import MooncakeMaster
from tests.kit.node import NodeProcess
from tests.kit.process import free_port
from tests.kit.tiers import key
from tests.kit.tiny_model import SHAPES, Size, make_model
from tests.kit.waiting import until

AGENT = "ems.pool.tiers.cluster.agent"
CHECKOUT = Path(__file__).resolve().parents[1]
ROUND_BYTES = 128 << 20
READER_BYTES = 1 << 30
"""Memory of the node that fetches."""
WARM_UPS = READER_BYTES // ROUND_BYTES
"""Rounds until each place in it was fetched into once, which takes longer; they do not count."""
ROUNDS = WARM_UPS + 6
LOOK_SECONDS = 0.002
"""Between two lookups of the last page that is fetched, near the end: each takes the core that moves pages."""
LOOK_AFTER = 0.8
"""Of the shortest round so far nobody looks for so long."""
TOUCHED_SECONDS, TOUCHED_SHARE = 1.0, 0.1
"""Agents that take less of a core for so long touch nothing any more."""
STORE_SECONDS = 0.05
"""Between two looks whether all is stored, which take the processor as well."""
CHUNK = 256
"""Tokens of a page."""
SECONDS = 600.0
ON_DEMAND = "copy_ahead=never"
COLUMNS = ("ems", "demand", "mooncake")
PARTS = ("fetch", "save", "cold", "connector", *COLUMNS)
LOAD_FAILURE = {"kv_role": "kv_both", "kv_load_failure_policy": "recompute"}


def say(text: str) -> None:
    sys.stderr.write(f"{text}\n")


class Scene:
    """Two hosts, a third one with a master, a folder for logs."""

    def __init__(
        self, folder: Path, stack: ExitStack, memory: int, model: Size, page_bytes: int, *, local_first: bool
    ) -> None:
        self.folder = folder
        self.model = model
        self.page_bytes = page_bytes
        self.stack = stack
        self.memory = memory
        self.without: Path | None = None
        """The file that takes the connector out of engines, where they can be without."""
        self.first, self.second, self.third = stack.enter_context(Hosts(3)).hosts
        flags = ["--allocation_strategy=local_first"] * local_first
        with self.third.entered():
            self.master = stack.enter_context(MooncakeMaster(folder, *flags, address=self.third.address))
        self.settings = folder / "mooncake.json"
        self.settings.write_text(
            json.dumps(
                {
                    "metadata_server": "P2PHANDSHAKE",
                    "protocol": "tcp",
                    "device_name": "",
                    "master_server_address": self.master.endpoint,
                    "global_segment_size": memory,
                    "local_buffer_size": "512MB",
                }
            )
        )

    def node(self, host: Host, stack: ExitStack, size: int = 0, how: str | None = "") -> NodeProcess:
        """One with the cluster as a tier with the settings ``how``, or without one where that is None."""
        tier = () if how is None else ("--tier", f"mooncake:{self.settings}?{how}")
        node = NodeProcess("--size", str(size or self.memory), *tier)
        with host.entered():
            stack.enter_context(node)
        node.wait_touched()
        return node

    def lent(self) -> float:
        """Bytes that all hosts lend now."""
        with self.third.entered():
            return self.master.metrics()["master_total_capacity_bytes"]

    def wait_touched(self) -> None:
        """Until the agents, where there are any, lend all that they are to lend and have touched it."""
        agents = [one for host in (self.first, self.second) for one in host.processes() if AGENT in one.cmdline()]
        lent = self.memory * len({one.ppid() for one in agents})

        def done() -> bool:
            all_lent, before = self.lent() >= lent, cpu_seconds(agents)
            time.sleep(TOUCHED_SECONDS)
            return all_lent and cpu_seconds(agents) - before < TOUCHED_SHARE * TOUCHED_SECONDS

        until(done, "all that is lent is touched", SECONDS)

    def wait_forgotten(self) -> None:
        until(lambda: not self.lent(), "the master has forgotten what others lent", SECONDS)

    def engine(
        self, host: Host, name: str, sizes: Sizes, config: dict[str, object] | None, environment: dict[str, str]
    ) -> VllmServer:
        environment = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_HOST_IP": host.address, **environment}
        if self.without is not None:
            environment |= {
                "EMS_BENCH_WITHOUT": str(self.without),
                "PYTHONPATH": os.pathsep.join(filter(None, [str(CHECKOUT), os.environ.get("PYTHONPATH")])),
                "VLLM_USE_V2_MODEL_RUNNER": "0",  # the other one keeps its connector elsewhere
            }
        return VllmServer(
            make_model(self.folder / "model", self.model),
            log=self.folder / f"{name}.log",
            kv_transfer_config=config,
            options=options(sizes),
            environment=environment,
            module=None if self.without is None else "benchmarks.comparison.switched",
            address=host.address,
        )


# ------------------------------------------------------------------------------------------------------------- engines


def ems_engine(scene: Scene, host: Host, name: str, sizes: Sizes, stack: ExitStack, how: str | None = "") -> VllmServer:
    node = scene.node(host, stack, how=how)
    environment = {"EMS_SOCKET": str(node.socket), "EMS_DIR": str(node.directory), "EMS_AUTOSTART": "0"}
    return scene.engine(host, name, sizes, {"kv_connector": "EmsStoreConnector", **LOAD_FAILURE}, environment)


def mooncake_engine(scene: Scene, host: Host, name: str, sizes: Sizes, _stack: ExitStack) -> VllmServer:
    extra = {"lookup_rpc_port": free_port()}
    config: dict[str, object] = {
        "kv_connector": "MooncakeStoreConnector",
        **LOAD_FAILURE,
        "kv_connector_extra_config": extra,
    }
    environment = {"MOONCAKE_CONFIG_PATH": str(scene.settings), "MC_FORCE_TCP": "1"}
    return scene.engine(host, name, sizes, config, environment)


Make = Callable[[Scene, Host, str, Sizes, ExitStack], VllmServer]
MAKE: dict[str, Make] = {"ems": ems_engine, "demand": partial(ems_engine, how=ON_DEMAND), "mooncake": mooncake_engine}


Rounds = list[list[ThreeSteps]]
"""The three steps for each prompt length, round by round."""


def examine(scene: Scene, part: str, sizes: Sizes, rounds: int) -> Rounds:
    with ExitStack() as stack:
        first, second = (
            MAKE[part](scene, host, f"{part}-{name}", sizes, stack)
            for host, name in ((scene.first, "first"), (scene.second, "second"))
        )
        for host, engine in ((scene.first, first), (scene.second, second)):
            stack.callback(engine.stop)
            with host.entered():
                engine.start()
        with scene.third.entered():
            for engine in (first, second):
                engine.wait_ready(SECONDS)
            scene.wait_touched()
            bench = Bench(first, second, first, list, True, sizes, lambda what: say(f"{part}: {what}"))
            steps = []
            for number in range(rounds):
                say(f"{part}, round {number + 1} of {rounds}")
                fresh = msgspec.structs.replace(sizes, seed=sizes.seed + number)
                steps.append(asyncio.run(in_three_steps(dataclasses.replace(bench, sizes=fresh)))[0])
            return steps


# ------------------------------------------------------------------------------------------------------- cold and save


def without_pool(scene: Scene, host: Host, name: str, sizes: Sizes, _stack: ExitStack) -> VllmServer:
    return scene.engine(host, name, sizes, None, {})


ByKind = dict[str, list[tuple[float, float]]]
"""Pairs of seconds for each kind of request."""


def in_lives(what: str, lives: int, measured: Callable[[int], ByKind]) -> dict[str, str]:
    """Ratios of what is ``measured`` in each life, with what encloses them.

    Two engines that were started alike differ by more than what is looked for, so each life is named by itself, too.
    """
    taken: dict[str, list[list[tuple[float, float]]]] = {}
    for life in range(lives):
        say(f"{what}, life {life + 1} of {lives}")
        for kind, pairs in measured(life).items():
            taken.setdefault(kind, []).append(pairs)
    told = {}
    for kind, by_life in taken.items():
        both = compare([pair for pairs in by_life for pair in pairs])
        lives_apart = [compare(pairs).ratio for pairs in by_life]
        spread = f"{both.ratio:.3f} ({both.ratio_low:.3f}-{both.ratio_high:.3f})"
        say(f"{what}, {kind}: {both.base * 1e3:.0f} and {both.other * 1e3:.0f} ms")
        told[kind] = f"{spread}, lives {min(lives_apart):.2f}-{max(lives_apart):.2f}"
        say(f"{what}, {kind}: {told[kind]}")
    return told


def cold(scene: Scene, what: str, pair: tuple[Make, Make], sizes: Sizes, lives: int) -> dict[str, str]:
    """Cold prompts to the second of a pair of engines, to those to the first."""
    return in_lives(what, lives, lambda life: _cold(scene, what, pair, sizes, life))


def _cold(scene: Scene, what: str, pair: tuple[Make, Make], sizes: Sizes, life: int) -> ByKind:
    scene.wait_forgotten()
    with ExitStack() as stack:
        base, other = (
            make(scene, scene.first, f"{what}-{name}-{life}", sizes, stack)
            for make, name in zip(pair, ("base", "other"), strict=True)
        )
        # Who starts later may get worse memory for as long as it lives.
        for engine in (base, other) if life % 2 else (other, base):
            stack.callback(engine.stop)
            with scene.first.entered():
                engine.start()
            with scene.third.entered():
                engine.wait_ready(SECONDS)
        scene.wait_touched()
        with scene.third.entered():
            bench = Bench(other, None, base, list, True, sizes, lambda step: say(f"{what}: {step}"))
            return asyncio.run(_by_turns(bench))


async def _by_turns(bench: Bench) -> ByKind:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=SECONDS)) as session:
        return await one_and_many(Pairs(bench, session), bench.sizes)


class Switched(CompletionClient):
    """Asks an engine that is ``connected``, or is so no more while the file ``without`` is there."""

    def __init__(self, session: aiohttp.ClientSession, url: str, without: Path, *, connected: bool) -> None:
        super().__init__(session, url)
        self._without = without
        self._connected = connected

    async def complete(self, model: str, prompt: Sequence[int], max_tokens: int) -> Completion:
        if self._connected:
            self._without.unlink(missing_ok=True)
        else:
            self._without.touch()
        return await super().complete(model, prompt, max_tokens)


class SwitchedPairs(Pairs):
    """The pairs of one engine, with its connector and without."""

    def __init__(self, bench: Bench, session: aiohttp.ClientSession, without: Path) -> None:
        super().__init__(bench, session)
        self._client = Switched(session, bench.first.url, without, connected=True)
        self._base = Switched(session, bench.first.url, without, connected=False)

    async def loops(self) -> list[tuple[float, float]]:
        """Of twice as many cold requests as are under way at the same time, until the last one is answered."""
        self._tell("loops of cold requests by turns")

        def loop(client: CompletionClient) -> Callable[[], Awaitable[float]]:
            async def timed() -> float:
                prompts = [self._prompt(self._sizes.cold_tokens) for _ in range(2 * self._sizes.concurrency)]
                lanes = asyncio.Semaphore(self._sizes.concurrency)

                async def answered(prompt: list[int]) -> None:
                    async with lanes:
                        await client.complete(SERVED_MODEL, prompt, self._sizes.output_tokens)

                began = time.perf_counter()
                await asyncio.gather(*map(answered, prompts))
                took = time.perf_counter() - began
                await asyncio.sleep(QUIET_SECONDS)
                return took

            return timed

        return await self._in_turns(loop(self._base), loop(self._client), count=self._sizes.waves)

    async def check(self, objects: Callable[[], float]) -> None:
        """See that the connector comes and goes, by how many ``objects`` the cluster has."""
        for client in (self._client, self._base, self._client):
            before = objects()
            await self._ask(client, self._prompt(self._sizes.cold_tokens), 4)
            await asyncio.sleep(QUIET_SECONDS)
            if (objects() > before) != (client is self._client):
                raise SystemExit("this release of vLLM does not let go of its connector, leave the part connector out")


def connector(scene: Scene, part: str, sizes: Sizes, lives: int) -> dict[str, str]:
    """Cold prompts to an engine, to those to itself without its connector."""
    switchable = copy.copy(scene)
    switchable.without = without = scene.folder / "without"

    async def measured(bench: Bench) -> ByKind:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=SECONDS)) as session:
            pairs = SwitchedPairs(bench, session, without)
            await pairs.check(lambda: scene.master.metrics()["master_key_count"])
            loops = f"loop of {2 * sizes.concurrency} cold requests, whole"
            return {**await one_and_many(pairs, sizes), loops: await pairs.loops()}

    def alive(life: int) -> ByKind:
        scene.wait_forgotten()
        without.unlink(missing_ok=True)
        with ExitStack() as stack:
            engine = MAKE[part](switchable, scene.first, f"{part}-connector-{life}", sizes, stack)
            stack.callback(engine.stop)
            with scene.first.entered():
                engine.start()
            with scene.third.entered():
                engine.wait_ready(SECONDS)
                scene.wait_touched()
                bench = Bench(engine, None, engine, list, True, sizes, lambda step: say(f"{part}-connector: {step}"))
                return asyncio.run(measured(bench))

    return in_lives(f"{part}-connector", lives, alive)


async def one_and_many(pairs: Pairs, sizes: Sizes) -> ByKind:
    return {
        "cold request, TTFT": await pairs.cold(),
        f"wave of {sizes.concurrency} cold requests, TTFT": await pairs.waves(),
    }


# --------------------------------------------------------------------------------------------------------------- fetch


class Moved(NamedTuple):
    """Seconds, round by round."""

    stores: list[float]
    """Of the processor, on the first host, to store a round, in memory that was touched before."""
    fetches: list[float]
    """To fetch it to the second one."""


def moved_by_tier(scene: Scene) -> Moved:
    """To fetch: from the first lookup until all pages are there."""
    namespace = Namespace("bench/cluster/pages", scene.page_bytes)
    scene.wait_forgotten()
    with ExitStack() as stack:
        first = scene.node(scene.first, stack, how=ON_DEMAND)
        second = scene.node(scene.second, stack, READER_BYTES, ON_DEMAND)
        # Memory is lent part by part: what finds no room with the first host would go to the second one.
        lent = 2 * scene.memory
        until(lambda: scene.lent() >= lent, "the hosts lend memory", SECONDS)
        writer, reader = (stack.enter_context(closing(node.client())) for node in (first, second))
        asked = stack.enter_context(closing(PoolClient(first.socket, "benchmark", administers=True)))
        node = psutil.Process(first.pid)
        rounds = [
            [key(f"{number}/{page}") for page in range(ROUND_BYTES // scene.page_bytes)] for number in range(ROUNDS)
        ]

        def stored(space: Namespace, keys: list[bytes]) -> float:
            before, written = cpu_seconds([node, *node.children()]), first.figures()["tiers"][0]["pages_written"]
            save(writer, space, keys)
            while asked.stats()["tiers"][0]["pages_written"] < written + len(keys):  # type: ignore[index]
                time.sleep(STORE_SECONDS)
            return cpu_seconds([node, *node.children()]) - before

        touched = Namespace("bench/touched/pages", scene.page_bytes)
        for keys in rounds:
            stored(touched, keys)
        ask(first.socket, Clear(namespace=touched.name))
        stores: list[float] = []
        fetches: list[float] = []
        for keys in rounds:
            stores.append(stored(namespace, keys))
            began = time.perf_counter()
            names = b"".join(keys)
            if reader.lookup(namespace, names).count < len(keys):
                time.sleep(LOOK_AFTER * min(fetches, default=0.0))
                while not reader.lookup(namespace, keys[-1]).count or reader.lookup(namespace, names).count < len(keys):
                    time.sleep(LOOK_SECONDS)
            fetches.append(time.perf_counter() - began)
        return Moved(stores[WARM_UPS:], fetches[WARM_UPS:])


def save(client: PoolClient, namespace: Namespace, keys: list[bytes]) -> None:
    reservation = client.reserve(namespace, NO_PARENT, keys)
    segments = client.segments(reservation.epoch)
    for ref in reservation.granted.values():
        segments.page(ref, namespace.page_size)[:] = os.urandom(namespace.page_size)
    client.commit(reservation)


def moved_by_mooncake(scene: Scene, page_bytes: int, pages: int) -> Moved:
    """By one call each for all pages of the round."""
    scene.wait_forgotten()
    with ExitStack() as stack:
        keeper, taker = (
            stack.enter_context(side(scene, host, name, page_bytes, pages))
            for host, name in ((scene.first, "keep"), (scene.second, "take"))
        )
        assert keeper.stdout is not None
        assert taker.stdin is not None
        stores = keeper.stdout.readline()
        fetches, _ = taker.communicate("go\n", timeout=SECONDS)
        keeper.communicate("over\n", timeout=SECONDS)
        return Moved(json.loads(stores)[WARM_UPS:], json.loads(fetches)[WARM_UPS:])


def own_calls(scene: Scene, tokens: int) -> float:
    """Seconds of Mooncake's own call for the pages that a prompt of the scene's model has."""
    shape = SHAPES[scene.model]
    # A page has the keys and values of one head, 2 bytes a number, for all layers.
    page_bytes = CHUNK * shape.layers * 2 * shape.head_dim * 2
    return median(moved_by_mooncake(scene, page_bytes, -(-tokens // CHUNK) * shape.kv_heads).fetches)


def side(scene: Scene, host: Host, name: str, page_bytes: int, pages: int) -> subprocess.Popen[str]:
    numbers = (str(scene.memory), str(page_bytes), str(pages))
    command = [sys.executable, __file__, "--side", name, host.address, scene.master.endpoint, *numbers]
    with host.entered():
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )


def be_side(name: str, address: str, master: str, memory: str, page_bytes: str, pages: str) -> int:
    """What a process on one of the hosts does with Mooncake's own client."""
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    keeps = name == "keep"
    code = store.setup(address, "P2PHANDSHAKE", int(memory) if keeps else 0, 16 << 20, "tcp", "", master)
    assert code == 0, f"Mooncake's client does not start: {code}"
    page, total = int(page_bytes), int(page_bytes) * int(pages)
    mapped = mmap.mmap(-1, total)
    start = addressof((c_char * total).from_buffer(mapped))
    assert store.register_buffer(start, total) == 0
    addresses = [*range(start, start + total, page)]
    sizes = [page] * len(addresses)
    seconds = []
    if keeps:
        for number in range(ROUNDS):
            assert not any(store.batch_put_from([f"touch-{number}-{at}" for at in addresses], addresses, sizes))
        assert store.remove_by_regex("^touch-.*", force=True) == ROUNDS * len(addresses)
    else:
        sys.stdin.readline()
    for number in range(ROUNDS):
        names = [f"bench-{number}-{at}" for at in range(len(addresses))]
        if keeps:
            mapped[:] = os.urandom(total)
            began = time.process_time()
            assert not any(store.batch_put_from(names, addresses, sizes))
            seconds.append(time.process_time() - began)
            continue
        began = time.perf_counter()
        assert store.batch_get_into(names, addresses, sizes) == sizes
        seconds.append(time.perf_counter() - began)
    sys.stdout.write(json.dumps(seconds) + "\n")
    sys.stdout.flush()
    if keeps:
        sys.stdin.readline()
    os._exit(0)


# -------------------------------------------------------------------------------------------------------------- report


def report(
    found: dict[str, Rounds],
    moved: dict[str, Moved],
    own: dict[int, float],
    colds: dict[str, dict[str, str]],
    connectors: dict[str, dict[str, str]],
    saves: dict[str, str],
) -> Table:
    rows: list[list[str]] = []
    for index, three in enumerate(next(iter(found.values()))[0] if found else []):
        tokens = f"{three.input_tokens:,} tokens"
        steps = [
            {part: [one[index].steps[step].ttft.mean * 1e3 for one in rounds] for part, rounds in found.items()}
            for step in range(3)
        ]
        for step, means in enumerate(steps, start=1):
            rows.append([f"{tokens}, TTFT{step}, mean ms", *cells(means, "{:.0f}", "ems")])
        texts = [over(steps[2][part], steps[1][part]) if part in found else "-" for part in COLUMNS]
        rows.append([f"{tokens}, TTFT3 / TTFT2", *texts, "", ""])
        if "demand" in found and three.input_tokens in own:
            more = {
                "demand": [fmean(steps[2]["demand"]) - fmean(steps[1]["demand"])],
                "mooncake": [own[three.input_tokens] * 1e3],
            }
            rows.append([f"{tokens}, TTFT3 - TTFT2; own call, ms", *cells(more, "{:.1f}", "ems")])
    for told, beside in ((colds, "to no pool's"), (connectors, "to its own without the connector")):
        for kind in next(iter(told.values()), {}):
            ratios = [told[part][kind] if part in told else "-" for part in COLUMNS]
            rows += [[f"{kind}, {beside}", *ratios, "", ""]]
    for what, ratio in saves.items():
        rows.append([f"{what}, saved in the cluster / in memory", ratio, *[""] * 4])
    if moved:
        fetches = {part: [ROUND_BYTES / median(one.fetches) / 1e6] for part, one in moved.items()}
        rows.append(["fetch from the other host, MB/s", *cells(fetches, "{:.0f}", "mooncake")])
        stores = {part: [median(one.stores) / ROUND_BYTES * 1e9] for part, one in moved.items()}
        rows.append(["store, processor seconds for 1 GB", *cells(stores, "{:.2f}", "ems")])
    remark = (
        "Ratio: Mooncake's time to that of EMS; rate of the tier to that of batch_get_into. "
        "Own call: batch_get_into for the pages of one prompt, on hosts with nothing else to do."
    )
    return Table(["", "EMS", "on demand", "Mooncake", "ratio", "ratio on demand"], rows, remark=remark)


def cells(values: dict[str, list[float]], form: str, below: str) -> list[str]:
    """The mean of each, and Mooncake's beside each of the others; ``below`` says which of the two is below the line."""
    texts = [form.format(fmean(values[part])) if part in values else "-" for part in COLUMNS]
    if not below or "mooncake" not in values:
        return [*texts, "", ""]
    own = values["mooncake"]
    pairs = {part: (own, values[part]) if below == "ems" else (values[part], own) for part in values}
    return [*texts, *(over(*pairs[part]) if part in pairs else "" for part in COLUMNS[:2])]


def over(above: list[float], below: list[float]) -> str:
    """The ratio of two means, with the least and the largest one of a round where there are several."""
    text = f"{fmean(above) / fmean(below):.2f}"
    apart = [one / other for one, other in zip(above, below, strict=True)]
    return f"{text} ({min(apart):.2f}-{max(apart):.2f})" if len(apart) > 1 else text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help=f"what is measured, default {','.join(PARTS)}")
    parser.add_argument("--requests", type=int, default=40, help="prompts of a set in the three steps")
    parser.add_argument(
        "--tokens",
        type=lambda text: tuple(int(one) for one in text.split(",")),
        default=(1024, 1100),
        help="lengths of prompts in the three steps, default 1024,1100",
    )
    parser.add_argument(
        "--local-first",
        action="store_true",
        help="the master places what says nothing of its place on the own host, as EMS does; by default anywhere",
    )
    parser.add_argument("--concurrency", type=int, default=10, help="requests under way at the same time there")
    parser.add_argument("--rounds", type=int, default=1, help="times that the three steps are gone, with fresh prompts")
    parser.add_argument("--rest", type=float, default=5.0, help="seconds before the third step, default 5")
    parser.add_argument("--pairs", type=int, default=20, help="pairs of cold requests")
    parser.add_argument("--waves", type=int, default=12, help="pairs of waves of cold requests")
    parser.add_argument("--lives", type=int, default=2, help="starts of both engines for cold requests, default 2")
    parser.add_argument(
        "--model",
        choices=("demo", "half-billion"),
        default="demo",
        help="which computes: one of 80 M parameters, or one with the dimensions of Qwen2.5-0.5B, default demo",
    )
    parser.add_argument(
        "--memory-gib", type=int, default=3, help="of each node's pool, and what each host gives; a fetch needs 2"
    )
    parser.add_argument(
        "--page-mib",
        type=int,
        choices=(1, 2, 4, 8, 16, 32),
        default=4,
        help="size of the pages of the plain fetch, default 4: 256 tokens of 16 KiB",
    )
    parser.add_argument("--side", nargs=6, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.side:
        return be_side(*given.side)
    parts = given.parts.split(",")
    if not set(parts) <= set(PARTS):
        parser.error(f"--parts is {given.parts}, expected some of {', '.join(PARTS)} separated by commas")
    least = {
        "--memory-gib": 2 if "fetch" in parts else 1,
        "--requests": 1,
        "--concurrency": 1,
        "--rounds": 1,
        "--pairs": 1,
        "--waves": 1,
        "--lives": 1,
    }
    for flag, number in least.items():
        value = getattr(given, flag[2:].replace("-", "_"))
        if value < number:
            parser.error(f"{flag} is {value}, expected at least {number}")
    if os.geteuid():
        parser.error("network namespaces take root, start it with sudo")
    sizes = Sizes(
        requests=given.requests,
        concurrency=given.concurrency,
        pairs=given.pairs,
        waves=given.waves,
        rest=given.rest,
        inputs=given.tokens,
        prefix_tokens=1024,
        new_tokens=0,
    )
    found: dict[str, Rounds] = {}
    moved: dict[str, Moved] = {}
    with tempfile.TemporaryDirectory(prefix="ems-cluster-") as folder, ExitStack() as stack:
        memory, page, first = given.memory_gib << 30, given.page_mib << 20, given.local_first
        scene = Scene(Path(folder), stack, memory, given.model, page, local_first=first)
        if "fetch" in parts:
            pages = ROUND_BYTES // scene.page_bytes
            moved = {"mooncake": moved_by_mooncake(scene, scene.page_bytes, pages), "ems": moved_by_tier(scene)}
            for part, one in moved.items():
                say(f"{part}: fetched at {', '.join(f'{ROUND_BYTES / each / 1e6:.0f}' for each in one.fetches)} MB/s")
        saved = partial(ems_engine, how=None), ems_engine
        saves = cold(scene, "save", saved, sizes, given.lives) if "save" in parts else {}
        named = [part for part in COLUMNS if part in parts] or COLUMNS
        colds = {
            part: cold(scene, f"{part}-cold", (without_pool, MAKE[part]), sizes, given.lives)
            for part in (named if "cold" in parts else ())
        }
        connectors = {
            part: connector(scene, part, sizes, given.lives) for part in (named if "connector" in parts else ())
        }
        own = {tokens: own_calls(scene, tokens) for tokens in sizes.inputs} if "demand" in parts else {}
        for part in COLUMNS:
            if part in parts:
                found[part] = examine(scene, part, sizes, given.rounds)
    sys.stdout.write("\n".join(report(found, moved, own, colds, connectors, saves).lines(None)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
