"""``ems clear``, ``pin``, ``unpin`` and ``warm``: what of the pages leaves, what stays, what comes up from below."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from ems.cli.acts import answer, ask, connected, holders
from ems.cli.explain import described_planes, ids_of
from ems.cli.options import CHANGING, Changing, Flag, Tokens
from ems.cli.shown import complain, counted, print_json, say
from ems.config import format_size, parse_duration, parse_size
from ems.errors import ConfigError, PoolRefused
from ems.pool.core.pins import MAX_PIN_SECONDS
from ems.pool.keys import KEY_BYTES, split_keys
from ems.pool.protocol.acts import Clear, Pin, Refill, Warm
from ems.pool.protocol.limits import MAX_KEYS


def clear(
    *,
    tenant: str | None = None,
    model: str | None = None,
    namespace: str | None = None,
    older_than: str | None = None,
    everything: Annotated[bool, Parameter(name="--all", negative="")] = False,
    memory_only: Flag = False,
    yes: Annotated[bool, Parameter(name=["--yes", "-y"], negative="")] = False,
    asked: Changing = CHANGING,
) -> int:
    """Take the pages out of the pool that fit all that is given: out of memory and of the tiers below it.

    Pages that somebody reads are not found any more and leave when they are released.  Exit status 1 when some of it is
    still there, with who holds it, or when nothing is called so.

    Args:
        tenant: Pages of this tenant.
        model: Pages of this model, in any layout.
        namespace: Pages of this namespace.
        older_than: Pages that were neither stored nor loaded for so long, such as 90s, 15m, 12h or 7d.
        everything: All pages.
        memory_only: Leave the tiers alone: what they have comes back when it is asked for.
        yes: Do not ask before everything is taken out.
    """
    seconds = None if older_than is None else parse_duration(older_than, name="--older-than")
    criteria = (tenant, model, namespace, seconds)
    if everything == any(one is not None for one in criteria):
        raise ConfigError("give --tenant, --model, --namespace or --older-than, or --all alone to take out everything")
    act = Clear(tenant, model, namespace, seconds, everything, memory_only)
    if everything and not yes and not asked.dry_run and not _agreed(act, asked):
        return 1
    report = ask(asked.at, act, dry_run=asked.dry_run)
    if asked.json or not report.get("unmatched"):
        answer(report, _sentence(report, dry_run=asked.dry_run), asked)
    complaints = list(_complaints(report, dry_run=asked.dry_run))
    for one in complaints:
        complain(one)
    return 1 if complaints else 0


def _agreed(act: Clear, asked: Changing) -> bool:
    if not sys.stdin.isatty():
        raise ConfigError("--all takes out everything and nobody can be asked here, add --yes if that is meant")
    would = _sentence(ask(asked.at, act, dry_run=True), dry_run=True)
    print(f"this {would}; go on? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _sentence(report: dict[str, Any], *, dry_run: bool) -> str:
    spaces = f"in {counted(len(report['namespaces']), 'namespace')}"
    tiers = "".join(
        f"; {tier['name']}: {counted(tier['pages'], 'page')} ({format_size(tier['bytes'])})"
        for tier in report.get("tiers", ())
    )
    if dry_run:
        pages = counted(report["matched"], "page")
        pinned = f"; {_pinned(report)}" if report["pinned"] else ""
        return f"would clear {pages} ({format_size(report['bytes'])}) {spaces}{pinned}{tiers}"
    pages = counted(report["matched"] + report["pinned"], "page")
    return f"cleared {report['removed']} of {pages} {spaces}{tiers}"


def _pinned(report: dict[str, Any]) -> str:
    return f"{counted(report['pinned'], 'page')} {'stays' if report['pinned'] == 1 else 'stay'} because of pins"


def _complaints(report: dict[str, Any], *, dry_run: bool) -> Iterator[str]:
    if report.get("unmatched"):
        yield report["unmatched"]
    if report["pinned"] and not dry_run:
        yield f"{_pinned(report)}, `ems unpin NAMESPACE` ends them"
    if kept := report["kept"]:
        who = "; ".join(holders(report))
        why = f"in use by {who}" if who else "because pages that are pinned or came since continue them"
        yield f"{counted(kept, 'page')} {'stays' if kept == 1 else 'stay'}, {why}; clear again after that"
    for tier in report.get("tiers", ()):
        if tier["reason"]:
            yield _tier_complaint(tier)


def _tier_complaint(tier: dict[str, Any]) -> str:
    names, count = tier["remaining"], tier["namespaces_remaining"]
    more = f" and {count - len(names)} more" if count > len(names) else ""
    if not names:
        return f"{tier['name']} was not cleared: {tier['reason']}"
    what = f"pages of {', '.join(names)}{more} may still be in it"
    return f"{tier['name']} could not be cleared, {tier['reason']}; {what}, clear again when it works"


def pin(namespace: str, /, *keys: str, lasting: str = "0", asked: Changing = CHANGING) -> int:
    """Keep pages from being evicted: those of the keys, or all that the namespace has by now.

    Exit status 1 when one of the keys is not in memory, or has no room among the pins.

    Args:
        namespace: The pages' namespace, as `ems list` shows it.
        keys: Keys of 32 hex digits, consecutive blocks.
        lasting: How long, such as 15m or 12h, a day at most; 0 is a day.
    """
    seconds = parse_duration(lasting, name="--lasting")
    if seconds > MAX_PIN_SECONDS:
        raise ConfigError(f"--lasting is {lasting!r}, expected a day at most; pin again before it is over")
    return _pin(Pin(namespace, parse_keys(keys), seconds=seconds), "pin", asked)


def unpin(namespace: str, /, *keys: str, asked: Changing = CHANGING) -> int:
    """Let pinned pages be evicted again: those of the keys, or all of the namespace.

    Exit status 1 when one of the keys is not pinned.

    Args:
        namespace: The pages' namespace, as `ems list` shows it.
        keys: Keys of 32 hex digits.
    """
    return _pin(Pin(namespace, parse_keys(keys), pinned=False), "unpin", asked)


def parse_keys(keys: tuple[str, ...]) -> bytes:
    raw = b""
    for key in keys:
        try:
            one = bytes.fromhex(key)
        except ValueError:
            one = b""
        if len(one) != KEY_BYTES:
            raise ConfigError(f"{key[:80]!r} is no key, expected {2 * KEY_BYTES} hex digits")
        raw += one
    return raw


def _pin(act: Pin, verb: str, asked: Changing) -> int:
    report = ask(asked.at, act, dry_run=asked.dry_run)
    wanted = len(set(split_keys(act.keys)))
    missing = max(wanted - report["pages"] - report["refused"], 0)
    if asked.json:
        print_json({**report, "dry_run": asked.dry_run})
    else:
        done = f"would {verb}" if asked.dry_run else f"{verb}ned"
        say(
            f"{done} {counted(report['pages'], 'page')}; of the namespace {counted(report['pinned'], 'page')} "
            f"{'is' if report['pinned'] == 1 else 'are'} pinned"
        )
    if missing:
        verb = "is" if missing == 1 else "are"
        why = "not in memory, look with `ems show KEY`" if act.pinned else "not pinned"
        complain(f"{missing} of {counted(wanted, 'key')} {verb} {why}")
    if report["refused"]:
        complain(f"{counted(report['refused'], 'page')} more would be over half of the namespace's room")
    return 1 if missing or report["refused"] else 0


def warm(
    namespace: str | None = None,
    *keys: str,
    prompt: str | None = None,
    model: str | None = None,
    tenant: str | None = None,
    tokens: Tokens = None,
    limit: str | None = None,
    asked: Changing = CHANGING,
) -> int:
    """Bring pages from a lower tier into memory: a namespace or a model, single pages, or a prompt's full blocks.

    Whole namespaces come up what was used last first, as far as memory has room: nothing leaves for them.

    Args:
        namespace: The pages' namespace, all of it without keys; with a prompt, by default all that engines described.
        keys: Keys of 32 hex digits, consecutive blocks.
        prompt: The text of a prompt, as the engine sees it after its chat template.
        model: All namespaces of this model, as `ems list` calls it; with --prompt the folder with its tokenizer.json.
        tenant: All namespaces of this tenant.
        tokens: File with the token ids of a prompt, as a JSON list or separated by spaces; - for standard input.
        limit: Most bytes of whole namespaces that are brought up, such as 20GB.
    """
    if prompt is not None and tokens is not None:
        raise ConfigError("give one of --prompt and --tokens")
    of_prompt = prompt is not None or tokens is not None
    if keys and (of_prompt or namespace is None):
        raise ConfigError("give keys after their namespace, without --prompt and --tokens")
    if not keys and not of_prompt:
        return _whole(namespace, model, tenant, limit, asked)
    if limit is not None or tenant is not None or (keys and model is not None):
        raise ConfigError("--limit, --tenant and a model's name are for whole namespaces, leave them out")
    if keys:
        wanted = [(namespace or "", parse_keys(keys))]
    else:
        ids = ids_of(prompt, None if model is None else Path(model), tokens)
        with connected(asked.at) as client:
            planes = [one for one in described_planes(client) if namespace in (None, one.namespace, one.identity)]
        if not planes:
            raise PoolRefused(
                "no engine has described such a layout to this node: send one a request, or give namespace and keys"
            )
        wanted = []
        for plane in planes:
            chain = plane.chain()
            chain.extend(ids)
            wanted.append((plane.namespace, plane.keys(chain)))
    most = MAX_KEYS * KEY_BYTES
    reports = [
        {"namespace": name, **ask(asked.at, Warm(name, raw[start : start + most]), dry_run=asked.dry_run)}
        for name, raw in wanted
        for start in range(0, len(raw), most)
    ]
    if asked.json:
        print_json({"namespaces": reports})
        return 0
    for report in reports:
        rest = "would be asked for" if asked.dry_run else f"{report['on_their_way']} on their way"
        say(f"{report['namespace']}: {report['pages']} pages, {report['in_memory']} in memory, {rest}")
    return 0


def _whole(namespace: str | None, model: str | None, tenant: str | None, limit: str | None, asked: Changing) -> int:
    """Bring up whole namespaces; exit status 1 when a tier that was to be read does not work."""
    if namespace is None and model is None and tenant is None:
        raise ConfigError("give a namespace, --model or --tenant, or one of --prompt and --tokens")
    most = 0 if limit is None else parse_size(limit, name="--limit")
    report = ask(asked.at, Refill(tenant, model, namespace, most), dry_run=asked.dry_run)
    if asked.json:
        print_json(report)
    else:
        _tell_whole(report, dry_run=asked.dry_run)
    for tier in report["tiers"]:
        complain(f"nothing more comes from {tier['name']}, {tier['reason']}")
    return 1 if report["tiers"] else 0


def _tell_whole(report: dict[str, Any], *, dry_run: bool) -> None:
    for row in report["namespaces"]:
        size = format_size(row["bytes"])
        came = f"at most {row['pages']} pages ({size}) would come" if dry_run else f"{row['pages']} pages ({size}) came"
        alone = f", {row['without_prefix']} left below without their prefix" if row["without_prefix"] else ""
        reason = f"; {row['reason']}" if row["reason"] else ""
        say(f"{row['namespace']}: {came}, {row['in_memory']} were in memory{alone}{reason}")
