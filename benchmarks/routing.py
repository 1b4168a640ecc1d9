#!/usr/bin/env python3
"""What is the way worth in which the router chooses, beside each of Kthena's plugins, on a trace?

The chooser is the router's own; engines are simulated, in virtual time.  An engine computes one prompt after the other
at ``--prefill-rate``, decodes all its answers together, each token slower the more there are, and keeps the blocks that
it used last.  With the trace's own times the fleet would idle, so ``--speed`` brings requests closer together.

Nothing here depends on the machine: the same trace, flags and seed give the same table.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import random
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from ems.http.address import Address
from ems.router.choosing import kthena
from ems.router.choosing.chooser import Chooser
from ems.router.choosing.prefix_index import PIECE_BYTES
from ems.router.choosing.prompt import Prompt
from ems.router.fleet import Fleet, Hold, Instance, Role

BLOCK_TOKENS = 512
"""Of the published traces."""
KTHENA_BLOCKS = 128 * 64 // 4 // BLOCK_TOKENS
"""``prefix-cache`` looks at 128 pieces of 64 bytes: with 4 bytes a token, so many blocks."""
FIRST_TOKEN = 0.02
"""Seconds from the end of a prompt to the first token."""


class Line(msgspec.Struct):
    """A request of a trace."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]


@dataclass
class Load:
    """What an engine does, as its metrics would say."""

    rate: float
    blocks: int
    free_at: float = 0.0
    """When all prompts that it has are computed."""
    decoding: int = 0
    in_flight: int = 0
    tokens: int = 0
    kept: OrderedDict[int, None] = field(default_factory=OrderedDict)
    ttft: float | None = None
    tpot: float | None = None

    def arrives(self, line: Line, now: float) -> tuple[float, int]:
        """Return when the prompt is computed, and how many of its tokens need not be."""
        hits = 0
        for name in line.hash_ids:
            if name not in self.kept:
                break
            hits += 1
        cached = min(hits * BLOCK_TOKENS, line.input_length - 1)
        slower = 1 + self.decoding / 64
        self.free_at = max(self.free_at, now) + (line.input_length - cached) / self.rate * slower
        return self.free_at, cached

    def keeps(self, names: Sequence[int]) -> None:
        for name in reversed(names):  # a prefix outlives what continues it
            self.kept[name] = None
            self.kept.move_to_end(name)
        while len(self.kept) > self.blocks:
            self.kept.popitem(last=False)


@dataclass
class Result:
    """What a policy made of the trace; times in seconds."""

    policy: str
    hit_share: float
    ttft_mean: float
    ttft_p90: float
    busiest: float
    """Tokens computed by the engine that computed most, over the mean."""


Choose = Callable[[Line, float], int]


