"""What a node decides about pages: one brain, in parts.

``pool_core`` (all of it), ``state`` (its parts), ``writing``, ``reading``, ``damage`` (what several parts do together),
``answers`` (what it says), ``namespaces``, ``leases`` and ``reservations`` (what readers and writers hold),
``slot_allocator`` (slots), ``deferred_frees`` (slots that nobody gets yet), ``index`` (what is there), ``eviction``
(what leaves), ``pins`` (what stays by request), ``reclaim`` (where a slot comes from), ``shares`` and ``quota`` (how
much each tenant may have), ``changes`` (what others are told).
"""
