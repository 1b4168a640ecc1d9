"""What an administrator asks of a running node, and how the node does it without making anybody wait.

Brains only: ``selection`` (which pages are meant), ``passes`` (long work in steps),
``pins`` (what may not leave), ``resize`` (more or fewer segments),
``service`` (does it, reports it), ``health`` (what is well and what is not).
"""
