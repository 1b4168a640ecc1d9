"""Where pages live below this host's memory: a directory or an object store.

Here belong a tier's stored form, its kinds, and the threads that carry bytes between them and the segments. What is
written when and what is fetched when is decided in :mod:`ems.pool.movement`, which knows no tier by name.
Brains: ``pack_format`` (bytes of a pack), ``catalogue`` (what is in which pack), ``settings`` (what ``--tier`` means).
"""
