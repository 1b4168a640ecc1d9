"""``ems warm``: bring pages from a lower tier into memory: whole namespaces, by their keys, or by a prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ems.cli.acts import ask, connected
from ems.cli.explain import described_planes, ids_of
from ems.cli.options import CHANGING, Changing
from ems.cli.pin import parse_keys
from ems.cli.shown import complain, print_json, say
from ems.config import format_size, parse_size
from ems.errors import ConfigError, PoolRefused
from ems.pool.keys import KEY_BYTES, KeyChain
from ems.pool.protocol.acts import Refill, Warm
from ems.pool.protocol.limits import MAX_KEYS
from ems.vllm.planes import page_keys


def warm(
    namespace: str | None = None,
    *keys: str,
    prompt: str | None = None,
    model: str | None = None,
    tenant: str | None = None,
    tokens: Path | None = None,
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
            raise PoolRefused("no engine has described such a layout to this node, give the namespace and the keys")
        wanted = []
        for plane in planes:
            chain = KeyChain(plane.identity, plane.chunk_tokens)
            chunks = chain.extend(ids)
            wanted.append((plane.namespace, page_keys(chain.packed(0, chunks), plane.shards)))
    most = MAX_KEYS * KEY_BYTES
    reports = [
        {"namespace": name, **ask(asked.at, Warm(name, raw[start : start + most]), dry_run=asked.dry_run)}
        for name, raw in wanted
        for start in range(0, len(raw), most)
    ]
    if asked.json:
        print_json({"namespaces": reports})
    else:
        _tell(reports, dry_run=asked.dry_run)
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


def _tell(reports: list[dict[str, Any]], *, dry_run: bool) -> None:
    for report in reports:
        rest = "would be asked for" if dry_run else f"{report['on_their_way']} on their way"
        say(f"{report['namespace']}: {report['pages']} pages, {report['in_memory']} in memory, {rest}")
