"""What the connector costs an engine, request by request in the very same engine: with it, without it, by turns.

    .venv/bin/python -m benchmarks.comparison.overhead [--help]

One engine with ``EmsStoreConnector``, which is taken out and put in again between two requests
(:mod:`benchmarks.comparison.switched`).  ``benchmarks/peers.py`` compares engines, which differ among themselves by
more than a percent; this tells what is less.

- cold: time to first token of prompts that nobody has seen.
- further tokens: mean time of each of the tokens behind such a prompt, which is stored meanwhile.
- own cache: time to first token of a long prefix that the engine's own prefix cache has, and a few new tokens.
- pool: the same after the engine forgot, against its own cache without the connector.

Prints a table or JSON, and whether the targets were met; fails where one was missed for certain.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import aiohttp
import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from benchmarks.comparison.pairs import Comparison, compare
from benchmarks.comparison.procedure import QUIET_SECONDS, empty_own_cache
from benchmarks.comparison.report import COLD, DECODE, WARM_SECONDS
from ems.bench.completions import Completion, CompletionClient
from ems.errors import EmsError
from tests.kit.engine import SERVED_MODEL, EngineOptions, VllmServer
from tests.kit.node import NodeProcess
from tests.kit.tiny_model import SHAPES, Size, make_model

CHECKOUT = Path(__file__).resolve().parent.parent.parent

WARM_UPS = 9
"""Hits of the pool before any counts: an engine touches its memory for the first time when it first writes there."""
START_SECONDS = 600.0


Counters = Callable[[], Mapping[str, int]]


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """How much is measured; prompts in tokens."""

    cold_pairs: int
    decode_pairs: int
    warm_pairs: int
    seed: int
    cold_tokens: int = 1024
    decode_prompt_tokens: int = 2048
    decode_tokens: int = 33
    prefix_tokens: int = 4096
    new_tokens: int = 16


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One comparison and its target: a ratio, or seconds above."""

    what: str
    found: Comparison
    most_ratio: float | None = None
    most_seconds: float | None = None

    def verdict(self) -> str:
        """Whether the target was met; open where it lies within what the pairs leave possible."""
        if self.most_ratio is not None:
            value, low, most = self.found.ratio, self.found.ratio_low, self.most_ratio
        elif self.most_seconds is not None:
            value, low, most = self.found.difference, self.found.difference_low, self.most_seconds
        else:
            return ""
        return "met" if value <= most else "open, more pairs" if low <= most else "MISSED"


class Measurement:
    """Requests to the one engine; ``without`` is the file that takes its connector out.

    ``counters`` are those of the node.
    """

    def __init__(
        self, session: aiohttp.ClientSession, url: str, without: Path, counters: Counters, sizes: Sizes
    ) -> None:
        self._session = session
        self._client = CompletionClient(session, url)
        self._without = without
        self._counters = counters
        self._sizes = sizes
        self._random = random.Random(sizes.seed)

    async def check(self) -> None:
        """See that the connector comes and goes, in scheduler and worker.

        Raises:
            EmsError: it does not, with this release of vLLM.
        """
        for connected in (True, False, True):
            before = self._counters()
            await self.cold(connected)
            after = self._counters()
            asked, stored = (after[name] - before[name] for name in ("lookups", "pages_committed"))
            if (asked > 0, stored > 0) != (connected, connected):
                raise EmsError(
                    f"a request {'with' if connected else 'without'} the connector asked the pool {asked} times and "
                    f"stored {stored} pages, so this release of vLLM cannot be measured like this"
                )

    async def cold(self, connected: bool) -> float:
        return (await self._ask(self._prompt(self._sizes.cold_tokens), 4, connected)).first_token

    async def further_token(self, connected: bool) -> float:
        count = self._sizes.decode_tokens
        answer = await self._ask(self._prompt(self._sizes.decode_prompt_tokens), count, connected)
        return (answer.whole - answer.first_token) / (count - 1)

    async def hit(self, prefix: list[int], connected: bool) -> float:
        return (await self._ask(prefix + self._prompt(self._sizes.new_tokens), 1, connected)).first_token

    async def pairs(self, what: str, count: int, timed: Callable[[bool], Awaitable[float]]) -> Comparison:
        """Both ways by turns, each as often first as second; one pair before that does not count."""
        measured = []
        for number in range(count + 1):
            say(what, number, count)
            if number % 2:
                other, base = await timed(True), await timed(False)
            else:
                base, other = await timed(False), await timed(True)
            measured.append((base, other))
        return compare(measured[1:])

    async def warm(self) -> tuple[Comparison, Comparison]:
        """The own cache with the connector, and the pool, each against the own cache without the connector."""
        prefix = self._prompt(self._sizes.prefix_tokens)
        await self._ask(prefix, 1, connected=True)

        async def pool() -> float:
            await empty_own_cache(self._session, self._client.url)
            return await self.hit(prefix, connected=True)

        for _ in range(WARM_UPS):
            await pool()
        kinds: list[Callable[[], Awaitable[float]]] = [
            lambda: self.hit(prefix, connected=False),
            lambda: self.hit(prefix, connected=True),
            pool,
        ]
        measured = []
        for number in range(self._sizes.warm_pairs):
            say("hits", number, self._sizes.warm_pairs)
            took = [0.0] * len(kinds)
            for kind in self._random.sample(range(len(kinds)), len(kinds)):
                took[kind] = await kinds[kind]()
            measured.append(took)
        return compare([(one[0], one[1]) for one in measured]), compare([(one[0], one[2]) for one in measured])

    async def _ask(self, prompt: list[int], tokens: int, connected: bool) -> Completion:
        if connected:
            self._without.unlink(missing_ok=True)
        else:
            self._without.touch()
        answer = await self._client.complete(SERVED_MODEL, prompt, tokens)
        await asyncio.sleep(QUIET_SECONDS)
        return answer

    def _prompt(self, tokens: int) -> list[int]:
        return self._random.choices(range(300, 1000), k=tokens)


