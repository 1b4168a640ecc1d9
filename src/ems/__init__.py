"""EMS: a shared KV-cache pool behind LLM inference engines.

These names are the SDK's contract; engine integrations import them and nothing else.  They are looked up when
they are first used, so that ``import ems`` stays cheap: an engine pays for it in each of its processes, with or
without a pool.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ems.cc_v1.cc_config import CcConfig_v1, CcKvOption, EmsConfig
    from ems.cc_v1.ems import Ems
    from ems.cc_v1.errors import EmsErrorCode, EmsException
    from ems.version import __version__

__all__ = ["CcConfig_v1", "CcKvOption", "Ems", "EmsConfig", "EmsErrorCode", "EmsException", "__version__"]

_HOMES = {
    "CcConfig_v1": "ems.cc_v1.cc_config",
    "CcKvOption": "ems.cc_v1.cc_config",
    "Ems": "ems.cc_v1.ems",
    "EmsConfig": "ems.cc_v1.cc_config",
    "EmsErrorCode": "ems.cc_v1.errors",
    "EmsException": "ems.cc_v1.errors",
    "__version__": "ems.version",
}


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
