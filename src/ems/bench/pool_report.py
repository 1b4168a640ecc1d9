"""How the figures of the pool's benchmark are shown."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.table import Table

from ems.bench.pool import PoolReport
from ems.config import format_size


def tables(report: PoolReport) -> list[Table]:
    """One table of bandwidths, one of what checking costs, one of latencies."""
    bandwidth = Table(title="Bandwidth in GB/s", box=SIMPLE_HEAD, title_justify="left")
    for column in ("page", "memcpy", "to slots", "save", "share", "from slots", "load", "share"):
        bandwidth.add_column(column, justify="right")
    for row in report.bandwidth:
        bandwidth.add_row(
            format_size(row.page_bytes),
            f"{row.memcpy:.2f}",
            f"{row.memcpy_to_slots:.2f}",
            f"{row.save:.2f}",
            f"{row.save_share:.0%}",
            f"{row.memcpy_from_slots:.2f}",
            f"{row.load:.2f}",
            f"{row.load_share:.0%}",
        )
    latency = Table(title="Lookup in µs", box=SIMPLE_HEAD, title_justify="left")
    for column in ("keys", "lease", "p50", "p90", "p99"):
        latency.add_column(column, justify="right")
    checks = Table(title="Loads with checksums, as a share of loads without", box=SIMPLE_HEAD, title_justify="left")
    for column in ("page", "no page", "sampled", "share", "every page", "share"):
        checks.add_column(column, justify="right")
    for row in report.bandwidth:
        checks.add_row(
            format_size(row.page_bytes),
            f"{row.load_unchecked:.2f}",
            f"{row.load_sampled:.2f}",
            f"{row.sampled_share:.0%}",
            f"{row.load_checked:.2f}",
            f"{row.checked_share:.0%}",
        )
    for line in report.lookups:
        latency.add_row(
            str(line.keys), "yes" if line.lease else "no", f"{line.p50:.0f}", f"{line.p90:.0f}", f"{line.p99:.0f}"
        )
    return [bandwidth, checks, latency]
