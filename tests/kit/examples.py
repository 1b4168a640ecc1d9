"""How many examples property tests draw: all of theirs in ``make test``, the same share of them in ``make check``."""

from __future__ import annotations

from typing import Any

from hypothesis import settings

USUAL = 60
"""Of a test that names no number."""


def examples(count: int, **more: Any) -> settings:
    """Settings with ``count`` examples where a profile draws the usual number, and fewer where it draws fewer."""
    share = settings().max_examples / USUAL
    return settings(max_examples=max(round(count * share), 1), **more)
