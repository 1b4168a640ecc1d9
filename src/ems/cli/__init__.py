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
    app.command("ems.cli.explain:explain", name="explain", help="Say why a prompt, a request or a key was a miss.")
    app.command("ems.cli.listing:listing", name="list", help="List what the pool holds: namespaces, models or tenants.")
    app.command("ems.cli.show:show", name="show", help="Show a namespace or a page.")
    app.command("ems.cli.clear:clear", name="clear", help="Take pages out of the pool: memory and tiers.")
    app.command("ems.cli.pin:pin", name="pin", help="Keep pages from being evicted.")
    app.command("ems.cli.pin:unpin", name="unpin", help="Let pinned pages be evicted again.")
    app.command("ems.cli.warm:warm", name="warm", help="Bring pages from a lower tier into memory.")
    app.command("ems.cli.drain:drain", name="drain", help="Let the node take nothing new in, and stop it if wished.")
    app.command("ems.cli.resize:resize", name="resize", help="Give the running pool another size.")
    app.command("ems.cli.health:health", name="health", help="Say what is well with the node and what is not.")
    app.command("ems.cli.stop:stop", name="stop", help="Stop the pool node of this host.")
    app.command("ems.cli.upgrade:upgrade", name="upgrade", help="Swap the pool node's process under live load.")
    app.command("ems.cli.fsck:fsck", name="fsck", help="Check a tier below memory and mend it.")
    app.command(
        "ems.cli.router:router",
        name=["router", "proxy"],
        help="Run the OpenAI-compatible router in front of prefill and decode servers.",
    )
    tenant = App(name="tenant", help="Who may use a node, and how much of its pool.")
    tenant.command("ems.cli.tenant:add", name="add", help="Let somebody in.")
    tenant.command("ems.cli.tenant:list_", name="list", help="List the tenants.")
    tenant.command("ems.cli.tenant:show", name="show", help="Show one tenant and its keys.")
    tenant.command("ems.cli.tenant:set_", name="set", help="Change a tenant's quota.")
    tenant.command("ems.cli.tenant:remove", name="remove", help="Remove a tenant, its keys and its pages.")
    app.command(tenant)
    key = App(name="key", help="Access keys of tenants.")
    key.command("ems.cli.key:add", name="add", help="Make a key; it is shown this once.")
    key.command("ems.cli.key:list_", name="list", help="List a tenant's keys.")
    key.command("ems.cli.key:rotate", name="rotate", help="Make a key; the others go on for a while.")
    key.command("ems.cli.key:revoke", name="revoke", help="End a key, and the connections that it opened, at once.")
    app.command(key)
    bench = App(name="bench", help="Measure the pool and what it gains.")
    bench.command("ems.cli.bench:pool", name="pool", help="Throughput and latency of the pool beside plain memcpy.")
    bench.command("ems.cli.bench_tier:tier", name="tier", help="A directory tier beside plain I/O on the same disk.")
    bench.command("ems.cli.bench:ttft", name="ttft", help="Time to first token in three steps on two servers.")
    bench.command("ems.cli.bench_trace:trace", name="trace", help="Replay a trace: which policy hits how often.")
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
