"""Kthena's resource types, one module for each API group, and ``routes``: which of them a request meets.

What always holds: defaults are set before anything is checked; what is wrong is said with its field.
"""
