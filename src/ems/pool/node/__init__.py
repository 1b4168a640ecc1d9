"""The daemon of one host.

``pool_node`` (puts it together), ``listener``, ``clients`` and ``connection`` (who is connected), ``rounds`` and
``client_limits`` (who waits for whom), ``applier`` (does what the brain says is to be done), ``memory`` (touches,
watches and replaces the memory of segments), ``admin_runner`` (an administrator's work), ``audit`` (what is written
down), ``launcher`` (starts a node), ``restart`` (becomes another release).
"""
