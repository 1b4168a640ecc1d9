"""What of a request matters for choosing an instance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Prompt(NamedTuple):
    """A prompt by its size and its prefixes."""

    tokens: int
    """Tokens of the prompt, estimated where it is text of which no engine said them."""
    text_bytes: int
    """Bytes of JSON that ``tokens`` were estimated from."""
    hashes: Sequence[int]
    """See :func:`~ems.router.choosing.prefix_index.prefix_hashes`; with ``block_tokens``, of so many tokens each."""
    session: bytes = b""
    """The name of the conversation; empty where the client gave none."""
    block_tokens: int = 0
    text_hashes: Sequence[int] = ()
    """Of a text with known tokens: learned beside ``hashes``, for when an engine does not say the tokens."""
