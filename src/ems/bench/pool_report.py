"""How the figures of the pool's benchmark are shown."""

from __future__ import annotations

from ems.bench.pool import PoolReport
from ems.config import format_size
from ems.tables import Table


def tables(report: PoolReport) -> list[Table]:
    bandwidth = [
        (
            format_size(row.page_bytes),
            f"{row.memcpy:.2f}",
            f"{row.memcpy_to_slots:.2f}",
            f"{row.save:.2f}",
            f"{row.save_share:.0%}",
            f"{row.memcpy_from_slots:.2f}",
            f"{row.load:.2f}",
            f"{row.load_share:.0%}",
        )
        for row in report.bandwidth
    ]
    checks = [
        (
            format_size(row.page_bytes),
            f"{row.load_unchecked:.2f}",
            f"{row.load_sampled:.2f}",
            f"{row.sampled_share:.0%}",
            f"{row.load_checked:.2f}",
            f"{row.checked_share:.0%}",
        )
        for row in report.bandwidth
    ]
    lookups = [
        (str(row.keys), "yes" if row.lease else "no", f"{row.p50:.0f}", f"{row.p90:.0f}", f"{row.p99:.0f}")
        for row in report.lookups
    ]
    columns = ("page", "memcpy", "to slots", "save", "share", "from slots", "load", "share")
    title = "Loads with checksums, as a share of loads without"
    return [
        Table(columns, bandwidth, "Bandwidth in GB/s"),
        Table(("page", "no page", "sampled", "share", "every page", "share"), checks, title),
        Table(("keys", "lease", "p50", "p90", "p99"), lookups, "Lookup in µs"),
    ]
