"""What a node decides about pages: one brain, in parts.

``pool_core`` (every verb), ``answers`` (what it says), ``namespaces``, ``leases`` and ``reservations`` (what readers
and writers hold), ``rest`` (slots that nobody gets), ``index`` (what is there), ``eviction`` (what leaves), ``kept``
(what stays by request), ``room`` (for whom), ``space`` (slots), ``changes`` (what others are told), ``handover`` (all
of it, for a node that takes over), ``soundness`` (does a state hold together).
"""
