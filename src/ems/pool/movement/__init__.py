"""What moves between memory and the tiers below it, and when: brains only.

``pre_eviction`` (what is offered before it leaves), ``write_back`` (what waits to be written), ``promotion`` (what is
being fetched), ``gate`` (is the tier well), ``speed`` (how fast it is, is it worth asking).  They get events and the
time and answer what is to be done; :mod:`ems.pool.tiers` does it.
"""
