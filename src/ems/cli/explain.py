"""``ems explain``: why a prompt, a request or a page was a miss, as its node knows it."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from ems.cli.acts import connected
from ems.cli.options import ASKING, Asking, Tokens
from ems.cli.shown import present_facts
from ems.cli.status import because, show
from ems.errors import ConfigError, PoolRefused
from ems.pool.administration.selection import model_of, tenant_of
from ems.pool.client.answers import Namespace
from ems.pool.client.pool_client import PoolClient
from ems.pool.keys import KEY_BYTES, page_keys
from ems.pool.prompts import DescribedPlane, described_plane
from ems.pool.protocol.acts import List, Show
from ems.pool.protocol.limits import MAX_KEYS
from ems.pool.reasons.words import Reason

_MISSING = {"first_missing", "reason", "sentence", "detail"}
"""What is said of a prompt that is not there whole."""


def explain(
    *,
    prompt: str | None = None,
    model: Path | None = None,
    tokens: Tokens = None,
    request: str | None = None,
    key: str | None = None,
    namespace: str | None = None,
    asked: Asking = ASKING,
) -> None:
    """Say how much of a prompt is in the pool and why the rest is not; or what a request found; or where a page is.

    Give one of --prompt (with --model), --tokens, --request and --key.  Prompts are looked for in all layouts that
    engines of this host described; those with an adapter, images or a cache salt have other keys and are not found.

    Args:
        prompt: The text of a prompt, as the engine sees it after its chat template.
        model: Folder with the model's tokenizer.json.
        tokens: File with the token ids of a prompt, as a JSON list or separated by spaces; - for standard input.
        request: Id of a request, as the engine or its client knows it (a part that only one has is enough).
        key: Key of a page, 32 hex digits.
        namespace: Only this namespace; it may end after the fingerprint.
    """
    if sum(one is not None for one in (prompt, tokens, request, key)) != 1:
        raise ConfigError("give one of --prompt, --tokens, --request and --key")
    what = request if request is not None else key
    if what is not None:
        show(what, asked=asked)
        return
    ids = ids_of(prompt, model, tokens)
    with connected(asked.at) as client:
        planes = described_planes(client)
        if not planes:
            raise PoolRefused(
                "no engine has described a layout to this node yet, so the names of the prompt's blocks are not known; "
                "send an engine a request, or ask for a --key"
            )
        every = [look(client, plane, ids) for plane in planes]
    tell_of_others(every)
    named = {plane.namespace for plane in planes if namespace in (None, plane.namespace, plane.identity)}
    rows = [row for row in every if row["namespace"] in named]
    if not rows:
        raise PoolRefused(
            f"no engine has described a namespace {namespace} to this node, `ems list` shows what there is"
        )
    present_facts({"tokens": len(ids), "namespaces": rows}, [_prompt_rows(row, len(ids)) for row in rows], asked.output)


def read_tokens(path: Path) -> list[int]:
    try:
        text = sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read tokens from {path} ({error.strerror}), name another file") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is no text, expected a JSON list or numbers separated by spaces") from error
    try:
        ids = msgspec.json.decode(text, type=list[int]) if text.lstrip()[:1] == "[" else [int(n) for n in text.split()]
    except (msgspec.DecodeError, ValueError) as error:
        raise ConfigError(
            f"{path} has something else than token ids, expected a JSON list or numbers separated by spaces"
        ) from error
    if not ids:
        raise ConfigError(f"{path} has no token ids, expected a JSON list or numbers separated by spaces")
    return ids


def _tokenize(text: str, model: Path | None) -> list[int]:
    if model is None:
        raise ConfigError("a prompt's text needs its tokenizer, give the model's folder with --model")
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ConfigError("tokenizers is not installed: pip install tokenizers, or give --tokens") from error
    path = model / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"there is no {path}, give the folder of the model's tokenizer with --model")
    ids: list[int] = Tokenizer.from_file(str(path)).encode(text).ids
    return ids


def ids_of(prompt: str | None, model: Path | None, tokens: Path | None) -> list[int]:
    return read_tokens(tokens) if tokens is not None else _tokenize(prompt or "", model)


def described_planes(client: PoolClient) -> list[DescribedPlane]:
    names = [row["namespace"] for row in client.administer(List())["namespaces"]]
    planes = (described_plane(name, client.administer(Show(name))["facts"]) for name in names)
    return [plane for plane in planes if plane is not None]


def look(client: PoolClient, plane: DescribedPlane, ids: list[int]) -> dict[str, Any]:
    """What ``plane`` has of a prompt with the tokens ``ids``; its last chunk is one that need not be full."""
    size = plane.chunk_tokens
    chain = plane.chain()
    full = chain.extend(ids)
    rest = chain.tail(full, ids[full * size :])
    names = chain.packed(0, full) + (rest.key if rest.tokens else b"")
    chunks = len(names) // KEY_BYTES
    name = plane.namespace
    row: dict[str, Any] = {"namespace": name, "tenant": tenant_of(name), "model": model_of(name)}
    row |= {"chunk_tokens": size, "window": plane.window}
    row |= {"chunks": chunks, "leading": 0, "present": 0, "tier": "DRAM", "reasons": {}}
    step = MAX_KEYS // plane.shards
    for start in range(0, chunks, step):
        keys = page_keys(names[start * KEY_BYTES : (start + step) * KEY_BYTES], plane.shards)
        explained = client.explain(name, keys)
        for offset in range(len(explained.codes) // plane.shards):
            codes = explained.codes[offset * plane.shards : (offset + 1) * plane.shards]
            missing = next((code for code in codes if code not in (0, Reason.GAP.code)), 0)
            _count(row, start + offset, missing, explained.detail)
    first: int = row["leading"]
    row["tokens"] = min(first * size, len(ids))
    if first < chunks:
        part = chain.tail(first, ids[first * size : (first + 1) * size])
        with suppress(PoolRefused):  # a node with tenants lets its administrator look nothing up
            row["tokens"] += client.lookup_tail(Namespace(name, 0), part).tokens
    if row["tokens"] == len(ids):  # the rest is the beginning of a longer block, so nothing is missing
        row = {name: value for name, value in row.items() if name not in _MISSING} | {"reasons": {}}
    return row


def tell_of_others(rows: list[dict[str, Any]]) -> None:
    """Where a prompt was never stored but another tenant has it, say so: this is an administrator's view."""
    for row in rows:
        if row.get("reason") not in {Reason.NEVER_STORED.value, Reason.NOT_ASKED.value}:
            continue
        for other in rows:
            same = other["model"] == row["model"] and other["tenant"] != row["tenant"]
            if same and other["leading"] > row["leading"]:
                row["reason"], row["sentence"] = Reason.OTHER_TENANT.value, Reason.OTHER_TENANT.sentence
                row["detail"] = f"{other['namespace']} has {other['tokens']} tokens from the start"


