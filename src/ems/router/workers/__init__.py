"""Several processes that serve one port and choose as one router would: ``ems router --workers``.

Brains: ``messages`` (what is said), ``shares`` (loads and prefixes of all), ``totals`` (metrics pages summed up),
``restarts`` (when a worker that ended is followed).
Shells: ``parent`` (the processes), ``link`` (what a worker hears and says), ``pages`` (pages that ask the others).

What always holds: with one worker nothing of this is loaded; a worker waits for no other before it sends a request on;
what a worker that is gone had counts no longer.
"""
