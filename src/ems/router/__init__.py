"""The router: one OpenAI-compatible address in front of prefill and decode servers.

Brains (no sockets, no event loop, no clock; the time is an argument):

- ``config``: what the router was told;
- ``breaker``, ``fleet``: which instances there are, how busy they are, which may be used, which takes a request;
- ``request``, ``headers``: what is written into requests and answers;
- ``dispatch``: what happens next when an instance fails;
- ``metrics``: what happened so far, and its page.

Packages of both: ``admission`` (who may send requests, how much, and when) and ``observe`` (what is seen of requests).

Shells: ``http`` (connections of clients, and to engines), ``prober`` (asks instances for their health), ``exchange``
with ``relay`` and ``reply`` (one request on the hot path), ``pages`` and ``app`` (all other pages), and ``server`` (the
process).

What always holds: a client gets either the bytes that an engine sent, or an error in OpenAI's form; an instance's load
returns to zero when its requests have ended, however they ended; every wait has an end.
"""
