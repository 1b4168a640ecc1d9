"""What ``--tier`` means: a place below memory and how it is used, in the form of an address.

::

    dir:/var/cache/ems?size=100GB&ttl=7d
    s3://bucket/prefix?endpoint=https://obs.example.com&region=eu-1
    mooncake:/etc/mooncake.json?write=on_second_use

A brain.  Names and values that make no sense are refused with one sentence.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit, urlunsplit

import msgspec

from ems.config import MIB, parse_duration, parse_size
from ems.errors import ConfigError

_PARSERS: dict[str, Callable[..., object]] = {
    **dict.fromkeys(("size", "queue", "batch"), parse_size),
    **dict.fromkeys(("ttl", "timeout", "refresh"), parse_duration),
}
_PATHS = ("key", "seal_key")
_PACKS, _CLUSTER = ("dir", "s3"), ("mooncake",)
_ONLY_FOR = {
    **dict.fromkeys(("endpoint", "region", "style"), ("s3",)),
    **dict.fromkeys(("size", "ttl", "compress", "element", "key"), _PACKS),
    **dict.fromkeys(("replicas", "placement", "local_only", "copy_ahead"), _CLUSTER),
    "sync": ("dir",),
}
_WHEN = {"on_save": 0, "on_second_use": 1, "on_evict": 2}
_ENDPOINT = re.compile(r"https?://[A-Za-z0-9._\-\[\]:]+/?")
MAX_BATCH = 512 * MIB
"""A check of a pack reads it whole, at most 1 GiB: what lies behind that would look damaged."""
MAX_THREADS = 64
MAX_REPLICAS = 16


class TierConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One tier below memory."""

    kind: Literal["dir", "s3", "mooncake"]
    place: str
    """A folder, ``bucket/prefix``, or Mooncake's file of settings (empty: its environment variables)."""
    size: int = 0
    """Bytes that it may take; 0: half of what is free in a folder, no limit in a bucket."""
    ttl: float = 0.0
    """Seconds after which what nobody used is removed; 0: never."""
    write: Literal["on_save", "on_second_use", "on_evict", "never"] = "on_save"
    """When pages are written: soon after they were saved, when they are used again, before they would leave memory, or
    not at all."""
    sync: bool = False
    """Wait for the disk before a page counts as stored; without, a crash of the host may cost the last seconds."""
    compress: Literal["none", "zstd"] = "none"
    """``zstd`` shuffles bytes and compresses, where that saves more than a tenth."""
    element: int = 2
    """Bytes of one value of the KV state, for the shuffle."""
    key: Path | None = None
    """File with the secret that pages are encrypted with, or a folder with one ``TENANT.key`` a tenant."""
    seal_key: Path | None = None
    """File with the secret that proves pages to be of nodes that share the tier; None: this host's own, for folders."""
    queue: int = 256 * MIB
    """Most bytes that wait to be written; what comes on top is not written."""
    batch: int = 16 * MIB
    """Bytes that are written in one go."""
    readers: int = 4
    """Reads at the same time."""
    timeout: float = 10.0
    """Seconds after which a read or write counts as hung, and the tier is left alone."""
    refresh: float = 0.0
    """How long what another node wrote may stay unknown, in seconds; 0: 10 for a folder, 60 for a bucket."""
    endpoint: str = ""
    """Of an object store that is not Amazon's."""
    region: str = ""
    style: Literal["path", "virtual"] = "path"
    """Whether the bucket is part of the path or of the host name."""
    replicas: int = 1
    """How many hosts of a cluster keep a page."""
    placement: Literal["own", "any"] = "own"
    """Where in a cluster pages are kept: in the memory that this host gives, as long as there is room, or anywhere."""
    local_only: bool = False
    """Whether pages are only written to a cluster, and never fetched from it."""
    copy_ahead: Literal["never", "on_save", "on_second_use"] = "on_second_use"
    """Which pages the hosts of a cluster copy from each other before they are asked for them: what another one saved,
    or what it used again."""

    def __post_init__(self) -> None:
        if not 1 <= self.readers <= MAX_THREADS:
            raise ConfigError(f"a tier has {self.readers} readers, expected 1 to {MAX_THREADS}")
        if self.element not in {1, 2, 4, 8}:
            raise ConfigError(f"a tier has elements of {self.element} bytes, expected 1, 2, 4 or 8")
        if self.timeout <= 0:
            raise ConfigError(f"timeout of a tier is {self.timeout} s, expected a positive time such as 10s")
        if self.endpoint and not _ENDPOINT.fullmatch(self.endpoint):
            raise ConfigError(f"endpoint of a tier is {self.endpoint!r}, expected an address such as https://host:port")
        if self.key is not None and self.seal_key is not None:
            raise ConfigError("a tier has key= and seal_key=, give one: what is encrypted needs no other seal")
        if not 1 <= self.replicas <= MAX_REPLICAS:
            raise ConfigError(f"a tier has {self.replicas} replicas, expected 1 to {MAX_REPLICAS}")
        if self.batch > MAX_BATCH:
            raise ConfigError(f"the batch of a tier has {self.batch} bytes, expected at most 512MiB")
        if self.batch > self.queue:
            raise ConfigError("the batch of a tier is larger than its queue, give a smaller batch or a larger queue")

    @property
    def copies_ahead(self) -> bool:
        """Whether hosts copy from each other: what they tell of must be in the cluster by then."""
        return self.copy_ahead != "never" and (self.write == "never" or _WHEN[self.write] <= _WHEN[self.copy_ahead])

    @property
    def refresh_seconds(self) -> float:
        return self.refresh or (60.0 if self.kind == "s3" else 10.0)

    @property
    def name(self) -> str:
        """What people and metrics call the tier; never has secrets in it."""
        return f"s3://{self.place}" if self.kind == "s3" else f"{self.kind}:{self.place}"


