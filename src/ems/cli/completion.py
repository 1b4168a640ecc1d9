"""``ems completion``: what a shell needs to complete verbs and flags."""

from __future__ import annotations

from typing import Literal


def completion(shell: Literal["bash", "zsh", "fish"], /) -> None:
    """Print the completion of a shell, for a file from which it reads such: ems completion bash > FILE.

    Parameters
    ----------
    shell
        Whose completion it is.
    """
    from ems.cli import build_app

    print(build_app().generate_completion(shell=shell))
