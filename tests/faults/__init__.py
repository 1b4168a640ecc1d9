"""A pool that is hurt on purpose, and a plain account of what must be left of it.

``points`` ends a node between any two of its writes, ``clients`` are its clients, ``world`` is a node on real files
with its clients and the account.  What can happen is in ``writers``, ``readers``, ``turns`` and ``damage``, listed in
``steps``; ``history`` makes, runs and shrinks histories of such steps.  A history is numbers only: the same seed is the
same history, and any part of one can be run by itself.
"""
