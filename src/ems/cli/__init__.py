"""The ``ems`` command; the file of a verb is imported when the verb is called.

What always holds, whatever the verb does: data goes to stdout and everything else to stderr; a mistake in usage or in
a setting is one sentence and exit status 2, another failure that EMS foresees is one sentence and exit status 1, Ctrl-C
is exit status 130 without a word, except that it stops a server.  A stack trace means a defect in EMS.
"""

from __future__ import annotations

import errno
import inspect
import os
import re
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, get_args

if TYPE_CHECKING:
    from cyclopts import App, ArgumentCollection

__all__ = ["build_app", "main"]

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
_NEGATIVE = re.compile(r"-[0-9][0-9.]*[A-Za-z]+")
"""A size or a time that begins like an option."""
_STDOUT_ERRORS = {errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}

VERBS = {
    "node": ("node:node", "Run the pool node of this host."),
    "status": ("status:status", "Show the pool at a glance."),
    "explain": ("explain:explain", "Say why a prompt, a request or a key was a miss."),
    "list": ("status:listing", "List what the pool holds: namespaces, models or tenants."),
    "show": ("status:show", "Show a namespace or a page."),
    "clear": ("pages:clear", "Take pages out of the pool: memory and tiers."),
    "pin": ("pages:pin", "Keep pages from being evicted."),
    "unpin": ("pages:unpin", "Let pinned pages be evicted again."),
    "warm": ("pages:warm", "Bring pages from a lower tier into memory."),
    "drain": ("lifecycle:drain", "Let the node take nothing new in, and stop it if wished."),
    "resize": ("lifecycle:resize", "Give the running pool another size."),
    "health": ("status:health", "Say what is well with the node and what is not."),
    "stop": ("lifecycle:stop", "Stop the pool node of this host."),
    "upgrade": ("lifecycle:upgrade", "Let the running node become the installed release."),
    "simulate": ("simulate:simulate", "Simulate a pool over many hosts, fed by a trace."),
    "completion": ("usage:completion", "Print the completion of a shell."),
    "doctor": ("doctor:doctor", "Check this host before anything is deployed on it."),
    "fsck": ("fsck:fsck", "Check a tier below memory and mend it."),
    "router": ("router:router", "Run the OpenAI-compatible router in front of prefill and decode servers."),
}
"""Each verb with its function and what lists say of it."""
GROUPS = {
    "tenant": (
        "Who may use a node, and how much of its pool.",
        {
            "add": ("tenant:add", "Let somebody in."),
            "list": ("tenant:list_", "List the tenants."),
            "show": ("tenant:show", "Show one tenant and its keys."),
            "set": ("tenant:set_", "Change a tenant's quota."),
            "remove": ("tenant:remove", "Remove a tenant, its keys and its pages."),
        },
    ),
    "key": (
        "Access keys of tenants.",
        {
            "add": ("tenant:add_key", "Make a key; it is shown this once."),
            "list": ("tenant:list_keys", "List a tenant's keys."),
            "rotate": ("tenant:rotate_key", "Make a key; the others go on for a while."),
            "revoke": ("tenant:revoke_key", "End a key, and the connections that it opened, at once."),
        },
    ),
    "bench": (
        "Measure the pool and what it gains.",
        {
            "pool": ("bench:pool", "Throughput and latency of the pool beside plain memcpy."),
            "router": ("bench:router", "CPU and latency of the router, beside others in front of the same stubs."),
            "tier": ("bench:tier", "A directory tier beside plain I/O on the same disk."),
            "ttft": ("bench:ttft", "Time to first token in three steps on two servers."),
            "trace": ("bench:trace", "Replay a trace: which policy hits how often."),
        },
    ),
}
ALIASES = {"router": ["router", "proxy"]}
ARGUMENTS = {
    "pin": "NAMESPACE [KEYS...]",
    "unpin": "NAMESPACE [KEYS...]",
    "warm": "[NAMESPACE] [KEYS...]",
    "resize": "[SIZE]",
}
"""Arguments that may be left out, which the parser calls ARGS."""


