"""Which page leaves first: one seam (``seam``), and the policies behind it.

A policy orders the present pages of one namespace and knows nothing else: no slots, no leases, no namespaces.  What may
not leave is decided above it (:mod:`ems.pool.core.eviction`).  All of it are brains.
"""
