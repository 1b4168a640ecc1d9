"""EMS beside the other KV-cache pools that vLLM ships connectors for: same engine, model and requests, one table.

``contenders`` knows how each is started, ``procedure`` what is measured, ``usage`` what its processes consume,
``report`` what comes out.  It is started by ``benchmarks/peers.py``.
"""
