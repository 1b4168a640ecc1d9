"""What the JSON of ``MooncakeConnectorV1`` means for a transport connector of vLLM: its keys, checks and ports.

Knows neither vLLM nor sockets.  A wrong value is refused with a sentence that names key, value and expectation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from ems.errors import ConfigError
from ems.vllm.configuration.setting_values import SettingReader
from ems.vllm.configuration.settings import ROLES, WITHOUT_MEANING, ignored_keys

_SIDES = {"kv_producer": "prefill", "kv_consumer": "decode"}


class Parallelism(msgspec.Struct, frozen=True, kw_only=True):
    """How an engine is run."""

    tp_size: int = 1
    dp_size: int = 1
    pp_size: int = 1


def read_transport(
    kv_role: str | None, extra: Mapping[str, Any], own: Parallelism, keys: Iterable[str]
) -> tuple[dict[str, Any], list[str]]:
    """The settings that are among the transport's ``keys``, and a sentence for each thing that is ignored.

    Raises:
        ConfigError: a value is wrong, or the sizes do not fit this engine or each other.
    """
    if kv_role not in ROLES:
        raise ConfigError(f"kv_role is {kv_role!r}, expected {', '.join(ROLES[:-1])} or {ROLES[-1]}")
    sides = check_sizes(extra)
    name = _SIDES.get(kv_role, "")
    declared = sides.get(name)
    if declared is not None:
        _check_own(name, declared, own)
    passed = set(keys)
    known = passed | {"prefill", "decode"}
    said = ignored_keys(extra, known, WITHOUT_MEANING - known, "MooncakeConnectorV1")
    return {key: value for key, value in extra.items() if key in passed}, said


def check_sizes(extra: Mapping[str, Any]) -> dict[str, Parallelism | None]:
    """What can be told of both sides without an engine.

    Raises:
        ConfigError: a value is wrong, or the sizes do not fit each other.
    """
    sides = {name: _side(extra, name) for name in _SIDES.values()}
    prefill, decode = sides.values()
    if decode is not None and decode.pp_size != 1:
        raise ConfigError(f"decode.pp_size is {decode.pp_size}, expected 1: a decode runs in one pipeline stage")
    if prefill is not None and decode is not None:
        larger, smaller = max(prefill.tp_size, decode.tp_size), min(prefill.tp_size, decode.tp_size)
        if larger % smaller:
            raise ConfigError(
                f"prefill.tp_size is {prefill.tp_size} and decode.tp_size is {decode.tp_size}, expected one to be a "
                "multiple of the other"
            )
    return sides


def _side(extra: Mapping[str, Any], name: str) -> Parallelism | None:
    given = extra.get(name)
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise ConfigError(f'{name} is {given!r}, expected sizes such as {{"tp_size": 1, "dp_size": 1}}')
    reader = SettingReader({f"{name}.{key}": value for key, value in given.items()}, {})
    sizes = {
        key: reader.count(f"{name}.{key}", what="ranks", least=1, default=1)
        for key in ("tp_size", "dp_size", "pp_size")
    }
    return Parallelism(**sizes)


def _check_own(name: str, declared: Parallelism, own: Parallelism) -> None:
    flags = {
        "tp_size": "--tensor-parallel-size",
        "pp_size": "--pipeline-parallel-size",
        "dp_size": "--data-parallel-size",
    }
    for key, flag in flags.items():
        says, runs = getattr(declared, key), getattr(own, key)
        # An engine of a dense model knows itself as one of one, however many run beside it.
        if says != runs and not (key == "dp_size" and runs == 1):
            raise ConfigError(f"{name}.{key} is {says}, but this engine runs with {flag} {runs}; make them equal")


def unique_engine_id(engine_id: str, kv_role: str, instance: str) -> str:
    """A name for one start of one engine.

    Deployed files give both sides the same ``engine_id``, and a restarted engine gets it again; a transport tells its
    peers apart by it and must not take one for another, nor a new one for the old.  ``instance`` is equal in all
    processes of one start.
    """
    return f"{engine_id}-{kv_role}-{instance}"
