"""The memory pool of one host: pages of KV state in shared memory, found by the hash of their prefix.

``core`` decides and knows neither a socket nor a clock; ``segments`` is the memory; ``node`` is the daemon around both,
and ``client`` the side of an engine; ``protocol`` is what they say to each other.  Nothing in here knows an engine or a
tensor.
"""