def _count(row: dict[str, Any], chunk: int, code: int, detail: str) -> None:
    if not code:
        row["present"] += 1
        row["leading"] += row["leading"] == chunk
        return
    reason = Reason.of_code(code) or Reason.ABSENT
    row["reasons"][reason.value] = row["reasons"].get(reason.value, 0) + 1
    if "first_missing" not in row:
        row["first_missing"] = chunk
        row |= {"reason": reason.value, "sentence": reason.sentence, "detail": detail}


def _prompt_rows(row: dict[str, Any], tokens: int) -> list[tuple[str, str]]:
    size = row["chunk_tokens"]
    facts = [
        ("namespace", row["namespace"]),
        ("prompt", f"{tokens} tokens, {row['chunks']} chunks of {size}"),
        ("in the pool", f"{row['present']} chunks in {row['tier']}; {row['tokens']} tokens from the start"),
    ]
    if row["window"]:
        facts.append(("window", f"{row['window']} tokens: only the chunks in sight of the next token are needed"))
    if "first_missing" in row:
        first = row["first_missing"]
        facts.append(("missing", f"chunk {first}, tokens {row['tokens']} to {min((first + 1) * size, tokens) - 1}"))
        facts.append(("reason", because(row)))
        counts = sorted(row["reasons"].items(), key=lambda item: -item[1])
        facts.append(("all missing", ", ".join(f"{reason} {count}" for reason, count in counts)))
    return facts
