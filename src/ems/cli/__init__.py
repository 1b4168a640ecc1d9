"""The ``ems`` command: one file a verb, imported when the verb is called.

What always holds, whatever the verb does: data goes to stdout and everything else to stderr; a mistake in usage or in
a setting is one line and exit status 2, another failure that EMS foresees is one line and exit status 1, Ctrl-C is
exit status 130 without a word.  A stack trace means a defect in EMS.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from cyclopts import App, CycloptsError, UnknownCommandError

from ems import __version__
from ems.errors import ConfigError, EmsError

__all__ = ["build_app", "main"]

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


def build_app() -> App:
    """Return the root application; the verbs' modules are not imported yet."""
    app = App(
        name="ems",
        help="Elastic memory service: a shared KV-cache pool, a router and their tools for LLM inference engines.",
        version=__version__,
        version_flags=["--version"],
        help_format="plaintext",
        exit_on_error=False,
        print_error=False,
        suppress_keyboard_interrupt=False,
    )
    app.command("ems.cli.node:node", name="node", help="Run the pool node of this host.")
    app.command("ems.cli.status:status", name="status", help="Show the pool at a glance.")
    app.command("ems.cli.stop:stop", name="stop", help="Stop the pool node of this host.")
    app.command(
        "ems.cli.router:router",
        name=["router", "proxy"],
        help="Run the OpenAI-compatible router in front of prefill and decode servers.",
    )
    bench = App(name="bench", help="Measure the pool and what it gains.")
    bench.command("ems.cli.bench:pool", name="pool", help="Throughput and latency of the pool beside plain memcpy.")
    bench.command("ems.cli.bench:ttft", name="ttft", help="Time to first token in three steps on two servers.")
    app.command(bench)
    return app


def main(tokens: Sequence[str] | None = None) -> None:
    """Run one command line and leave the process with its exit status."""
    sys.exit(run(sys.argv[1:] if tokens is None else tokens))


def run(tokens: Sequence[str]) -> int:
    """Run one command line and return its exit status."""
    try:
        outcome = build_app()(list(tokens), result_action="return_value")
    except (CycloptsError, EmsError) as error:
        return _complain(error, tokens)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our stdout has gone; keep the interpreter from flushing into the pipe once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILURE
    return outcome if isinstance(outcome, int) and not isinstance(outcome, bool) else 0


def _complain(error: CycloptsError | EmsError, tokens: Sequence[str]) -> int:
    """Say in one line what is wrong and return the exit status that belongs to it."""
    if isinstance(error, UnknownCommandError):
        # Its own text would import every verb to guess what was meant.
        message = f"unknown command {' '.join(error.unused_tokens or tokens)!r}"
    else:
        message = " ".join(str(error).split()).removesuffix(".")
    print(f"error: {message}", file=sys.stderr)
    if isinstance(error, CycloptsError):
        print("\nhint: `ems --help` and `ems VERB --help` show what is expected", file=sys.stderr)
    return EXIT_USAGE if isinstance(error, (CycloptsError, ConfigError)) else EXIT_FAILURE
