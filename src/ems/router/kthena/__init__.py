"""Kthena's ``ModelServer`` and ``ModelRoute`` as the router's configuration: read, checked, matched."""
