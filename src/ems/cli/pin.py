"""``ems pin`` and ``ems unpin``: keep pages from being evicted, and let them again."""

from __future__ import annotations

from ems.cli.acts import answer, ask
from ems.cli.options import CHANGING, Changing
from ems.config import parse_duration
from ems.errors import ConfigError
from ems.pool.keys import KEY_BYTES
from ems.pool.protocol.acts import Pin


def pin(namespace: str, /, *keys: str, lasting: str = "0", asked: Changing = CHANGING) -> None:
    """Keep pages from being evicted: those of the keys, or all that the namespace has by now.

    Parameters
    ----------
    namespace
        The pages' namespace, as `ems list` shows it.
    keys
        Keys of 32 hex digits, consecutive blocks.
    lasting
        How long, such as 15m or 12h, a day at most; 0 is a day.
    """
    act = Pin(namespace, parse_keys(keys), seconds=parse_duration(lasting, name="--lasting"))
    _tell(act, "pin", asked)


def unpin(namespace: str, /, *keys: str, asked: Changing = CHANGING) -> None:
    """Let pinned pages be evicted again: those of the keys, or all of the namespace.

    Parameters
    ----------
    namespace
        The pages' namespace, as `ems list` shows it.
    keys
        Keys of 32 hex digits.
    """
    act = Pin(namespace, parse_keys(keys), pinned=False)
    _tell(act, "unpin", asked)


def parse_keys(keys: tuple[str, ...]) -> bytes:
    """Keys given as hex digits.

    Raises:
        ConfigError: one is no key.
    """
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


def _tell(act: Pin, verb: str, asked: Changing) -> None:
    report = ask(asked.at, act, dry_run=asked.dry_run)
    done = f"would {verb}" if asked.dry_run else f"{verb}ned"
    refused = f"; {report['refused']} more would be over half of its room" if report["refused"] else ""
    text = f"{done} {report['pages']} pages; {report['pinned']} pages of the namespace are pinned{refused}"
    answer(report, text, asked)
