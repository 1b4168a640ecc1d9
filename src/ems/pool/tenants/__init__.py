"""Tenants: who may use a node, how that is proven, what belongs to whom, and how much of the pool each may have.

Brains: ``names`` (what belongs to whom), ``scram`` (proofs), ``registry`` (tenants and their keys), ``limiter``
(failed attempts), ``gate`` (who is let in), ``shares`` (how much, and who gives way to whom), ``desk`` (what a tenant
may ask and is told).  Shells: ``store`` (the file), ``watch`` (the node reads it again).
A node without a tenants file is open: every connection is as good as another, and nothing of this is in its way.
"""
