"""What a node decides about pages: one brain, in parts.

``pool_core`` (all of it), ``writing``, ``reading`` (what several parts do together), ``namespaces``,
``leases`` and ``reservations`` (what readers and writers hold), ``slot_allocator`` (slots), ``deferred_frees`` (slots
that nobody gets yet), ``index`` (what is there), ``eviction`` (what leaves), ``pins`` (what stays by request),
``reclaim`` (where a slot comes from), ``shares`` (how much each tenant may have), ``changes`` (what others are told).
"""
