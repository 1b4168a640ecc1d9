"""Replays of recorded traffic through the pool's own brains: no bytes, no sockets, virtual time.

``traffic`` (traces, and what is made up), ``replay`` (a trace through a pool, and the optimum), ``residence`` (what a
tier below brings up in time), ``compare`` (policies side by side, shown).
"""
