"""``ems list`` and ``ems show``: what the pool holds, and all that is known of a namespace, a page or a request."""

from __future__ import annotations

from typing import Any

from ems.cli.acts import ask
from ems.cli.options import ASKING, Asking
from ems.cli.shown import age, present, present_facts, table
from ems.config import format_size
from ems.pool.administration.figures import By, grouped
from ems.pool.protocol.acts import List, Show


def listing(*, by: By = "namespace", asked: Asking = ASKING) -> None:
    """List what the pool holds, in memory and in the tiers below it.

    Args:
        by: One line for each namespace, model or tenant.
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


def show(what: str, /, *, asked: Asking = ASKING) -> None:
    """Show all that is known of a namespace, a page or a request.

    Args:
        what: A namespace's name, a key of 32 hex digits, or the id of a request (or a part of it).
    """
    report = ask(asked.at, Show(what))
    present_facts(report, facts_of(report), asked.output)


def facts_of(report: dict[str, Any]) -> list[list[tuple[str, str]]]:
    if report["kind"] == "namespace":
        return [_namespace(report)]
    if report["kind"] == "request":
        return [[("request", report["request"])], *(_look(look) for look in report["lookups"])]
    if not report["namespaces"]:
        return [[("key", report["key"]), ("state", "never stored here, or gone for longer than the node remembers")]]
    return [[("key", report["key"]), *_page(row)] for row in report["namespaces"]]


def _namespace(row: dict[str, Any]) -> list[tuple[str, str]]:
    facts = [
        ("namespace", row["namespace"]),
        ("tenant", row["tenant"]),
        ("model", row["model"]),
        ("pages", f"{row['pages']} of {format_size(row['page_size'])}, {format_size(row['bytes'])} in all"),
        ("in use", f"{row['leases']} leases, {row['writing']} pages being written"),
        ("last used", f"{age(row['idle_seconds'])} ago"),
    ]
    facts += [
        (f"in {tier['name']}", f"{tier['pages']} pages, {format_size(tier['bytes'])}") for tier in row.get("tiers", ())
    ]
    facts += [(f"  {name}", text) for name, text in row["facts"].items()]
    for other in row["other_layouts"]:
        differs = ", ".join(f"{name} is {there}, not {here}" for name, (here, there) in other["differs"].items())
        facts.append(("other layout", f"{other['namespace']}: {differs or 'nothing known differs'}"))
    return facts


def _page(row: dict[str, Any]) -> list[tuple[str, str]]:
    facts = [("namespace", row["namespace"]), ("state", row["state"])]
    below = [("in tiers", ", ".join(row["tiers"]) or "none")] if "tiers" in row else []
    if row["state"] == "absent":
        return [*facts, ("reason", _because(row)), *below]
    facts += [
        ("where", f"{row['tier']}, segment {row['segment']}, slot {row['slot']}"),
        *below,
        ("in use", f"{row['leases']} leases, {row['continued_by']} pages continue it"),
        ("pinned", "yes" if row["pinned"] else "no"),
        ("last used", f"{age(row['idle_seconds'])} ago"),
    ]
    if row["prefix"]:
        facts.append(("prefix", f"{row['prefix']}, {'present' if row['prefix_present'] else 'missing'}"))
    return facts


def _look(row: dict[str, Any]) -> list[tuple[str, str]]:
    return [
        ("namespace", row["namespace"]),
        ("lookup", f"{row['found']} of {row['asked']} keys found, {age(row['seconds_ago'])} ago"),
        *([("missing", row["missing"])] if row["missing"] else []),
        ("reason", _because(row)),
    ]


def _because(row: dict[str, Any]) -> str:
    text = f"{row['reason']}: {row['sentence']}"
    return f"{text} ({row['detail']})" if row["detail"] else text
