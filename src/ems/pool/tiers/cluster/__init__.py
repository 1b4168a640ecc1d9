"""The memory of many hosts as one tier, on Mooncake Store.

Mooncake's client is C++: it ends its process where versions differ, waits without end for a master that is not there,
and goes on writing into memory after a transfer that it gave up.  It lives in processes of its own (``agent``), which
are killed when they fail; the node sees a tier that has pages or has not.

``mooncake_config`` (the file and the environment that people have), ``objects`` (a page as an object, and its seal),
``known`` (what is known of the cluster's keys) and ``silent_hosts`` are brains; ``calls`` is what a node and its agents
say to each other, ``agent_process`` the node's end of it, ``tier`` the tier itself.
"""
