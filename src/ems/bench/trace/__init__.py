"""Replays of recorded traffic through the pool's own brains: no bytes, no sockets, virtual time.

Brains: replay (a trace through a pool), belady (what could be had at most), made (traffic that is made up), residence
(what a tier below brings up in time).  Shells: files (reading), report (tables and plots).
"""
