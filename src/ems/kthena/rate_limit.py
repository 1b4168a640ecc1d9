"""How many tokens are allowed in a unit of time."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Final

import msgspec

from ems.errors import ConfigError


class Unit(StrEnum):
    """A span of time that a limit counts in; a month has 30 days."""

    SECOND = "second"
    MINUTE = "minute"
    HOUR = "hour"
    DAY = "day"
    MONTH = "month"

    @property
    def seconds(self) -> int:
        return _SECONDS[self]


_SECONDS: Final = {Unit.SECOND: 1, Unit.MINUTE: 60, Unit.HOUR: 3600, Unit.DAY: 86400, Unit.MONTH: 30 * 86400}
Tokens = Annotated[int, msgspec.Meta(ge=1)]


class RateLimit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """Kthena's ``rateLimit``: tokens of prompts and of answers in a unit of time; what is not given is not limited.

    :raises ConfigError: it limits nothing.
    """

    input_tokens_per_unit: Tokens | None = None
    output_tokens_per_unit: Tokens | None = None
    unit: Unit = Unit.SECOND

    def __post_init__(self) -> None:
        if self.input_tokens_per_unit is None and self.output_tokens_per_unit is None:
            raise ConfigError("A rate limit needs inputTokensPerUnit, outputTokensPerUnit or both")
