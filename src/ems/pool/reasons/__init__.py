"""Why something is not in the pool, and how the node knows: one vocabulary, and bounded memories of what went by.

Brains only: ``words`` (every reason, what it is called and what it says), ``eviction_log`` (keys that are gone),
``misses`` (all of it together, asked at each miss, and which request looked for what).
"""
