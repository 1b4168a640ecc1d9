"""Latencies summed up: pure arithmetic on samples."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np


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
