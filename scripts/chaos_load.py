"""What a chaos run asks for, what it breaks and when, and what it may not find.

Everything here is a function of the seed and of the answers that came: the shell in ``scripts/chaos.py`` has the
clock, the sockets and the processes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from random import Random
from typing import Any, Literal

import msgspec

Kind = Literal["fresh", "prefix", "repeat", "turn", "long", "leave"]
Tokens = tuple[int, ...]

MIX: dict[Kind, int] = {"fresh": 15, "prefix": 30, "repeat": 15, "turn": 20, "long": 8, "leave": 12}
"""Of a hundred requests, so many begin with nothing known, with a shared prefix, say again what was said, go on with a
conversation, have a long answer, or are given up."""

LONGEST = 1100
"""Tokens of the longest prompt; a conversation that grew longer is over."""
TIE = 1 / 32
"""Logits of the models are bfloat16 numbers of about this precision."""

_READABLE = range(300, 1000)
_REMEMBERED = 40


class Job(msgspec.Struct, frozen=True):
    """One request: to which server, with which prompt, for how many tokens.

    ``leave_after`` pieces of its answer the client hangs up; 0 does not wait for the first, None stays to the end.
    """

    kind: Kind
    server: int
    prompt: Tokens
    tokens: int
    leave_after: int | None = None


class Load:
    """An endless, varied load for so many ``servers``; the same for the same seed and answers."""

    def __init__(self, seed: int, servers: int = 2) -> None:
        self._random = Random(seed)
        self._servers = servers
        self._prefixes = [self._some(self._random.randrange(100, 700)) for _ in range(6)]
        self._asked: list[Tokens] = [self._prefixes[0]]
        self._conversations: list[Tokens] = []

    def next(self) -> Job:
        """The next request to make."""
        random = self._random
        kind = random.choices(list(MIX), list(MIX.values()))[0]
        tokens = random.randrange(150, 300) if kind in ("long", "leave") else random.randrange(1, 24)
        prompt = self._prompt(kind)
        leave_after = random.choice((0, 0, 1, 3, 20, 60)) if kind == "leave" else None
        self._remember(self._asked, prompt)
        return Job(kind, random.randrange(self._servers), prompt, tokens, leave_after)

    def answered(self, job: Job, answer: Tokens) -> None:
        """``answer`` came for ``job``: a conversation may go on from it."""
        said = job.prompt + answer
        if len(said) < LONGEST - 100:
            self._remember(self._conversations, said)

    def _prompt(self, kind: Kind) -> Tokens:
        random = self._random
        if kind == "repeat":
            return random.choice(self._asked)
        if kind == "turn" and self._conversations:
            said = self._conversations.pop(random.randrange(len(self._conversations)))
            return said + self._some(random.randrange(1, 80))
        if kind == "long":
            return self._some(random.randrange(60, 250))
        if kind in ("prefix", "leave"):
            prefix = random.choice(self._prefixes)
            return prefix[: random.randrange(50, len(prefix) + 1)] + self._some(random.randrange(1, 120))
        return self._some(random.randrange(1, random.choice((40, 200, LONGEST))))

    def _some(self, count: int) -> Tokens:
        return tuple(self._random.choices(_READABLE, k=count))

    def _remember(self, things: list[Tokens], thing: Tokens) -> None:
        if len(things) == _REMEMBERED:
            things.pop(self._random.randrange(_REMEMBERED))
        things.append(thing)


class Fault(msgspec.Struct, frozen=True):
    """After so many seconds the node is killed, or frozen; ``lasts`` seconds later it is started again, or goes on."""

    kind: Literal["kill", "freeze"]
    after: float
    lasts: float


def faults(seed: int) -> Iterator[Fault]:
    """What happens to the node, for ever: mostly it is killed, and mostly it is back soon."""
    random = Random(seed)
    while True:
        kind: Literal["kill", "freeze"] = "kill" if random.random() < 0.75 else "freeze"
        lasts = random.uniform(0.0, 1.0) if random.random() < 0.6 else random.uniform(1.0, 8.0)
        yield Fault(kind, random.uniform(0.5, 5.0) if random.random() < 0.4 else random.uniform(5.0, 40.0), lasts)


Part = Literal["node", "agents", "engine", "link", "master"]


class ClusterFault(msgspec.Struct, frozen=True):
    """After so many seconds a ``part`` of a ``host`` breaks; ``lasts`` seconds later it is mended.

    Masters are counted by themselves; an engine comes back when it can, agents are started again by their node.
    """

    part: Part
    act: Literal["kill", "freeze", "cut"]
    host: int
    after: float
    lasts: float


CLUSTER_FAULTS: dict[tuple[Part, Literal["kill", "freeze", "cut"]], int] = {
    ("node", "kill"): 20,
    ("node", "freeze"): 8,
    ("agents", "kill"): 12,
    ("agents", "freeze"): 6,
    ("engine", "kill"): 7,
    ("link", "cut"): 27,
    ("master", "kill"): 14,
    ("master", "freeze"): 6,
}
"""Of a hundred faults so many; an engine takes half a minute to come back, so few are killed."""


def cluster_faults(seed: int, hosts: int, masters: int) -> Iterator[ClusterFault]:
    """What happens to a cluster, for ever; much of it while something else is broken, too."""
    random = Random(seed)
    while True:
        part, act = random.choices(list(CLUSTER_FAULTS), list(CLUSTER_FAULTS.values()))[0]
        # Mooncake's master forgets a host of which it heard nothing for ten seconds.
        lasts = random.uniform(0.2, 4.0) if random.random() < 0.6 else random.uniform(4.0, 20.0)
        host = random.randrange(masters if part == "master" else hosts)
        yield ClusterFault(part, act, host, random.uniform(0.5, 12.0), lasts)


class Tally:
    """What came of the requests, and everything that should not have been.  Not safe for several threads."""

    def __init__(self) -> None:
        self.asked: Counter[Kind] = Counter()
        self.answered: Counter[Kind] = Counter()
        self.left: Counter[Kind] = Counter()
        self.cut: Counter[Kind] = Counter()
        """Requests that ended with their engine, which was killed."""
        self.ties: Counter[Kind] = Counter()
        self.wrong: Counter[Kind] = Counter()
        self.failed: Counter[Kind] = Counter()
        self.faults: Counter[str] = Counter()
        self.violations: list[str] = []

    def fail(self, job: Job, what: str) -> None:
        """The request came to no answer."""
        self.failed[job.kind] += 1
        self.violations.append(f"{_name(job)}: {what}")

    def differs(self, job: Job, place: int, answer: Tokens, logprobs: dict[int, float]) -> None:
        """The answer differs from ``place`` on, where an engine without a connector gives tokens these ``logprobs``.

        Two tokens that it can hardly tell apart are a tie: whether a prompt is computed whole or in parts may decide
        it, with or without a connector.
        """
        token = answer[place] if place < len(answer) else None
        best = max(logprobs, key=logprobs.__getitem__)
        margin = logprobs[best] - logprobs.get(token, -math.inf) if token is not None else math.inf
        if margin <= TIE:
            self.ties[job.kind] += 1
            return
        self.wrong[job.kind] += 1
        self.violations.append(
            f"{_name(job)}: token {place} of the answer is {token}, but an engine without a connector says {best}, "
            f"by a margin of {margin:.3f}"
        )

    def leftovers(self, holder: str, held: dict[str, Any]) -> None:
        """Whatever of ``held`` is not zero after the load should not be."""
        self.violations += [f"{holder}: {what} is {count}, expected 0" for what, count in held.items() if count]


def first_difference(one: Tokens, other: Tokens) -> int | None:
    """Where two answers part; None when they are the same."""
    if one == other:
        return None
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (left, right) in pairs if left != right), min(len(one), len(other)))


def _name(job: Job) -> str:
    return f"{job.kind} request of {len(job.prompt)} tokens for {job.tokens} to server {job.server}"
