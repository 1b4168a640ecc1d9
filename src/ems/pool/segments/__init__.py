"""The memory itself: files that outlive the node and vouch for the pages in them.

Brains: ``plan`` (how many segments, which have no memory), ``recovery`` (what an earlier node left), ``reader`` (is a
page what was promised, and which are checked).  Shells: ``folder`` (the node's directory), ``arena`` (all files of a
node), ``headers`` (what stands in them beside pages), ``segment_file`` (how the node gets at one), ``touch`` (first
touch), ``tail_file`` (tokens of blocks that are not full), ``side_file`` (small values beside them: what the node knows
of them, pins, tenants, segments given up).
"""
