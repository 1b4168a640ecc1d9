"""What speaks to Kubernetes, or reads what was written for it, whatever the objects are for.

- ``objects``: what all objects have, and pods;
- ``manifests`` and ``folder``: objects out of YAML files;
- ``access`` and ``credentials``: how an API server is reached;
- ``mirror`` and ``informer``: the objects of an API server, followed by lists and watches.

What always holds: which kinds count is given as :class:`~ems.kubernetes.objects.Resource` s; nothing here knows one.
"""
