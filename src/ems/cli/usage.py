"""Help for whoever types: the completion of shells, and mistakes in a command line, each in one sentence."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any, Literal, get_args, get_origin

from cyclopts import (
    App,
    CoercionError,
    CycloptsError,
    MissingArgumentError,
    RepeatArgumentError,
    UnknownCommandError,
    UnknownOptionError,
    UnusedCliTokensError,
    ValidationError,
)

_EXPECTED: dict[Any, str] = {int: "a whole number", float: "a number", bool: "true or false"}


def completion(shell: Literal["bash", "zsh", "fish"], /) -> None:
    """Print the completion of a shell, for a file from which it reads such: ems completion bash > FILE.

    Args:
        shell: Whose completion it is.
    """
    from ems.cli import build_app

    print(build_app().generate_completion(shell=shell))


def sentence(error: CycloptsError) -> str:
    """What is wrong, what was expected, what to do."""
    if isinstance(error, UnknownCommandError):
        return _unknown_verb(error)
    verb = " ".join(("ems", *(error.command_chain or ())))
    mistake = _mistake(error)
    return mistake if mistake.endswith("?") else f"{mistake}; see {verb} --help"


def _mistake(error: CycloptsError) -> str:
    if isinstance(error, UnknownOptionError):
        given = (error.token.keyword or error.token.value).partition("=")[0]
        shown = [argument for argument in error.argument_collection if argument.parse and argument.show]
        known = [name for argument in shown for name in argument.names]
        return f"there is no option {given}{did_you_mean(given, known)}"
    if isinstance(error, UnusedCliTokensError):
        return f"nothing is expected where {' '.join(error.unused_tokens or ())!r} stands, leave it out"
    if isinstance(error, RepeatArgumentError):
        return f"{error.token.keyword} is given more than once, give it once"
    if isinstance(error, MissingArgumentError) and error.argument is not None:
        flag = error.keyword or next((token.keyword for token in error.argument.tokens if token.keyword), None)
        if flag is not None:
            return f"{flag} has no value, give it {_expected(error.argument.hint)}"
        return f"{_name(error)} is missing"
    if isinstance(error, CoercionError) and error.token is not None:
        return (
            f"{error.token.keyword or _name(error)} is {error.token.value!r}, expected {_expected(error.target_type)}"
        )
    if isinstance(error, ValidationError) and error.argument is not None:
        token = error.argument.tokens[0]
        return f"{token.keyword or _name(error)} is {token.value!r}, expected {error.exception_message}"
    error.verbose = False
    return " ".join(str(error).split()).removesuffix(".")


def _name(error: CycloptsError) -> str:
    name = error.argument.name if error.argument is not None else "an argument"
    return name if name.startswith("-") else name.upper()


def _expected(kind: Any) -> str:
    if get_origin(kind) is Literal:
        *others, last = [str(choice) for choice in get_args(kind)]
        return f"{', '.join(others)} or {last}" if others else last
    kinds = [_EXPECTED[one] for one in (kind, *get_args(kind)) if one in _EXPECTED]
    return kinds[0] if kinds else "one"


def _unknown_verb(error: UnknownCommandError) -> str:
    # The parser's own text would import every verb to guess what was meant.
    app, given = error.app, (error.unused_tokens or [""])[0]
    verbs = [name for name in app if not name.startswith("-")] if isinstance(app, App) else []
    chain = " ".join(("ems", *(error.command_chain or ())))
    return f"unknown command {given!r}{did_you_mean(given, verbs) or f'; see {chain} --help'}"


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """``, did you mean ...?`` with what of ``known`` looks like ``given``; nothing where nothing does."""
    close = get_close_matches(given, list(known), 3)
    return f", did you mean {' or '.join(close)}?" if close else ""
