"""What a node shows over HTTP: ``metrics`` (its figures in Prometheus' form), ``app`` (all pages), ``server``.

Read only: everything that changes the pool goes over its private socket.  A node with tenants shows what it holds to
who knows the token only, because that says who is there and how busy; without a token to nobody.
"""
