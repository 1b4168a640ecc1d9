"""The router: one OpenAI-compatible address in front of prefill and decode servers.

Brains (no sockets, no event loop, no clock; the time is an argument):

- ``config``: what the router was told;
- ``breaker``, ``fleet``: which instances there are, how busy they are, which may be used, which takes a request;
- ``request``, ``errors``: what is read out of requests, and what the router itself answers;
- ``handoff``: what prefill and decode are sent, so that one computes the prompt's KV and the other goes on from it;
- ``dispatch``: what happens next when an instance fails;
- ``metrics``: what happened so far, and its page.

Packages of both: ``admission`` (who may send requests, how much, and when), ``observe`` (what is seen of requests),
``events`` (what engines have in their caches) and ``kthena`` (its objects).

Shells: ``prober`` and ``scraper`` (ask instances for their health and their figures), ``exchange`` with ``relay`` (one
request on the hot path), ``pages`` and ``app`` (all other pages), and ``server`` (the process).  Connections of clients
and to engines are :mod:`ems.http`, what engines say is in :mod:`ems.engines`.

What always holds: a client gets either the bytes that an engine sent, or an error in OpenAI's form; an instance's load
returns to zero when its requests have ended, however they ended; every wait has an end.
"""
