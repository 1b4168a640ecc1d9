"""The memory itself: files that outlive the node and vouch for the pages in them.

Brains: ``plan`` (how many segments, which have no memory), ``recovery`` (what an earlier node left), ``verify`` (which
loads are checked).  Shells: ``folder`` (the node's directory), ``arena`` (all files of a node), ``headers`` (what
stands in them beside pages), ``segment_file`` (how the node gets at one), ``touch`` (first touch), ``node_state`` (what
the node knows of them), ``tail_file`` (tokens of blocks that are not full), ``side_file`` (small values beside them:
pins, tenants, segments given up), ``reader`` (is a page what was promised).
"""
