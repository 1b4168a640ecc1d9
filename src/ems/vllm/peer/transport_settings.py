"""What the JSON of ``MooncakeConnectorV1`` means for a transport connector of vLLM: its keys, checks and ports.

Knows neither vLLM nor sockets.  A wrong value is refused with a sentence that names key, value and expectation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ems.errors import ConfigError
from ems.vllm.configuration.setting_values import SettingReader
from ems.vllm.configuration.settings import ROLES, WITHOUT_MEANING, ignored_keys

_SIDES = {"kv_producer": "prefill", "kv_consumer": "decode"}

_FLAGS = {"tp_size": "--tensor-parallel-size", "pp_size": "--pipeline-parallel-size", "dp_size": "--data-parallel-size"}
"""How many ranks of each kind an engine has, by the name in deployed files: vLLM's flags."""


def read_transport(
    kv_role: str | None, extra: Mapping[str, Any], own: Mapping[str, int], keys: Iterable[str]
) -> tuple[dict[str, Any], list[str]]:
    """The settings that are among the transport's ``keys``, and a sentence for each thing that is ignored.

    ``own`` are the sizes of the engine itself, called as in ``prefill`` and ``decode``.

    Raises ConfigError: a value is wrong, or the sizes do not fit this engine or each other.
    """
    if kv_role not in ROLES:
        raise ConfigError(f"kv_role is {kv_role!r}, expected {', '.join(ROLES[:-1])} or {ROLES[-1]}")
    sides = check_sizes(extra)
    name = _SIDES.get(kv_role, "")
    for key, says in (sides.get(name) or {}).items():
        runs, flag = own[key], _FLAGS[key]
        # An engine of a dense model knows itself as one of one, however many run beside it.
        if says != runs and not (key == "dp_size" and runs == 1):
            raise ConfigError(f"{name}.{key} is {says}, but this engine runs with {flag} {runs}; make them equal")
    passed = set(keys)
    known = passed | {"prefill", "decode"}
    said = ignored_keys(extra, known, WITHOUT_MEANING - known, "MooncakeConnectorV1")
    return {key: value for key, value in extra.items() if key in passed}, said


def check_sizes(extra: Mapping[str, Any]) -> dict[str, dict[str, int] | None]:
    """What can be told of both sides without an engine.

    Raises ConfigError: a value is wrong, or the sizes do not fit each other.
    """
    sides = {name: _side(extra, name) for name in _SIDES.values()}
    prefill, decode = sides.values()
    if decode is not None and decode["pp_size"] != 1:
        raise ConfigError(f"decode.pp_size is {decode['pp_size']}, expected 1: a decode runs in one pipeline stage")
    if prefill is not None and decode is not None:
        first, second = prefill["tp_size"], decode["tp_size"]
        if max(first, second) % min(first, second):
            raise ConfigError(
                f"prefill.tp_size is {first} and decode.tp_size is {second}, expected one to be a multiple of the other"
            )
    return sides


def _side(extra: Mapping[str, Any], name: str) -> dict[str, int] | None:
    given = extra.get(name)
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise ConfigError(f'{name} is {given!r}, expected sizes such as {{"tp_size": 1, "dp_size": 1}}')
    reader = SettingReader({f"{name}.{key}": value for key, value in given.items()}, {})
    return {key: reader.count(f"{name}.{key}", what="ranks", least=1, default=1) for key in _FLAGS}
