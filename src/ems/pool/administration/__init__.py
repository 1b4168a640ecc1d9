"""What an administrator asks of a running node, and how the node does it without making anybody wait.

Brains only: ``service`` (does it, reports it), ``selection`` (which pages are meant), ``passes`` (long work in steps),
``clearing`` and ``refilling`` (with the tiers), ``resize`` (more or fewer segments), ``inspector`` (what there is),
``figures`` (what figures come to).
"""
