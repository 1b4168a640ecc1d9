"""The memory pool of one host: pages of KV state in shared memory, found by the hash of their prefix.

Brains (``index``, ``eviction``, ``core``) decide and know neither a socket nor a clock; shells (``arena``,
``protocol``, ``node``, ``client``, ``launcher``) carry.  Nothing in here knows an engine or a tensor.
"""
