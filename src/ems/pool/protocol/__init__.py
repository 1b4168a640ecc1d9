"""The wire between engines and their node: every message, and how messages become bytes.

A frame is a 4-byte big-endian length and that many bytes of msgpack: one message, an array whose first
element is its tag.  A connection begins with ``Hello``, answered by ``Welcome``, ``Refused`` or, by a node with
tenants, ``Challenge``, which the client answers with ``Prove``; nothing else is accepted before ``Welcome``.  From
then on the client asks and the node answers in order, one answer a request; ``Release`` and ``Withdraw`` alone have
none.  ``SegmentAttached`` carries one file descriptor beside its bytes.

Versions: both sides name the oldest and newest they speak, the newest common one is used.  A later version
may add fields at the end of the greeting and of its answers, which an earlier one ignores.

``messages`` (every message), ``acts`` (what administrators ask), ``limits`` (how much a request has room for),
``coding`` (messages, frames, errors and bytes; versions; what has to add up).  Brains only: sockets are the client's
and the node's.
"""
