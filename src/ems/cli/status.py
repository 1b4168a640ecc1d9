"""``ems status``, ``health``, ``list`` and ``show``: the pool at a glance, whether it is well, what it holds."""

from __future__ import annotations

from typing import Any

from ems.cli.acts import ask, figures
from ems.cli.options import ASKING, Asking
from ems.cli.shown import age, present, present_facts, print_facts, print_json, print_tables, table
from ems.config import format_size
from ems.pool.administration.figures import CLIENT_STARTS, By, grouped, judge
from ems.pool.protocol.acts import List, Show


def status(*, asked: Asking = ASKING) -> None:
    """Show the pool of this host at a glance."""
    seen = figures(asked.at)
    if asked.json:
        print_json(seen)
        return
    print_facts(summary_rows(seen))
    if seen["namespaces"]:
        print()
        rows = [
            (
                *(row[name] for name in ("name", "pages", "writing", "capacity")),
                format_size(row["page_size"]), format_size(row["pages"] * row["page_size"]),
            )
            for row in seen["namespaces"]
        ]  # fmt: skip
        print_tables(table(("NAMESPACE", "PAGES", "WRITING", "SLOTS", "PAGE SIZE", "BYTES"), rows))


def health(*, asked: Asking = ASKING) -> int:
    """Say what is well with the node and what is not; exit status 1 when something is not."""
    checks = judge(figures(asked.at))
    well = all(check.well for check in checks)
    facts = [(check.name, f"{'well' if check.well else 'ILL'}, {check.seen}") for check in checks]
    present_facts({"well": well, "checks": checks}, [facts], asked.output)
    return 0 if well else 1


def summary_rows(seen: dict[str, Any]) -> list[tuple[str, str]]:
    counters = seen["counters"]
    total, used = seen["bytes_total"], seen["bytes_used"]
    asked, hit = counters["keys_looked_up"], counters["keys_hit"]
    started = "an engine" if seen["autostarted"] else "hand"
    return [
        ("node", f"{seen['node'][:12]}, EMS {seen['release']}, process {seen['pid']}, started by {started}"),
        ("up", _duration(seen["uptime_seconds"])),
        ("memory", f"{format_size(used)} of {format_size(total)} hold pages ({_share(used, total)})"),
        ("touched", f"{format_size(seen['bytes_touched'])} ({_share(seen['bytes_touched'], total)})"),
        ("clients", f"{seen['clients'] - 1}, {seen['leases']} leases, {seen['reservations']} reservations"),
        (
            "writing",
            f"{format_size(seen['bytes_reserved'])} reserved, {seen['slots_resting']} slots wait for cut-off writers",
        ),
        ("lookups", f"{counters['lookups']}, {hit} of {asked} keys found ({_share(hit, asked)})"),
        ("missed", _misses(seen.get("misses", {}))),
        ("pages", f"{counters['pages_committed']} stored, {counters['pages_evicted']} evicted"),
        (
            "refused",
            f"{counters['refused_no_space']} without room, {counters['refused_not_touched']} before memory was touched",
        ),
        (
            "too many",
            f"{counters['refused_share']} above a writer's share, {counters['reservations_expired']} late reservations",
        ),
        *(("tier", _tier(tier)) for tier in seen.get("tiers", ())),
    ]


def _tier(tier: dict[str, Any]) -> str:
    limit = f" of {format_size(tier['tier_limit'])}" if tier.get("tier_limit") else ""
    if tier["reading"] and tier["writing"]:
        state = "well" if tier.get("tier_agent_starts", 1) else CLIENT_STARTS
    else:
        out = " and ".join(name for name in ("reading", "writing") if not tier[name])
        state = f"left alone ({out}): {tier['reason']}"
    told, copied = tier.get("hot_runs_told", 0), tier.get("copied_ahead", 0)
    ahead = f"{copied} copied ahead ({tier['copied_ahead_used']} used, {told} runs told), " if told or copied else ""
    return (
        f"{tier['name']}: {_of_cluster(tier)}"
        f"{format_size(tier.get('tier_bytes', 0))}{limit}, {tier.get('tier_pages', 0)} pages, "
        f"{tier['pages_written']} written, {tier['pages_fetched']} fetched, {tier['pages_dropped']} dropped, "
        f"{ahead}{state}"
    )


def _of_cluster(tier: dict[str, Any]) -> str:
    """What a host lends, and the seal that has to be the same on all hosts."""
    if "tier_seals" not in tier:
        return ""
    seals = tier["tier_seals"]
    seal = f"seal {seals['']}" if "" in seals else f"seals of {len(seals)} tenants" if seals else "no seal"
    return f"lends {format_size(tier['tier_lends'])}, {seal}, put there "


def _misses(misses: dict[str, int]) -> str:
    by_count = sorted(misses.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{reason} {count}" for reason, count in by_count) or "nothing yet"


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "none yet"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    parts = [(days, "d"), (hours, "h"), (minutes, "m"), (rest, "s")]
    shown = [f"{value}{unit}" for value, unit in parts if value][:2]
    return "".join(shown) or "0s"


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
        return [*facts, ("reason", because(row)), *below]
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
        ("reason", because(row)),
    ]


def because(row: dict[str, Any]) -> str:
    text = f"{row['reason']}: {row['sentence']}"
    return f"{text} ({row['detail']})" if row["detail"] else text
