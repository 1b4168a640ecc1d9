"""Settings of a node: what the command line gives, then what its file has, then the defaults of :class:`NodeConfig`.

A file is TOML whose keys are the names of flags.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ems.cli.usage import did_you_mean
from ems.config import NodeConfig, default_directory, parse_size
from ems.errors import ConfigError
from ems.pool.tiers.settings import absolute_tier

SYSTEM_FILE = Path("/etc/ems/node.toml")
"""What a node reads that is given no other file, where it is there."""


def parse_mode(text: str) -> int:
    try:
        return int(text, 8)
    except ValueError:
        raise ConfigError(f"socket mode is {text!r}, expected an octal mode such as 600 or 666") from None


_KINDS: dict[type | tuple[type, ...], str] = {
    str: "a text in quotes",
    (str, int): 'a size such as "8GB"',
    int: "a whole number",
    (int, float): "a number",
    bool: "true or false",
    list: "a list of texts",
}
_KEYS: dict[str, tuple[str, type | tuple[type, ...], Callable[[Any], Any] | None]] = {
    "dir": ("directory", str, Path),
    "allow-disk": ("allow_disk", bool, None),
    "socket": ("socket", str, Path),
    "socket-mode": ("socket_mode", str, parse_mode),
    "tenants": ("tenants", str, Path),
    "size": ("size", (str, int), parse_size),
    "segment-size": ("segment_size", (str, int), parse_size),
    "high-watermark": ("high_watermark", (int, float), float),
    "eviction-ratio": ("eviction_ratio", (int, float), float),
    "policy": ("policy", str, None),
    "http-host": ("http_host", str, None),
    "http-port": ("http_port", int, None),
    "http-token-file": ("http_token_file", str, Path),
    "http": ("http", bool, None),
    "prefault": ("prefault", bool, None),
    "verify": ("verify", str, None),
    "tier": ("tiers", list, None),
}
"""Of each key: the field of the settings, what it may be in a file, and what makes the one of the other."""


def fields_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the settings that flags give, by key; a variable that is set to nothing is one that is not set."""
    fields: dict[str, Any] = {}
    for key, (field, kind, _) in _KEYS.items():
        if given[key] is not None and given[key] != "":
            fields[field] = parse_size(given[key], name=f"--{key}") if kind == (str, int) else _made(key, given[key])
    return fields


def read_file(path: Path) -> dict[str, Any]:
    """The fields of the settings that a file has; its paths are relative to its folder."""
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path} ({error.strerror}), give another file with --config") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f'{path} is no TOML ({error}), expected lines such as size = "8GB"') from error
    fields: dict[str, Any] = {}
    for key, value in found.items():
        if key not in _KEYS:
            close = did_you_mean(key, _KEYS) or f", expected one of {', '.join(_KEYS)}"
            raise ConfigError(f"{path} has the unknown key {key!r}{close}")
        try:
            field, made = _field(key, value, path.absolute().parent)
        except ConfigError as error:
            raise ConfigError(f"{path}, key {key}: {error}") from error
        fields[field] = made
    try:
        settings(fields)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    return fields


def settings(fields: Mapping[str, Any]) -> NodeConfig:
    directory: Path = fields.get("directory") or default_directory()
    given: dict[str, Any] = {"directory": directory, "socket": directory / "node.sock", **fields}
    if not given.pop("http", True):
        given["http_port"] = None
    return NodeConfig(**given)


def _field(key: str, value: Any, folder: Path) -> tuple[str, Any]:
    field, kind, _ = _KEYS[key]
    texts = isinstance(value, list) and all(isinstance(one, str) for one in value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool) or (kind is list and not texts):
        raise ConfigError(f"{value!r} is given, expected {_KINDS[kind]}")
    made = _made(key, value, folder)
    # Others can be let in beside a file of tenants alone, which may be named elsewhere.
    settings({field: made, "tenants": folder} if field == "socket_mode" else {field: made})
    return field, made


def _made(key: str, value: Any, folder: Path = Path()) -> Any:
    """The setting that the value of a key means; relative paths are in ``folder``."""
    convert = _KEYS[key][2]
    made = value if convert is None else convert(value)
    if isinstance(made, Path):
        return folder / made
    return tuple(absolute_tier(text, folder) for text in made) if isinstance(made, list) else made
