"""Kthena's objects in the router: which models there are, which instances serve them, which requests go where.

Brains: ``objects`` (what of them is read here), ``catalogue`` (all of it together, and what it means for the fleet),
``router_file`` (which plugins choose), ``config_dump`` (what is served, as Kthena's pages).  Shells: ``sources``
(manifests, or an API server), ``served`` (brings them into the fleet).

What always holds: what is wrong is refused with one sentence that names the file, the object and the field, and changes
nothing of what runs.
"""
