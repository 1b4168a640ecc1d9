"""Flags that verbs have in common, each described once.

A verb takes a whole group as its last argument; to whoever types they are flags like the others.  The annotations are
real ones, not texts: groups of other modules that build on these inherit them, and have other names in sight.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from ems.config import default_socket
from ems.errors import ConfigError


def _seconds(_: object, value: float) -> None:
    if not 0 <= value < math.inf:
        raise ValueError("seconds, 0 or more")


Output = Literal["table", "json"]
Socket = Annotated[Path | None, Parameter(env_var="EMS_SOCKET")]
Format = Annotated[
    Output, Parameter(name=["--output", "-o"], help="Tables and sentences for people, or JSON for scripts.")
]
Seconds = Annotated[float, Parameter(validator=_seconds)]
Tokens = Annotated[Path | None, Parameter(allow_leading_hyphen=True)]
"""A file of token ids, or ``-``."""
Flag = Annotated[bool, Parameter(negative="", show_default=False)]
"""A flag whose absence means no."""
Texts = Annotated[list[str] | None, Parameter(negative="")]
"""A flag that may be repeated."""


def parse_counts(text: str, name: str) -> tuple[int, ...]:
    if not all(part.strip().isdecimal() for part in text.split(",")):
        raise ConfigError(f"{name} is {text!r}, expected whole numbers separated by commas, such as 128,1024")
    return tuple(int(part) for part in text.split(","))


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Asking:
    """Which node is asked, and for whom the answer is."""

    socket: Socket = None
    """The node's Unix socket, default that of this user's node."""
    output: Format = "table"

    @property
    def json(self) -> bool:
        return self.output == "json"

    @property
    def at(self) -> Path:
        """The socket that is meant; a variable that is set to nothing is one that is not set."""
        return self.socket if self.socket not in (None, Path()) else default_socket()


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Changing(Asking):
    """The same for a verb that changes something."""

    dry_run: Flag = False
    """Only say what would be done."""


ASKING = Asking()
CHANGING = Changing()
