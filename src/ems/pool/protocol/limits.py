"""How much a request has room for, the bound of every name, list and string of bytes in it, and how long it may take.

:mod:`ems.pool.protocol.messages` says which field has which; what is longer is refused while it is read, before memory
is spent on it.  A character counts as four bytes at most.
"""

from __future__ import annotations

from ems.pool.keys import KEY_BYTES

MAX_KEYS = 65536
"""Most keys of one request: a prompt of a million tokens in blocks of sixteen.  No request takes longer than these."""
MAX_KEY_BYTES = MAX_KEYS * KEY_BYTES
TOKEN_BYTES = 4
CHECKSUM_BYTES = 4
TAIL_FRAME_BYTES = 32
"""What a tail takes in a request beside its tokens, and its position."""
MAX_TAIL_BYTES = 2 << 20
"""What a client sends of tails in one request: with the most keys it still fits into a frame, which bounds both."""
MAX_SHARDS = 256
"""Other pages of a chunk that come up together with one that is found by its tokens."""
MAX_ID = 256
"""Characters of a request's id that count."""
MAX_CORRUPT = 64
"""Most pages of one :class:`Corrupt`: the node looks at the bytes of each."""
MAX_TEXT = 1024
"""Characters of what a client calls itself, and of the longest text in an act."""
MAX_NAMESPACES_ASKED = 4096
"""Most namespaces whose changes are asked for in one request: as many as a node has."""
MAX_PATIENCE = 1_000_000
"""Microseconds that a node may be asked to wait for its tiers: while it does, it reads nothing from that client."""
MAX_CREDENTIAL = 128
"""Characters of the longest access id, and bytes of the longest nonce or proof, that is read."""
GREETING_SECONDS = 5.0
"""How long a client may take to greet."""
FRAME_SECONDS = 10.0
"""How long a client may take to send a frame that it has begun."""
NONCE_BYTES = 16
"""Bytes of the random number with which each side makes a greeting its own."""
PROOF_BYTES = 32
"""Bytes of a proof that a side knows an access key."""
