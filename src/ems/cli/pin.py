"""``ems pin`` and ``ems unpin``: keep pages from being evicted, and let them again."""

from __future__ import annotations

from ems.cli.acts import ask
from ems.cli.options import CHANGING, Changing
from ems.cli.shown import complain, counted, print_json, say
from ems.config import parse_duration
from ems.errors import ConfigError
from ems.pool.core.pins import MAX_PIN_SECONDS
from ems.pool.keys import KEY_BYTES, split_keys
from ems.pool.protocol.acts import Pin


def pin(namespace: str, /, *keys: str, lasting: str = "0", asked: Changing = CHANGING) -> int:
    """Keep pages from being evicted: those of the keys, or all that the namespace has by now.

    Exit status 1 when one of the keys is not in memory, or has no room among the pins.

    Args:
        namespace: The pages' namespace, as `ems list` shows it.
        keys: Keys of 32 hex digits, consecutive blocks.
        lasting: How long, such as 15m or 12h, a day at most; 0 is a day.
    """
    seconds = parse_duration(lasting, name="--lasting")
    if seconds > MAX_PIN_SECONDS:
        raise ConfigError(f"--lasting is {lasting!r}, expected a day at most; pin again before it is over")
    return _tell(Pin(namespace, parse_keys(keys), seconds=seconds), "pin", asked)


def unpin(namespace: str, /, *keys: str, asked: Changing = CHANGING) -> int:
    """Let pinned pages be evicted again: those of the keys, or all of the namespace.

    Exit status 1 when one of the keys is not pinned.

    Args:
        namespace: The pages' namespace, as `ems list` shows it.
        keys: Keys of 32 hex digits.
    """
    return _tell(Pin(namespace, parse_keys(keys), pinned=False), "unpin", asked)


def parse_keys(keys: tuple[str, ...]) -> bytes:
    raw = b""
    for key in keys:
        try:
            one = bytes.fromhex(key)
        except ValueError:
            one = b""
        if len(one) != KEY_BYTES:
            raise ConfigError(f"{key[:80]!r} is no key, expected {2 * KEY_BYTES} hex digits")
        raw += one
    return raw


def _tell(act: Pin, verb: str, asked: Changing) -> int:
    report = ask(asked.at, act, dry_run=asked.dry_run)
    wanted = len(set(split_keys(act.keys)))
    missing = max(wanted - report["pages"] - report["refused"], 0)
    if asked.json:
        print_json({**report, "dry_run": asked.dry_run})
    else:
        done = f"would {verb}" if asked.dry_run else f"{verb}ned"
        say(
            f"{done} {counted(report['pages'], 'page')}; of the namespace {counted(report['pinned'], 'page')} "
            f"{'is' if report['pinned'] == 1 else 'are'} pinned"
        )
    if missing:
        verb = "is" if missing == 1 else "are"
        why = "not in memory, look with `ems show KEY`" if act.pinned else "not pinned"
        complain(f"{missing} of {counted(wanted, 'key')} {verb} {why}")
    if report["refused"]:
        complain(f"{counted(report['refused'], 'page')} more would be over half of the namespace's room")
    return 1 if missing or report["refused"] else 0
