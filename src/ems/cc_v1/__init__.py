"""Context caching, version 1: what the SDK does for one rank of one engine.

The names in here are a contract with integrations that exist; they change only by addition.
"""