async def measure(url: str, without: Path, counters: Counters, sizes: Sizes) -> list[Row]:
    """All comparisons on the engine at ``url``."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session:
        one = Measurement(session, url, without, counters, sizes)
        await one.check()
        cold = await one.pairs("cold", sizes.cold_pairs, one.cold)
        decode = await one.pairs("further tokens", sizes.decode_pairs, one.further_token)
        own, pool = await one.warm()
    return [
        Row(what=f"cold, {sizes.cold_tokens:,} tokens", found=cold, most_ratio=COLD),
        Row(what="further tokens while saving", found=decode, most_ratio=DECODE),
        Row(what=f"own cache, {sizes.prefix_tokens:,} tokens", found=own),
        Row(what=f"pool, {sizes.prefix_tokens:,} tokens", found=pool, most_seconds=WARM_SECONDS),
    ]


def run(sizes: Sizes, folder: Path, shape: Size, block_size: int) -> list[Row]:
    """Start node and engine, measure, stop them."""
    model = make_model(folder / f"model-{shape}", shape)
    without = folder / "without"
    without.unlink(missing_ok=True)
    longest = sizes.prefix_tokens + sizes.new_tokens
    blocks = 2 * -(-longest // block_size) + 8
    options = EngineOptions(prefix_caching=True, block_size=block_size, gpu_blocks=blocks)
    with NodeProcess("--size", "3GiB") as node:
        node.wait_touched()
        environment = {
            "PYTHONPATH": os.pathsep.join(filter(None, [str(CHECKOUT), os.environ.get("PYTHONPATH")])),
            "VLLM_SERVER_DEV_MODE": "1",
            "EMS_SOCKET": str(node.socket),
            "EMS_DIR": str(node.directory),
            "EMS_AUTOSTART": "0",
            "EMS_BENCH_WITHOUT": str(without),
            "VLLM_USE_V2_MODEL_RUNNER": "0",  # the other one keeps its connector elsewhere
        }
        engine = VllmServer(
            model,
            log=folder / "engine.log",
            kv_transfer_config={"kv_connector": "EmsStoreConnector", "kv_role": "kv_both"},
            options=options,
            environment=environment,
            module="benchmarks.comparison.switched",
        )
        try:
            engine.start()
            engine.wait_ready(START_SECONDS)
            return asyncio.run(measure(engine.url, without, lambda: node.figures()["counters"], sizes))
        finally:
            engine.stop()


def table(rows: list[Row]) -> Table:
    """One row a comparison."""
    result = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("", "pairs", "without", "with", "ratio", "difference", "target", ""):
        result.add_column(heading, justify="left" if not heading else "right", no_wrap=True)
    for row in rows:
        one = row.found
        target = f"{row.most_ratio} x" if row.most_ratio else ""
        if row.most_seconds:
            target = f"{row.most_seconds * 1e3:+.0f} ms"
        result.add_row(
            row.what,
            str(one.pairs),
            f"{one.base * 1e3:.1f} ms",
            f"{one.other * 1e3:.1f} ms",
            f"{one.ratio:.3f} ({one.ratio_low:.3f}-{one.ratio_high:.3f})",
            f"{one.difference * 1e3:+.1f} ms ({one.difference_low * 1e3:+.1f} to {one.difference_high * 1e3:+.1f})",
            target,
            row.verdict(),
        )
    return result


def say(what: str, done: int, count: int) -> None:
    if done % 20 == 0:
        sys.stderr.write(f"{what}: {done} of {count}\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cold", type=int, default=200, help="pairs of cold requests")
    parser.add_argument("--decode", type=int, default=120, help="pairs of requests with further tokens")
    parser.add_argument("--warm", type=int, default=80, help="rounds of hits")
    parser.add_argument("--prefix", type=int, default=4096, help="tokens of the prefix that hits have")
    parser.add_argument("--model", choices=SHAPES, default="demo", help="shape of the model; mha has 8 KV heads")
    parser.add_argument("--block-size", type=int, default=128, help="tokens of one of the engine's blocks")
    parser.add_argument("--seed", type=int, default=0, help="draws the prompts")
    parser.add_argument("--folder", type=Path, default=Path(".run/overhead"), help="model and log")
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table")
    arguments = parser.parse_args()
    for name in ("cold", "decode", "warm"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name} is {getattr(arguments, name)}, expected 1 or more")
    sizes = Sizes(
        cold_pairs=arguments.cold,
        decode_pairs=arguments.decode,
        warm_pairs=arguments.warm,
        seed=arguments.seed,
        prefix_tokens=arguments.prefix,
    )
    arguments.folder.mkdir(parents=True, exist_ok=True)
    rows = run(sizes, arguments.folder, arguments.model, arguments.block_size)
    if arguments.output == "json":
        sys.stdout.write(msgspec.json.encode(rows).decode() + "\n")
    else:
        Console(width=160).print(table(rows))
    return 1 if any(row.verdict() == "MISSED" for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