class Replay:
    """One policy over the whole trace."""

    def __init__(self, lines: Sequence[Line], args: argparse.Namespace, policy: str) -> None:
        self.lines = lines
        self.args = args
        self.policy = policy
        self.draw = random.Random(args.seed)
        self.engines = [Load(args.prefill_rate, args.cache_tokens // BLOCK_TOKENS) for _ in range(args.engines)]
        self.chooser = Chooser()
        self.fleet = Fleet(self.chooser.forget)
        for port in range(1, args.engines + 1):
            self.fleet.add(Role.DECODE, Address("engine", port), 0.0, trusted=True)
        self.instances: list[Instance] = self.fleet.listed(Role.DECODE)
        self.learned: list[OrderedDict[int, None]] = [OrderedDict() for _ in self.engines]
        self.matched_by_kthena = KTHENA_BLOCKS if policy == "prefix-cache" else 4 * 2048 // BLOCK_TOKENS

    def run(self) -> Result:
        events: list[tuple[float, int, Callable[[float], None]]] = []
        order = itertools.count()

        def later(at: float, what: Callable[[float], None]) -> None:
            heapq.heappush(events, (at, next(order), what))

        ttfts: list[float] = []
        cached_tokens = 0
        work = [0] * len(self.engines)
        for line in self.lines:
            now = line.timestamp / 1000 / self.args.speed
            while events and events[0][0] <= now:
                at, _, what = heapq.heappop(events)
                what(at)
            place, hold = self._place(line, now)
            engine = self.engines[place]
            engine.in_flight += 1
            computed, cached = engine.arrives(line, now)
            cached_tokens += cached
            work[place] += line.input_length - cached
            engine.tokens += line.input_length + line.output_length
            ttfts.append(computed + FIRST_TOKEN - now)
            later(computed, self._computed(engine, line, hold, later, ttfts[-1], place))
        ttfts.sort()
        total = sum(line.input_length for line in self.lines)
        return Result(
            self.policy,
            cached_tokens / total,
            sum(ttfts) / len(ttfts),
            ttfts[len(ttfts) * 9 // 10],
            max(work) * len(work) / sum(work),
        )

    def _computed(
        self,
        engine: Load,
        line: Line,
        hold: Hold | None,
        later: Callable[[float, Callable[[float], None]], None],
        ttft: float,
        place: int,
    ) -> Callable[[float], None]:
        def first_token(now: float) -> None:
            engine.keeps(line.hash_ids)
            if hold is not None:
                hold.computed()
            engine.decoding += 1
            step = 0.02 * (1 + engine.decoding / 64)
            engine.ttft = ttft if engine.ttft is None else 0.8 * engine.ttft + 0.2 * ttft
            engine.tpot = step

            def ends(_: float) -> None:
                engine.decoding -= 1
                engine.in_flight -= 1
                engine.tokens -= line.input_length + line.output_length
                if hold is not None:
                    hold.release()
                known = self.learned[place]  # Kthena learns when an answer has ended
                for name in line.hash_ids[: self.matched_by_kthena]:
                    known[name] = None
                    known.move_to_end(name)
                while len(known) > 50_000:
                    known.popitem(last=False)

            later(now + step * line.output_length, ends)

        return first_token

    def _place(self, line: Line, now: float) -> tuple[int, Hold | None]:
        if self.policy == "ems":
            text = line.input_length * PIECE_BYTES // BLOCK_TOKENS
            prompt = Prompt(line.input_length, text, line.hash_ids)
            score = self.chooser.choose(Role.DECODE, self.instances, prompt, now)
            assert score is not None
            cost = line.input_length + line.output_length
            hold = self.fleet.hold(score.instance, cost, score.uncached)
            self.chooser.sent(score.instance, prompt, now)
            return self.instances.index(score.instance), hold
        figures = [self._measured(place, line, now) for place in range(len(self.engines))]
        names = self.policy.split("+")
        place = kthena.choose(figures, kthena.Asked(), (), dict.fromkeys(names, 1), self.draw)
        assert place is not None
        return place, None

    def _measured(self, place: int, line: Line, now: float) -> kthena.Measured:
        engine = self.engines[place]
        known = self.learned[place]
        wanted = line.hash_ids[: self.matched_by_kthena]
        matched = len(list(itertools.takewhile(known.__contains__, wanted)))
        return kthena.Measured(
            in_flight=engine.in_flight,
            running=engine.decoding + (engine.free_at > now),
            kv_usage=min(engine.tokens / self.args.cache_tokens, 1.0),
            ttft=engine.ttft,
            tpot=engine.tpot,
            matched=matched / max(len(wanted), 1),
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, help="JSON lines: timestamp (ms), input_length, output_length, hash_ids")
    parser.add_argument("--engines", type=int, default=8)
    parser.add_argument("--speed", type=float, default=1.0, help="how many times as fast requests come as in the trace")
    parser.add_argument("--prefill-rate", type=float, default=8000.0, help="tokens a second of one engine")
    parser.add_argument("--cache-tokens", type=int, default=400_000, help="tokens of KV that one engine keeps")
    parser.add_argument("--requests", type=int, default=0, help="of the trace's beginning; 0 for all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table")
    args = parser.parse_args()
    decoder = msgspec.json.Decoder(Line)
    lines = [decoder.decode(line) for line in args.trace.read_bytes().splitlines() if line.strip()]
    lines = lines[: args.requests or None]
    policies = ["ems", *kthena.SCORES, "least-request+least-latency+prefix-cache"]
    results = []
    for policy in policies:
        sys.stderr.write(f"{policy}\n")
        results.append(Replay(lines, args, policy).run())
    show(results, args.output)
    return 0


def show(results: Sequence[Result], output: str) -> None:
    rows: list[dict[str, Any]] = [vars(one) for one in results]
    if output == "json":
        sys.stdout.write(json.dumps(rows) + "\n")
        return
    least = next(one for one in results if one.policy == "least-request")
    table = Table("policy", "prefix hits", "x least-request", "TTFT mean", "TTFT p90", "busiest / mean")
    for one in results:
        table.add_row(
            one.policy,
            f"{one.hit_share:.1%}",
            f"{one.hit_share / max(least.hit_share, 1e-9):.2f}",
            f"{one.ttft_mean:.2f} s",
            f"{one.ttft_p90:.2f} s",
            f"{one.busiest:.2f}",
        )
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
