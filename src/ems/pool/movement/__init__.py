"""What moves between memory and the tiers below it, and when: brains only.

``write_back`` (what waits to be written, and what is offered before it leaves), ``promotion`` (what is being fetched),
``gate`` (is the tier well), ``speed`` (how fast it is, is it worth asking), ``tier_events`` (what others were told
of it).  They get events and the time and answer what is to be done; :mod:`ems.pool.tiers` does it.
"""
