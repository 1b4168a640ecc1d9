"""Replays of recorded traffic through the pool's own brains: no bytes, no sockets, virtual time.

``traffic`` (traces, and what is made up), ``replay`` (a trace through a pool, alone or above a tier, and the optimum),
``compare`` (policies side by side, shown).
"""
