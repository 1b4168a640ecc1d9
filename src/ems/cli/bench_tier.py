"""``ems bench tier``: a directory tier beside plain sequential I/O on the same disk."""

from __future__ import annotations

from ems.bench.tier import DEFAULT_PAGES, TierPlan, measure
from ems.cli.options import Format
from ems.cli.shown import note, print_json, show
from ems.config import format_size, parse_size
from ems.pool.tiers.settings import parse_tier
from ems.tables import Table


def tier(
    tier: str,
    /,
    *,
    total: str = "512MB",
    page: list[str] | None = None,
    rounds: int = 5,
    output: Format = "table",
) -> None:
    """Measure how fast a directory tier writes and reads, beside plain sequential I/O of the same bytes.

    Parameters
    ----------
    tier
        The tier as 'ems node --tier' takes it; what is written goes into a folder below it and is removed.
    total
        Bytes that each round writes and reads.
    page
        Bytes of a page; may be repeated.
    rounds
        Rounds for each page size; medians are shown.
    output
        A table for people or JSON for scripts.
    """
    sizes = [parse_size(one, name="--page") for one in page] if page else list(DEFAULT_PAGES)
    plan = TierPlan(parse_size(total, name="--total"), sizes, rounds)
    rows = measure(parse_tier(tier), plan, note)
    if output == "json":
        print_json({"items": rows})
        return
    cells = [
        (
            format_size(row.page_bytes),
            f"{row.plain_write / 1e9:.2f}",
            f"{row.tier_write / 1e9:.2f}",
            f"{row.write_share:.0%}",
            f"{row.plain_read / 1e9:.2f}",
            f"{row.tier_read / 1e9:.2f}",
            f"{row.read_share:.0%}",
        )
        for row in rows
    ]
    columns = ("page", "plain write", "tier write", "share", "plain read", "tier read", "share")
    show(Table(columns, cells, "Bandwidth in GB/s"))
