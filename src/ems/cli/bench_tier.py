"""``ems bench tier``: a directory tier beside plain sequential I/O on the same disk."""

from __future__ import annotations

from ems.bench.tier import DEFAULT_PAGES, TierPlan, measure
from ems.cli.options import Format
from ems.cli.shown import note, present
from ems.config import format_size, parse_size
from ems.pool.tiers.settings import parse_tier
from ems.tables import Table


def tier(
    tier: str, /, *, total: str = "512MB", page: list[str] | None = None, rounds: int = 5, output: Format = "table"
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
    """
    sizes = [parse_size(one, name="--page") for one in page] if page else list(DEFAULT_PAGES)
    plan = TierPlan(parse_size(total, name="--total"), sizes, rounds)
    rows = measure(parse_tier(tier), plan, note)
    cells = [
        (
            format_size(row.page_bytes),
            *_speeds(row.plain_write, row.tier_write, row.write_share),
            *_speeds(row.plain_read, row.tier_read, row.read_share),
        )
        for row in rows
    ]
    columns = ("page", "plain write", "tier write", "share", "plain read", "tier read", "share")
    present({"items": rows}, Table(columns, cells, "Bandwidth in GB/s"), output)


def _speeds(plain: float, tier: float, share: float) -> tuple[str, ...]:
    return f"{plain / 1e9:.2f}", f"{tier / 1e9:.2f}", f"{share:.0%}"
