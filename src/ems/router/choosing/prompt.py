"""What of a request matters for choosing an instance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Prompt(NamedTuple):
    """A prompt by its size and its prefixes."""

    tokens: int
    """Estimated tokens of the prompt."""
    text_bytes: int
    """Bytes of JSON that ``tokens`` were estimated from."""
    hashes: Sequence[int]
    """See :func:`~ems.router.choosing.prefix_index.prefix_hashes`; with ``block_tokens``, of so many tokens each."""
    session: bytes = b""
    """The name of the conversation; empty where the client gave none."""
    block_tokens: int = 0
