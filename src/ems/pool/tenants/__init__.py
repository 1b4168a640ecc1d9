"""Tenants: who may use a node, how that is proven, and what each may ask.

Brains: ``scram`` (proofs), ``registry`` (tenants and their keys), ``gate`` (who is let in), ``request_filter`` (what a
tenant may ask and is told).  Shells: ``store`` (the file, and reading it again), ``tenancy`` (all of it, for the node).
A node without a tenants file is open: every connection is as good as another, and nothing of this is in its way.
"""