_CHOICES = {name: get_args(hint) for name, hint in get_type_hints(TierConfig).items() if get_origin(hint) is Literal}


def parse_tier(text: str) -> TierConfig:
    """The tier that ``text`` names.  Raises ConfigError: it names none, with the reason."""
    try:
        parts = urlsplit(text)
    except ValueError as error:
        raise ConfigError(f"the tier {text!r} is no address: {error}") from error
    kind, place = _place(parts.scheme, parts.netloc, parts.path, text)
    values: dict[str, object] = {}
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        if name in values:
            raise ConfigError(f"the address of a tier names {name} twice, give it once")
        values[name] = _value(name, value, kind)
    for name in values:
        if kind not in _ONLY_FOR.get(name, kind):
            raise ConfigError(f"{name} is for tiers of the kind {' or '.join(_ONLY_FOR[name])} only, leave it out")
    try:
        config = msgspec.convert({"kind": kind, "place": place, **values}, TierConfig, strict=False)
    except msgspec.ValidationError as error:
        reason, _, name = str(error).removesuffix("`").partition(" - at `$.")
        said = f"{name} of a tier is {values.get(name)!r}" if name in values else f"the tier {kind}:… makes no sense"
        raise ConfigError(f"{said}: {reason[0].lower()}{reason[1:]}") from error
    if values.get("copy_ahead", "never") != "never" and not config.copies_ahead:
        raise ConfigError(
            f"copy_ahead is {config.copy_ahead} and write is {config.write}, so others would be told of pages that the "
            f"cluster has not got yet; give write={config.copy_ahead} or copy_ahead=never"
        )
    return config


def absolute_tier(text: str, folder: Path) -> str:
    """``text`` with its relative paths taken from ``folder``: a node may run in another one than who starts it.

    Raises ConfigError: it names no tier.
    """
    kind = parse_tier(text).kind
    parts = urlsplit(text)
    fields = parse_qsl(parts.query, keep_blank_values=True)
    named = [(name, str(folder.absolute() / value) if name in _PATHS else value) for name, value in fields]
    local = kind != "s3" and parts.path
    path = quote(str(folder.absolute() / unquote(parts.path))) if local else parts.path
    return urlunsplit(parts._replace(path=path, query=urlencode(named, safe="/:")))


def _place(scheme: str, netloc: str, path: str, text: str) -> tuple[str, str]:
    if scheme in {"dir", "file"} and not netloc and path:
        return "dir", str(Path(unquote(path)).absolute())
    if scheme == "s3" and netloc:
        return "s3", "/".join([netloc, *unquote(path).strip("/").split("/")]).rstrip("/")
    if scheme == "mooncake" and not netloc:
        return "mooncake", str(Path(unquote(path)).absolute()) if path else ""
    raise ConfigError(
        f"the tier is {text!r}, expected dir:/folder, s3://bucket/prefix or mooncake:/etc/mooncake.json, with "
        "?name=value&name=value"
    )


def _value(name: str, text: str, kind: str) -> object:
    """What ``text`` says of the setting ``name`` of a tier of this ``kind``, as far as its type does not say it."""
    settings = TierConfig.__struct_fields__[2:]
    if name not in settings:
        known = [one for one in settings if kind in _ONLY_FOR.get(one, kind)]
        near = difflib.get_close_matches(name, known, 1)
        raise ConfigError(
            f"a tier of the kind {kind} has no setting {name!r}, "
            f"{f'did you mean {near[0]}' if near else 'known are ' + ', '.join(known)}"
        )
    choices = _CHOICES.get(name)
    if choices is not None and text not in choices:
        raise ConfigError(f"{name} of a tier is {text!r}, expected {', '.join(choices[:-1])} or {choices[-1]}")
    if name in _PARSERS:
        return _PARSERS[name](text, name=name)
    if name in _PATHS and not text:
        raise ConfigError(f"{name} of a tier names no file, expected one such as {name}=/etc/ems/tier.key")
    return Path(text).absolute() if name in _PATHS else text
