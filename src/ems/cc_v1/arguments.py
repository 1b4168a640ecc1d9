"""Arguments as callers give them, made into plain ones or refused with a sentence.

Lists, tuples, arrays and tensors are all in use; only whole numbers are taken as such, because a fraction
that is cut off would name another block.
"""

from __future__ import annotations

import math
import operator
from typing import TYPE_CHECKING, Any

from ems.cc_v1.cc_config import CcKvOption
from ems.cc_v1.errors import invalid

if TYPE_CHECKING:
    from collections.abc import Iterable

DAY_SECONDS = 86400.0
"""Longer time-outs are cut to this."""


def whole_numbers(name: str, values: Iterable[Any]) -> list[int]:
    """``values`` as plain integers of any size.

    Raises:
        EmsException: EMS_INVALID_ARGUMENT, it is no sequence of whole numbers.
    """
    plain = values.tolist() if hasattr(values, "tolist") else values
    try:
        return [operator.index(value) for value in plain]
    except TypeError as error:
        raise invalid(f"{name} is not a sequence of whole numbers: {error}") from error


def timeout_of(option: CcKvOption | None) -> float:
    """The time-out of ``option`` in seconds.

    Raises:
        EmsException: EMS_INVALID_ARGUMENT, it is negative or no number.
    """
    given: object = getattr(option or CcKvOption(), "timeout", None)
    if not isinstance(given, int | float) or isinstance(given, bool) or math.isnan(given) or given < 0:
        raise invalid(f"option.timeout is {given!r}, expected milliseconds, at least 0")
    return min(given, DAY_SECONDS * 1000) / 1000
