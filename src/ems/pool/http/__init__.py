"""What a node shows over HTTP, and what it may be told there.

``metrics`` (its figures in Prometheus' form), ``app`` (all pages), ``server`` (its connections), ``prefetch`` (the page
to which is told what will be asked for soon; ``tells`` and ``teller`` are the other side of it).
Everything else that changes the pool goes over its private socket.  What the pool holds is shown to who knows the
token only, because anybody on the host can connect; without a token to nobody.
"""
