"""The router: one OpenAI-compatible address in front of prefill and decode servers.

Brains (no sockets, no event loop, no clock; the time is an argument):

- ``address``, ``config``: what the router was told;
- ``breaker``, ``fleet``: which instances there are, how busy they are, which of them may be used;
- ``request``, ``headers``, ``errors``: what is written into requests and answers;
- ``choice``, ``dispatch``: which instance a request goes to, and what happens next when that fails;
- ``counters``: what happened so far.

Shells: ``upstream`` (the HTTP client behind one seam), ``prober`` (asks instances for their health), ``exchange``
with ``watch`` and ``reply`` (one request on the hot path), ``admin``, ``models``, ``metrics`` and ``app`` (the pages),
and ``server`` (the process).

What always holds: a client gets either the bytes that an engine sent, or an error in OpenAI's form; an instance's load
returns to zero when its requests have ended, however they ended; every wait has an end.
"""
