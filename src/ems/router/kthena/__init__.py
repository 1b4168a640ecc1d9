"""Kthena's objects: which models there are, which instances serve them, which requests go where.

Brains: ``objects`` (what a ``ModelServer``, a ``ModelRoute`` and a ``Pod`` say, and what is wrong in one),
``manifests`` (objects out of YAML), ``routes`` (which rule a request meets), ``catalogue`` (all of it together, and
what it means for the fleet), ``mirror`` (what lists and watches of an API server tell).  Shells: ``folder`` (files),
``api_server`` with ``credentials`` (a Kubernetes API server), ``served`` (brings them into the fleet).

What always holds: defaults are set before anything is checked; what is wrong is refused with one sentence that names
the file, the object and the field, and changes nothing of what runs.
"""
