"""The side of an engine: how a process talks to the node of its host.

Brains: ``answers`` (what a client names and is given, as plain data), ``retry`` (when a lost node is tried again),
``announced`` (which blocks an engine told others of).
Shells: ``introduction`` (reaches a node, greets, proves who this is), ``line`` (the connection, which mends itself),
``segments`` (the node's memory, mapped), ``pool_client`` (every verb).
"""
