"""Prometheus' rules for names, as ``promtool check metrics`` and the naming guide have them, and the reference's rows.

A page is read as Prometheus reads it: from its text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

REFERENCE = Path(__file__).parents[1] / "docs" / "reference" / "metrics.md"
BASE_UNITS = {"bytes", "seconds"}
OTHER_UNITS = {
    *("milliseconds", "microseconds", "nanoseconds", "minutes", "hours", "days", "kilobytes", "megabytes", "gigabytes"),
    *("kibibytes", "mebibytes", "gibibytes", "bits", "percent", "percentage", "ms", "us", "ns", "kb", "mb", "gb"),
}
TYPES = {"counter", "gauge", "histogram", "summary", "metric"}
NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
ROW = re.compile(r"\| `([a-z_:]+)(?:\{([a-z_,]+)\})?` \| (\w+) \| \S.* \|")
SERIES = 1000
"""Most series of one family."""


def exposed_name(family: Metric) -> str:
    """The name that a query uses, which for counters ends in ``_total``."""
    return f"{family.name}_total" if family.type == "counter" else family.name


def broken_rules(page: str, *, prefix: str) -> list[str]:
    """What of the page breaks a rule, one sentence each; every name has to begin with ``prefix``."""
    declared = [line.split()[2] for line in page.splitlines() if line.startswith("# TYPE")]
    broken = [f"{name} is declared twice" for name in {name for name in declared if declared.count(name) > 1}]
    for family in text_string_to_metric_families(page):
        broken += [f"{exposed_name(family)} {rule}" for rule in (*_broken(family, prefix), *_broken_by_labels(family))]
    return broken


def _broken(family: Metric, prefix: str) -> Iterable[str]:
    words = family.name.removeprefix(prefix).split("_")
    if not family.name.startswith(prefix) or not NAME.fullmatch(family.name.removeprefix(prefix)):
        yield f"is no lower-case name that begins with {prefix}"
    if family.type not in ("counter", "gauge", "histogram"):
        yield f"is of type {family.type}"
    if not family.documentation.strip():
        yield "has no help text"
    if family.type != "counter" and words[-1] in ("total", "count", "sum", "bucket"):
        yield "ends like a counter or a part of a histogram and is none"
    if family.type == "counter" and not all(sample.name.endswith("_total") for sample in family.samples):
        yield "is a counter and does not end in _total"
    if OTHER_UNITS & set(words):
        yield "has a unit that is no base unit"
    if TYPES & set(words):
        yield "names its type"
    if BASE_UNITS & set(words[:-1]) and "per" not in words:
        yield "does not have its unit at the end"


def _broken_by_labels(family: Metric) -> Iterable[str]:
    labels = [sample.labels for sample in family.samples]
    if family.type != "histogram" and any({"le", "quantile"} & set(given) for given in labels):
        yield "has a label of histograms"
    if not all(NAME.fullmatch(label) for given in labels for label in given):
        yield "has a label that is no lower-case name"
    if len(labels) > SERIES:
        yield f"has {len(labels)} series"


def families(page: str) -> set[tuple[str, str]]:
    """Names and types of what the page has."""
    return {(exposed_name(family), family.type) for family in text_string_to_metric_families(page)}


def listed(prefix: str) -> set[tuple[str, str]]:
    """Names and types of the reference's rows whose names begin with ``prefix``."""
    rows = map(ROW.fullmatch, REFERENCE.read_text().splitlines())
    return {(row[1], row[3]) for row in rows if row is not None and row[1].startswith(prefix)}
