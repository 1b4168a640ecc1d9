"""What a node shows over HTTP.

``metrics`` (its figures in Prometheus' form), ``app`` (all pages), ``server`` (its connections).
Read only: everything that changes the pool goes over its private socket.  What the pool holds is shown to who knows the
token only, because anybody on the host can connect; without a token to nobody.
"""
