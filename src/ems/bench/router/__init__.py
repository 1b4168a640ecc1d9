"""What a router costs: its CPU time for each request and chunk, and the latency that it adds, beside other routers.

- ``stub``: engines that answer from memory;
- ``load``: clients;
- ``contenders``: which routers are measured, and how each is started;
- ``measure``: the rounds, and the report.
"""
