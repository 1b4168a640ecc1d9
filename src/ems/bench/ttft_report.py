"""What the three steps are and what comes out of them: prompts, ratios, agreement of texts, the table.

Pure: the same plan and seed give the same prompts, the same outcomes give the same report.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from ems.errors import ConfigError
from ems.tables import Table

MOST_TOKEN_ID = 1 << 24


class Plan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is measured: two sets A and B of random prompts, A sent three times."""

    requests: int = 100
    concurrency: int = 25
    input_tokens: int = 1024
    output_tokens: int = 10
    seed: int = 0
    first_token_id: int = 300
    last_token_id: int = 999
    """Prompts are drawn from these ids, both included: ordinary tokens in practically every vocabulary."""

    def __post_init__(self) -> None:
        for name in ("requests", "concurrency", "input_tokens", "output_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')} is {getattr(self, name)}, expected 1 or more")
        if not 0 <= self.first_token_id < self.last_token_id <= MOST_TOKEN_ID:
            given = f"{self.first_token_id}-{self.last_token_id}"
            raise ConfigError(f"--token-ids is {given}, expected FIRST-LAST with FIRST below LAST, such as 300-999")

    def prompts(self, name: str) -> list[list[int]]:
        source = random.Random(f"{self.seed}/{name}")
        ids = range(self.first_token_id, self.last_token_id + 1)
        return [source.choices(ids, k=self.input_tokens) for _ in range(self.requests)]


def parse_token_ids(text: str) -> tuple[int, int]:
    first, dash, last = text.partition("-")
    if not (dash and first.isdecimal() and last.isdecimal()):
        raise ConfigError(f"--token-ids is {text!r}, expected FIRST-LAST such as 300-999")
    return int(first), int(last)


class Latency(msgspec.Struct, frozen=True, kw_only=True):
    """Samples in short, all in seconds."""

    count: int
    mean: float
    p50: float
    p99: float
    least: float
    most: float


def summarise(samples: Sequence[float]) -> Latency:
    """Sum up at least one sample; percentiles lie between samples where need be."""
    if not samples:
        raise ValueError("no samples to sum up")
    values = np.asarray(samples, np.float64)
    p50, p99 = np.percentile(values, [50, 99])
    return Latency(
        count=len(samples),
        mean=float(values.mean()),
        p50=float(p50),
        p99=float(p99),
        least=float(values.min()),
        most=float(values.max()),
    )


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What one prompt brought; times in seconds."""

    first_token: float
    text: str


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One pass of a prompt set over one server; prompts that failed have no time and are counted."""

    name: str
    url: str
    seconds: float
    failed: int
    ttft: Latency
    same_text: int
    """Prompts whose text equals that of step 1."""
    ratio: float
    """Mean time to first token of step 1 divided by this one's."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of the whole procedure."""

    model: str
    plan: Plan
    steps: list[Step]
    pool: dict[str, float] | None = None
    """How the pool's figures changed meanwhile; None where no node could be asked."""

    @property
    def failed(self) -> int:
        return sum(step.failed for step in self.steps)


class Pass(msgspec.Struct, frozen=True, kw_only=True):
    """The raw outcomes of a step, in the order of the prompts; None for a prompt that failed."""

    name: str
    url: str
    seconds: float
    outcomes: list[Outcome | None]


def evaluate(passes: Sequence[Pass]) -> list[Step]:
    """Sum up the passes; the first is what the others are compared with.

    Each pass has at least one outcome that is not None.
    """
    reference = passes[0]
    base = summarise(_times(reference)).mean
    steps = []
    for one in passes:
        ttft = summarise(_times(one))
        pairs = zip(reference.outcomes, one.outcomes, strict=True)
        same = sum(a is not None and b is not None and a.text == b.text for a, b in pairs)
        failed = one.outcomes.count(None)
        steps.append(
            Step(
                name=one.name,
                url=one.url,
                seconds=one.seconds,
                failed=failed,
                ttft=ttft,
                same_text=same,
                ratio=base / ttft.mean,
            )
        )
    return steps


def _times(one: Pass) -> list[float]:
    return [outcome.first_token for outcome in one.outcomes if outcome is not None]


def changes(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    return {name: after[name] - before[name] for name in before if name in after}


def table(report: Report) -> Table:
    plan = report.plan
    load = f"{plan.requests} requests, {plan.concurrency} at once"
    size = f"{plan.input_tokens} tokens in, {plan.output_tokens} out, seed {plan.seed}"
    meanwhile = ", ".join(f"{name} {value:+,.0f}" for name, value in (report.pool or {}).items())
    return Table(
        ("step", "mean ms", "p50 ms", "p99 ms", "speed-up", "same text", "failed"),
        [
            (
                step.name,
                f"{step.ttft.mean * 1e3:,.0f}",
                f"{step.ttft.p50 * 1e3:,.0f}",
                f"{step.ttft.p99 * 1e3:,.0f}",
                f"{step.ratio:.1f}",
                f"{step.same_text}/{plan.requests}",
                str(step.failed),
            )
            for step in report.steps
        ],
        title=f"Time to first token: {load}, {size}",
        remark="" if report.pool is None else f"pool meanwhile: {meanwhile}",
    )
