"""``ems list``: what the pool holds, by namespace, model or tenant."""

from __future__ import annotations

from typing import Any

from ems.cli.acts import ask
from ems.cli.options import ASKING, Asking
from ems.cli.shown import age, present, table
from ems.config import format_size
from ems.pool.administration.grouping import By, grouped
from ems.pool.protocol.acts import List


def listing(*, by: By = "namespace", asked: Asking = ASKING) -> None:
    """List what the pool holds, in memory and in the tiers below it.

    Parameters
    ----------
    by
        One line for each namespace, model or tenant.
    """
    rows = grouped(ask(asked.at, List())["namespaces"], by)
    tiers = list(dict.fromkeys(tier["name"] for row in rows for tier in row["tiers"]))
    figures = ("pages", "writing", "leases", "pinned")
    rest = [(format_size(row["bytes"]), age(row["idle_seconds"])) for row in rows]
    cells = [
        (row[by], *(row[name] for name in figures), *more, *(_below(row["tiers"], tier) for tier in tiers))
        for row, more in zip(rows, rest, strict=True)
    ]
    columns = (by.upper(), *map(str.upper, figures), "BYTES", "IDLE", *tiers)
    present({"items": rows}, table(columns, cells), asked.output)


def _below(tiers: list[dict[str, Any]], name: str) -> str:
    held = next((tier for tier in tiers if tier["name"] == name), None)
    return "0" if held is None else f"{held['pages']} ({format_size(held['bytes'])})"