def build_app(tokens: Sequence[str] = ()) -> App:
    """Return the application for a command line; no module of a verb is imported yet.

    The verb that ``tokens`` call is described by its own docstring, which is longer.
    """
    from cyclopts import App

    from ems.version import __version__

    app = App(
        name="ems",
        help="Elastic memory service: a shared KV-cache pool, a router and their tools for LLM inference engines.",
        version=__version__,
        version_flags=["--version"],
        help_format="plaintext",
        exit_on_error=False,
        print_error=False,
        suppress_keyboard_interrupt=False,
        config=_check_whole_numbers,
    )

    def add(to: App, verbs: dict[str, tuple[str, str]], called: Sequence[str]) -> None:
        for name, (function, text) in verbs.items():
            names = ALIASES.get(name, [name])
            path = f"ems.cli.{function}"
            arguments = ARGUMENTS.get(name)
            usage = arguments and f"Usage: ems {name} [OPTIONS] {arguments}\n"
            to.command(
                path, name=names, usage=usage, help=_description(path) if called and called[0] in names else text
            )

    add(app, VERBS, tokens)
    for name, (text, verbs) in GROUPS.items():
        group = App(name=name, help=text)
        add(group, verbs, tokens[1:] if tokens[:1] == [name] else ())
        app.command(group)
    return app


def _check_whole_numbers(_: App, __: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """The parser would round fractions."""
    from cyclopts import CoercionError

    def kinds(hint: Any) -> set[Any]:
        return {hint}.union(*map(kinds, get_args(hint)))

    for argument in arguments:
        for token in argument.tokens:
            if "." in token.value and int in kinds(argument.hint):
                raise CoercionError(token=token, argument=argument, target_type=int)


def _description(path: str) -> str:
    """The docstring of a verb's function up to its parameters, with a line for each paragraph."""
    module, _, name = path.partition(":")
    text = inspect.getdoc(getattr(import_module(module), name)) or ""
    paragraphs = text.partition("\n\nArgs:\n")[0].split("\n\n")
    return "\n\n".join(" ".join(one.split()) for one in paragraphs)


def main(tokens: Sequence[str] | None = None) -> None:
    status = EXIT_INTERRUPTED
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by whoever started this
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8"))
    try:
        status = run(sys.argv[1:] if tokens is None else tokens)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # what is left to do is short and has nothing to say
    except KeyboardInterrupt:
        pass  # another one, while the first was obeyed
    sys.exit(status)


def run(tokens: Sequence[str]) -> int:
    try:
        outcome = _call(tokens)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except OSError as error:
        if error.errno not in _STDOUT_ERRORS:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter writes there again at exit
        if error.errno != errno.EPIPE:  # else its reader has gone
            from ems.cli.shown import complain

            complain(f"cannot write ({error.strerror}), make room or send stdout elsewhere")
        return EXIT_FAILURE
    return outcome if isinstance(outcome, int) and not isinstance(outcome, bool) else 0


def _call(tokens: Sequence[str]) -> object:
    # Loading these takes long enough to be interrupted.
    from cyclopts import CycloptsError

    from ems.cli.shown import complain
    from ems.cli.usage import sentence
    from ems.errors import ConfigError, EmsError

    try:
        _check_text(tokens)
        joined = _with_negatives(tokens)
        return build_app(joined)(joined, result_action="return_value")
    except CycloptsError as error:
        complain(sentence(error))
        return EXIT_USAGE
    except EmsError as error:
        complain(" ".join(str(error).split()).removesuffix("."))
        return EXIT_USAGE if isinstance(error, ConfigError) else EXIT_FAILURE


def _with_negatives(tokens: Sequence[str]) -> list[str]:
    """Join a negative value to its option, whose own words refuse it."""
    joined: list[str] = []
    for token in tokens:
        if _NEGATIVE.fullmatch(token) and joined and joined[-1].startswith("--") and len(joined[-1]) > 2:
            joined[-1] += f"={token}"
        else:
            joined.append(token)
    return joined


def _check_text(tokens: Sequence[str]) -> None:
    """Bytes that are no UTF-8 come as halves of characters, which nothing that is sent or written can have."""
    from ems.errors import ConfigError

    for token in tokens:
        if not token.isascii() and any("\ud800" <= letter <= "\udfff" for letter in token):
            shown = token.encode(errors="backslashreplace").decode()
            raise ConfigError(f"the argument {shown} is not in UTF-8, give another name")
