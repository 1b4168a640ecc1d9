"""Flags that verbs have in common, each described once.

A verb takes a whole group as its last argument; to whoever types they are flags like the others.  The annotations are
real ones, not texts: groups of other modules that build on these inherit them, and have other names in sight.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

Output = Literal["table", "json"]
Socket = Annotated[Path | None, Parameter(env_var="EMS_SOCKET")]
Format = Annotated[Output, Parameter(name=["--output", "-o"])]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Asking:
    """Which node is asked, and for whom the answer is."""

    socket: Socket = None
    """The node's Unix socket, default that of this user's node."""
    output: Format = "table"
    """Tables and sentences for people, or JSON for scripts."""

    @property
    def json(self) -> bool:
        """Whether a script reads the answer."""
        return self.output == "json"


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Changing(Asking):
    """The same for a verb that changes something."""

    dry_run: Annotated[bool, Parameter(negative="")] = False
    """Only say what would be done."""


ASKING = Asking()
CHANGING = Changing()
