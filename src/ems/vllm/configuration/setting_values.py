"""Reads single settings of a connector: from its configuration, else from the environment, else the default.

Numbers and booleans may come as strings, as they do in many deployed files; null, and an empty string where a text is
expected, count as absent.  A wrong value is refused with a sentence that names the key or variable, the value and the
expectation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import msgspec

from ems.config import parse_size
from ems.errors import ConfigError

Default = TypeVar("Default", bound=bool | None)
TRUE = ("1", "true", "yes", "on")
FALSE = ("0", "false", "no", "off", "")


class SettingReader:
    """One connector's ``kv_connector_extra_config`` above the environment; remembers which keys were asked for."""

    def __init__(self, extra: Mapping[str, Any], environment: Mapping[str, str]) -> None:
        self._extra = extra
        self._environment = environment
        self.known: set[str] = set()

    def find(self, key: str, *variables: str) -> tuple[str, Any]:
        """The name under which a value was given and the value; the key and None when there is none."""
        self.known.add(key)
        if self._extra.get(key) is not None:
            return key, self._extra[key]
        for variable in variables:
            if self._environment.get(variable):
                return variable, self._environment[variable]
        return key, None

    def text(self, key: str, *variables: str, default: str = "") -> str:
        name, value = self.find(key, *variables)
        if value is None or value == "":
            return default
        if not isinstance(value, (str, int)) or isinstance(value, bool):
            raise ConfigError(f"{name} is {value!r}, expected a text")
        return str(value)

    def secret(self, key: str, *variables: str) -> str:
        """A text that no message shows."""
        name, value = self.find(key, *variables)
        if value is None:
            return ""
        if not isinstance(value, str):
            raise ConfigError(f"{name} is a {type(value).__name__}, expected a text")
        return value

    def choice(self, key: str, choices: Sequence[str], default: str) -> str:
        name, value = self.find(key)
        if value is None:
            return default
        if value not in choices:
            raise ConfigError(f"{name} is {value!r}, expected {' or '.join(map(repr, choices))}")
        return str(value)

    def boolean(self, key: str, *variables: str, default: Default) -> bool | Default:
        name, value = self.find(key, *variables)
        if value is None:
            return default
        text = str(value).strip().lower()
        if text in TRUE:
            return True
        if text in FALSE:
            return False
        raise ConfigError(f"{name} is {value!r}, expected true or false")

    def count(self, key: str, *variables: str, what: str, least: int = 0, default: int = 0) -> int:
        name, value = self.find(key, *variables)
        if value is None:
            return default
        with suppress(msgspec.ValidationError):
            number = msgspec.convert(str(value).strip(), int, strict=False)
            if number >= least:
                return number
        raise ConfigError(f"{name} is {value!r}, expected a whole number of {what} from {least} on")

    def seconds(self, key: str, *variables: str, default_ms: float) -> float:
        name, value = self.find(key, *variables)
        if value is None:
            return default_ms / 1000
        try:
            milliseconds = float(str(value))
        except ValueError:
            raise ConfigError(f"{name} is {value!r}, expected milliseconds as a number") from None
        if not 0 < milliseconds <= 600_000:
            raise ConfigError(f"{name} is {value!r}, expected more than 0 and at most 600000 milliseconds")
        return milliseconds / 1000

    def size(self, key: str, *variables: str) -> int:
        """Bytes; 0 when the setting is absent."""
        name, value = self.find(key, *variables)
        return parse_size(value, name=name) if value else 0
