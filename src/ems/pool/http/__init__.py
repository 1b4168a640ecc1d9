"""What a node shows over HTTP, and what it may be told there.

``metrics`` (its figures in Prometheus' form), ``app`` (all pages), ``server`` (its connections), ``prefetch`` (the page
to which come hints of what will be asked for soon; ``prefetch_hints`` and ``prefetch_client`` are their sender).
Everything else that changes the pool goes over its private socket.  What the pool holds is shown to who knows the
token only, because anybody on the host can connect; without a token to nobody.
"""
